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
        for sequence, other in zip(sequences, references, strict=True):
            sums.add(sequence, other, self._sample_a_window, self._num_windows)
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

    def add(self, x_TI: torch.Tensor, reference_TI: torch.Tensor | None, num_sampled: int, num_windows: int) -> None:
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
        if self._gram is not None:
            _add_gram(self._gram, wide)
        if self._shift is not None and reference_TI is not None:
            self._shift.addmm_((reference_TI.to(wide.dtype) - wide).T, wide)
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


def _add_gram(gram_II: torch.Tensor, x_TI: torch.Tensor) -> None:
    """Add x^T x, of which only the blocks on and below the diagonal are computed."""
    width = ceil(len(gram_II) / NUM_PANELS)
    for start in range(0, len(gram_II), width):
        end = start + width
        gram_II[start:end, :end].addmm_(x_TI[:, start:end].T, x_TI[:, :end])


def _whole(lower_II: torch.Tensor) -> torch.Tensor:
    """The symmetric matrix whose lower triangle is given; overwrites the rest of it."""
    return lower_II.tril_().add_(lower_II.tril(-1).T)
