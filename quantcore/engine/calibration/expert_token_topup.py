"""Adds tokens for experts that see few: a mixture sends most of a text past some of its experts.

Legend: T tokens, H hidden size, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import nn

from quantcore.engine.calibration.reduction import Span
from quantcore.engine.model.experts import SplitExperts
from quantcore.engine.runtime.shards import counts, idling

MIN_TOKENS = 16  # fewer say little about the tokens to come
EXPERT_SHARE = 0.005  # of the tokens: an expert that saw fewer was hardly calibrated

_LENT: ContextVar[bool] = ContextVar("lent", default=False)


def are_lent() -> bool:
    """Return True while an expert runs on tokens that the model did not send to it."""
    return _LENT.get()


@dataclass
class _Seen:
    """The number of tokens that reached a mixture, how many of each run went to each expert, and some of the tokens.

    ``counts`` has a tensor [E] for each run of the block, ``samples`` a tensor [n, H] for each window.
    """

    num_tokens: int = 0
    counts: list[torch.Tensor] = field(default_factory=list)
    samples: list[torch.Tensor] = field(default_factory=list)

    def merge(self, later: _Seen) -> None:
        self.num_tokens += later.num_tokens
        self.counts += later.counts
        self.samples += later.samples


class TokenTopup:
    """Watches mixtures of a block while all windows run, and then runs some experts on tokens of the others.

    They are the mixtures with hooks on the layers of an expert, which learn something from the windows.

    An expert that saw fewer than ``EXPERT_SHARE`` of the tokens, or fewer than ``MIN_TOKENS``, gets as many tokens as
    it lacks. They are spread evenly over the text, so that its statistics are a mean of those of its own tokens and of
    all tokens of the mixture, by their numbers: the fewer it saw, the more it takes from the others. What the model
    computes does not change. The rank with the last window runs the experts; if they are sharded, all ranks do.
    """

    def __init__(self, block: nn.Module, span: Span) -> None:
        mixtures = {name: part for name, part in block.named_modules() if isinstance(part, SplitExperts)}
        self._mixtures = {name: part for name, part in mixtures.items() if any(map(_is_watched, part.children()))}
        self._span = span
        self._seen = {name: _Seen() for name in self._mixtures}
        self._num_windows = 1
        self._is_paused = False

    def begin(self, state: torch.Tensor) -> None:
        """Announce the next windows, [N, T, H] in front of the block."""
        self._num_windows = len(state)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the hooks on the mixtures while this lasts."""
        handles = [
            part.register_forward_pre_hook(self._hook(name), with_kwargs=True) for name, part in self._mixtures.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore runs inside the block."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def lend(self) -> None:
        """Run the experts that saw few tokens, if somebody watches their layers. All ranks call it."""
        ranks = self._span.ranks
        for name, experts in self._mixtures.items():
            first, *others = ranks.gather(self._seen[name])
            for other in others:
                first.merge(other)
            if not first.samples:
                continue
            tokens_RH = torch.cat(first.samples)
            wanted = max(MIN_TOKENS, ceil(EXPERT_SHARE * first.num_tokens))
            for index, count in enumerate(torch.stack(first.counts).sum(0).tolist()):
                missing = min(wanted - count, len(tokens_RH))
                if missing > 0 and _is_watched(experts.get_submodule(str(index))):
                    x_TH = tokens_RH[_spread(missing, len(tokens_RH), tokens_RH.device)]
                    if ranks.rank == ranks.size - 1:
                        with _lending():
                            experts.run_expert(index, x_TH)
                    elif experts.runs_all:
                        with idling():
                            experts.run_expert(index, x_TH)

    def _hook(self, name: str):  # type: ignore[no-untyped-def]  # a hook
        def see(experts: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            x_TH = (inputs[0] if inputs else named["hidden_states"]).flatten(0, -2)
            index_TK = inputs[1] if len(inputs) > 1 else named.get("top_k_index")
            if index_TK is None or self._is_paused or not counts(x_TH):
                return
            windows = x_TH.reshape(self._num_windows if len(x_TH) % self._num_windows == 0 else 1, -1, x_TH.shape[-1])
            length = windows.shape[1]
            num_kept = max(ceil(EXPERT_SHARE * length), ceil(MIN_TOKENS / max(1, self._span.num_windows)))
            kept = windows[:, _spread(min(num_kept, length), length, x_TH.device)]
            numbers_E = torch.arange(experts.num_experts, device=index_TK.device)
            counts_E = (index_TK.reshape(-1, 1) == numbers_E).sum(0)  # bincount would wait for an accelerator
            self._seen[name].merge(_Seen(len(x_TH), [counts_E], list(kept.clone())))

        return see


@contextmanager
def _lending() -> Iterator[None]:
    before = _LENT.set(True)
    try:
        yield
    finally:
        _LENT.reset(before)


def _spread(count: int, length: int, device: torch.device) -> torch.Tensor:
    """Return ``count`` of the numbers below ``length``, spread evenly."""
    return (torch.arange(count, device=device) * 2 + 1) * length // (2 * count)


def _is_watched(expert: nn.Module) -> bool:
    return any(layer._forward_pre_hooks or layer._forward_hooks for layer in expert.children())
