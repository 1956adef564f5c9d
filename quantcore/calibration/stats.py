"""What calibration learns about the inputs of layers, gathered with hooks while a block runs.

Legend: T tokens, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from weakref import ReferenceType, ref

import torch
from torch import nn

from quantcore.stats import Needs, Stats

NUM_PANELS = 4  # of a gram matrix, of which the upper triangle is never computed: 10/16 of the work


class StatsCollector:
    """Watches the inputs of modules. Modules that read the same tensor share one set of sums, found as they run.

    Every sequence is added by itself, in the order of the text: how the text is cut into batches changes no bit.
    """

    def __init__(self, modules: Mapping[str, nn.Module], needs: Needs, num_windows: int) -> None:
        self._modules = modules
        self._needs = needs
        self._num_windows = max(1, num_windows)
        self._sample_a_window = ceil(needs.sample / self._num_windows)
        self._sums: dict[str, _Sums] = {}
        self._seen: dict[int, tuple[ReferenceType[torch.Tensor], _Sums]] = {}
        self._reference: dict[str, torch.Tensor] = {}
        self._is_reference = False
        self._weights: torch.Tensor | None = None

    def begin(self, state: torch.Tensor) -> None:
        """The next windows come, [1 or more, T, H] in front of the block: their tokens count as they are long."""
        self._weights = token_weights(state)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The hooks are there while this lasts."""
        handles = [module.register_forward_pre_hook(self._hook(name)) for name, module in self._modules.items()]
        try:
            yield
        finally:
            self._seen.clear()
            for handle in handles:
                handle.remove()

    @contextmanager
    def reference(self) -> Iterator[None]:
        """What runs inside is the float model on the next window: the ``y`` of ``Stats.shift_II``."""
        self._reference.clear()
        self._is_reference = True
        try:
            yield
        finally:
            self._is_reference = False

    def stats(self) -> dict[str, Stats]:
        """Of every module that saw a token, in the order in which they first ran; the same object for one input."""
        made: dict[int, Stats] = {}
        for sums in self._sums.values():
            if id(sums) not in made:
                made[id(sums)] = sums.stats()
        return {name: made[id(sums)] for name, sums in self._sums.items()}

    def _hook(self, name: str):  # type: ignore[no-untyped-def]  # a hook
        def see(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if self._is_reference:
                self._reference[name] = inputs[0]
            else:
                self._add(name, inputs[0])

        return see

    def _add(self, name: str, x: torch.Tensor) -> None:
        if x.numel() == 0:
            return
        if id(x) in self._seen and self._seen[id(x)][0]() is x:  # another module read it, too
            self._sums.setdefault(name, self._seen[id(x)][1])
            return
        if name not in self._sums:
            self._sums[name] = _Sums(x.shape[-1], self._needs, x.device)
        sums = self._sums[name]
        reference = self._reference.get(name)
        sequences = x.reshape(-1, *x.shape[-2:])
        if reference is None or reference.shape != x.shape:  # an expert may get other tokens
            references = [None] * len(sequences)
        else:
            references = list(reference.reshape_as(sequences))
        weights: list[torch.Tensor | None] = [None] * len(sequences)
        if self._weights is not None and self._weights.shape == x.shape[:-1]:  # an expert gets some of the tokens
            weights = list(self._weights)
        for sequence, other, weight_T in zip(sequences, references, weights, strict=True):
            sums.add(sequence, other, weight_T, self._sample_a_window, self._num_windows)
        self._seen[id(x)] = (ref(x), sums)


class _Sums:
    """Of one input; sums are float32 or float64."""

    def __init__(self, num_inputs: int, needs: Needs, device: torch.device) -> None:
        self._needs = needs
        dtype = torch.float64 if needs.float64 else torch.float32
        self.num_tokens = 0
        self._largest = torch.zeros(num_inputs, device=device)
        self._sum = torch.zeros(num_inputs, dtype=torch.float64, device=device)
        self._sum_abs = torch.zeros(num_inputs, dtype=torch.float64, device=device)
        self._gram = torch.zeros(num_inputs, num_inputs, dtype=dtype, device=device) if needs.gram else None
        self._shift = torch.zeros(num_inputs, num_inputs, dtype=dtype, device=device) if needs.shift else None
        self._num_shifted = 0
        self._samples: list[torch.Tensor] = []

    def add(
        self, x_TI: torch.Tensor, reference_TI: torch.Tensor | None, weight_T: torch.Tensor | None, num_sampled: int,
        num_windows: int,
    ) -> None:  # fmt: skip
        """Take in one of about ``num_windows`` sequences, and keep ``num_sampled`` of its tokens."""
        num_tokens = len(x_TI)
        self.num_tokens += num_tokens
        if num_sampled:
            step = max(1, num_tokens // num_sampled)
            first = len(self._samples) * step // num_windows % step  # the first token of a text is often like no other
            self._samples.append(x_TI[first::step][:num_sampled].clone())
        wide = x_TI.to(torch.float64 if self._needs.float64 else torch.float32)
        self._sum += wide.sum(0)
        magnitude = wide.abs()
        self._sum_abs += magnitude.sum(0)
        self._largest = torch.maximum(self._largest, magnitude.amax(0).float())
        weight_T1 = None if weight_T is None else weight_T.to(wide.dtype).unsqueeze(1)
        if self._gram is not None:
            _add_gram(self._gram, wide if weight_T1 is None else wide * weight_T1.sqrt())
        if self._shift is not None and reference_TI is not None:
            moved = reference_TI.to(wide.dtype) - wide
            self._shift.addmm_(moved.T, wide if weight_T1 is None else wide * weight_T1)
            self._num_shifted += num_tokens

    def stats(self) -> Stats:
        sample = torch.cat(self._samples)[: self._needs.sample] if self._samples else None
        return Stats(
            num_tokens=self.num_tokens,
            largest_I=self._largest,
            mean_I=(self._sum / self.num_tokens).float(),
            mean_abs_I=(self._sum_abs / self.num_tokens).float(),
            gram_II=None if self._gram is None else _whole(self._gram).div_(self.num_tokens),
            sample_TI=sample,
            shift_II=self._shift / self._num_shifted if self._shift is not None and self._num_shifted else None,
        )


def token_weights(state: torch.Tensor) -> torch.Tensor:
    """How much each token [.., T] of hidden states [.., T, H] counts: as it is long, 1 on the average of a window.

    A token that is much longer than others is one that all others look at, the first of a text above all (attention
    sinks, Xiao et al. 2023; massive activations, Sun et al. 2024): an error in it is an error in all. That tokens ought
    not to count alike is due to RSQ (Sung et al. 2025), which goes by the attention that they get.
    """
    length = state.detach().float().norm(dim=-1)
    weights: torch.Tensor = length / length.mean(dim=-1, keepdim=True).clamp(min=torch.finfo(length.dtype).tiny)
    return weights


def _add_gram(gram_II: torch.Tensor, x_TI: torch.Tensor) -> None:
    """Add x^T x, of which only the blocks on and below the diagonal are computed."""
    width = ceil(len(gram_II) / NUM_PANELS)
    for start in range(0, len(gram_II), width):
        end = start + width
        gram_II[start:end, :end].addmm_(x_TI[:, start:end].T, x_TI[:, :end])


def _whole(lower_II: torch.Tensor) -> torch.Tensor:
    """The symmetric matrix whose lower triangle is given; overwrites the rest of it."""
    return lower_II.tril_().add_(lower_II.tril(-1).T)
