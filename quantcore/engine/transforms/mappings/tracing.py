"""Traces each input channel of a linear layer to the layer outputs it comes from, without knowledge of the model.

A block is run with all its layers' outputs *given* as tiny random numbers. Attention then weights all tokens alike,
gates and activations are nearly linear, and only the operations between layers are computed, so runs are cheap. If
output n is multiplied by a factor f(n), an input that comes from it is multiplied by f(n) too; one that is the product
of two outputs, a and b (a gated MLP), by f(a) f(b). With factors of two to the power of a digit of n, and of n squared,
a few runs give a + b and a^2 + b^2 for every channel of every layer at once. Another run with numbers of all sizes
decides whether a scale really passes (``search``).

Legend: N outputs of all layers together, O those of one layer, I inputs of one, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from quantcore.checkpoint.experts import find_routers
from quantcore.engine.transforms.mappings.record import BlockRecord, Run, as_float32, find_layers, record_block, widened
from quantcore.engine.transforms.mappings.scale_pair import ScalePair, shape_of

DIGIT_BITS = 4
TINY_EXPONENTS = (-46, -44)
"""Exponents of two that stay below -28 with a digit added.

Squares then vanish beside the epsilon of a norm, and products of two (above -92) are still normal numbers of float32.
"""
ALL_EXPONENTS = (-3, 6)
FACTOR_TOLERANCE = 1e-3
"""Relative tolerance of a factor that is a power of two: rounding errors are far smaller, wrong factors far larger."""


@dataclass(frozen=True)
class Reading:
    """Linear layers that read one tensor, and the edges that may lead to it: none, one, or one for each factor."""

    names: tuple[str, ...]
    candidates: tuple[ScalePair, ...] = ()


@dataclass
class Replay:
    """The block with given outputs.

    ``sources`` are the layers whose outputs are traced, with the number of outputs; other layers (convolutions, and
    routers, so that experts get the same tokens in every run) return the outputs recorded in ``plain``, a run of the
    block as it is. ``readers`` are the linear layers whose inputs are traced, ``others`` those without a single input.
    """

    block: nn.Module
    run: Run
    plain: BlockRecord
    sources: dict[str, int] = field(init=False)
    readers: list[str] = field(init=False)
    others: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.sources, self.readers, self.others = {}, [], []
        routers = find_routers({name: parameter.shape for name, parameter in self.block.named_parameters()})
        for name, module in find_layers(self.block).items():
            if name in self.plain.outputs and isinstance(getattr(module, "weight", None), nn.Parameter):
                self._note(name, shape_of(module), is_router=name in routers)

    def _note(self, name: str, shape: torch.Size, *, is_router: bool) -> None:
        outputs, inputs = self.plain.outputs[name], self.plain.inputs(name)
        is_vector = len(outputs) == 1 and isinstance(outputs[0], torch.Tensor) and outputs[0].shape[-1] == shape[0]
        if is_vector and len(shape) <= 2 and not is_router:
            self.sources[name] = shape[0]
        if len(shape) == 2 and inputs:
            is_single = len(outputs) == len(inputs) == 1 and inputs[0].shape[-1] == shape[1]
            (self.readers if is_single else self.others).append(name)

    @contextmanager
    def widening(self) -> Iterator[None]:
        """Widen the recorded outputs while this lasts; ``record`` is called inside."""
        with widened(self.block, self.plain.outputs):
            yield

    def noise(self, *, tiny: bool) -> dict[str, torch.Tensor]:
        """Make a random output for each source, tiny or of all sizes; the values of the first token are above 0."""
        generator = torch.Generator().manual_seed(0)
        low, high = TINY_EXPONENTS if tiny else ALL_EXPONENTS
        noise: dict[str, torch.Tensor] = {}
        for name in self.sources:
            like = self.plain.outputs[name][0]
            size = torch.exp2(low + (high - low) * torch.rand(like.shape, generator=generator))
            sign = torch.randint(2, like.shape, generator=generator) * 2 - 1
            sign.view(-1, like.shape[-1])[0] = 1
            noise[name] = (size * sign).to(like.device)
        return noise

    def record(self, noise: Mapping[str, torch.Tensor], factors: Mapping[str, torch.Tensor]) -> BlockRecord:
        """Record one run, with ``factors`` [O] for the outputs of some sources."""

        def answer(name: str, call: int) -> object:
            if name not in noise:
                return as_float32(self.plain.outputs[name][call])
            return noise[name] * factors[name].to(noise[name].device) if name in factors else noise[name].clone()

        return record_block(self.block, self.run, answer)


def trace(replay: Replay) -> list[Reading]:
    """Find the candidates for every tensor that linear layers read, in the order in which they read it."""
    noise = replay.noise(tiny=True)
    before = replay.record(noise, {})
    groups = _readers(replay, before)
    offsets = _offsets(replay.sources)
    total = sum(replay.sources.values())

    def logarithms(exponents: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        after = replay.record(noise, {name: torch.exp2(power.float()) for name, power in exponents.items()})
        return [_logarithm(before.inputs(names[0])[0], after.inputs(names[0])[0]) for names in groups]

    def sums(numbers: Mapping[str, torch.Tensor], num_bits: int) -> list[torch.Tensor]:
        """Sum the numbers of the outputs that are factors of a channel, [I] for each group; -1 without a sum."""
        totals = [torch.zeros(1, dtype=torch.long)] * len(groups)
        for shift in range(0, num_bits, DIGIT_BITS):
            digits = {name: (number >> shift) % (1 << DIGIT_BITS) for name, number in numbers.items()}
            for i, part in enumerate(logarithms(digits)):
                totals[i] = torch.where((part < 0) | (totals[i] < 0), -1, totals[i] + (part << shift))
        return totals

    degrees = logarithms({name: torch.ones(count, dtype=torch.long) for name, count in replay.sources.items()})
    numbers = {name: offsets[name] + torch.arange(count) for name, count in replay.sources.items()}
    first = sums(numbers, total.bit_length())
    is_product = any(bool((degree == 2).all()) for degree in degrees)
    squares = {name: number * number for name, number in numbers.items()}
    second = sums(squares, 2 * total.bit_length()) if is_product else first
    return [
        Reading(names, tuple(_edges(names, _origins(*totals), offsets)))
        for names, *totals in zip(groups, degrees, first, second, strict=True)
    ]


def _readers(replay: Replay, before: BlockRecord) -> list[tuple[str, ...]]:
    """Group linear layers by the memory address of their input; all tensors of a run are alive, so it is unique."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in before.arguments:
        if name in replay.readers and len(inputs := before.inputs(name)) == 1:
            place = (inputs[0].data_ptr(), inputs[0].numel(), inputs[0].shape[-1], inputs[0].stride(-1))
            groups.setdefault(place, []).append(name)
    return [tuple(names) for names in groups.values()]


def _offsets(sources: Mapping[str, int]) -> dict[str, int]:
    """Return the number of each source's first output."""
    offsets, total = {}, 0
    for name, count in sources.items():
        offsets[name] = total
        total += count
    return offsets


def _logarithm(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return the exponent of two [I] by which each channel was multiplied, on the CPU; -1 if by none or several."""
    if before.shape != after.shape:
        return torch.full(before.shape[-1:], -1)
    old, new = before.reshape(-1, before.shape[-1]), after.reshape(-1, before.shape[-1])
    power, alive = torch.log2(new / old), old != 0
    low = torch.where(alive, power, torch.inf).amin(0)
    high = torch.where(alive, power, -torch.inf).amax(0)
    whole = low.round()
    return torch.where((low - whole).abs() + (high - low) < FACTOR_TOLERANCE, whole, -1).long().cpu()


def _origins(degree_I: torch.Tensor, sum_I: torch.Tensor, square_I: torch.Tensor) -> list[torch.Tensor]:
    """Return the numbers [I] of the one or two outputs in each channel's product; none if channels differ."""
    if bool((sum_I < 0).any()):
        return []
    if bool((degree_I == 1).all()):
        return [sum_I]
    square_of_difference = 2 * square_I - sum_I**2
    difference = square_of_difference.clamp(min=0).double().sqrt().round().long()
    if not bool(((degree_I == 2) & (difference**2 == square_of_difference)).all()):
        return []
    return [(sum_I + difference) // 2, (sum_I - difference) // 2]


def _edges(names: tuple[str, ...], origins: list[torch.Tensor], offsets: Mapping[str, int]) -> Iterator[ScalePair]:
    """Yield an edge for every origin whose numbers all lie in one layer."""
    producers, starts = list(offsets), torch.tensor(list(offsets.values()))
    for number_I in origins:
        which_I = torch.searchsorted(starts, number_I, right=True) - 1
        if bool((which_I == which_I[0]).all()):
            first = int(which_I[0])
            rows, channels = torch.unique(number_I - starts[first], return_inverse=True)
            yield ScalePair(producers[first], names, rows, channels)
