"""Chooses schemes for layers: the smallest loss for a size, and the best mix of every size. No torch.

This is a knapsack problem with several choices for each item. For each unit only the schemes on the lower convex hull
of (bytes, loss) are used. Steps along the hulls, in order of the loss saved for each byte, give a mix at every size
that no other mix of that size beats (Sinha and Zoltners, "The multiple-choice knapsack problem", 1979). Between two
steps the best mix may be better by less than one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from quantcore.errors import ConfigError


@dataclass(frozen=True)
class Option:
    """A unit in one scheme: bytes of its tensors in the file, and the divergence that they add, in nats a token."""

    scheme: str
    num_bytes: int
    loss: float


@dataclass(frozen=True)
class Unit:
    """Layers of a block that share a scheme because consumers compute them in one product.

    They read the same tensor, or are the experts of one mixture.
    """

    block: int
    layers: tuple[str, ...]
    num_weights: int
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Mix:
    """A choice of one option for every unit, in the units' order."""

    chosen: tuple[Option, ...]

    @property
    def num_bytes(self) -> int:
        return sum(option.num_bytes for option in self.chosen)

    @property
    def loss(self) -> float:
        return sum(option.loss for option in self.chosen)


def mixes(units: Sequence[Unit]) -> list[Mix]:
    """Return the mixes on the frontier, from the smallest to the best, each larger and better than the one before."""
    chosen = [hull(unit.options)[0] for unit in units]
    frontier = [Mix(tuple(chosen))]
    for number, better in _steps(units):
        chosen[number] = better
        frontier.append(Mix(tuple(chosen)))
    return frontier


def of_size(units: Sequence[Unit], max_bytes: int) -> Mix:
    """Return the mix of at most ``max_bytes`` with the least loss. Raises ConfigError ``budget_too_small``."""
    chosen = [hull(unit.options)[0] for unit in units]
    left = max_bytes - sum(option.num_bytes for option in chosen)
    if left < 0:
        raise ConfigError(
            f"The quantized layers need at least {max_bytes - left:,} bytes, but only {max_bytes:,} are allowed.",
            code="budget_too_small",
            hint="Allow more, or use a scheme with fewer bits.",
        )
    full: set[int] = set()  # units whose next step did not fit any more
    for number, better in _steps(units):
        cost = better.num_bytes - chosen[number].num_bytes
        if number in full or cost > left:
            full.add(number)
            continue
        chosen[number] = better
        left -= cost
    return Mix(tuple(chosen))


def hull(options: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull, from the smallest to the one with the least loss."""
    best: list[Option] = []
    for option in sorted(options, key=lambda entry: (entry.num_bytes, entry.loss)):
        if best and option.loss >= best[-1].loss:
            continue
        while len(best) > 1 and _gain(best[-2], best[-1]) <= _gain(best[-1], option):
            best.pop()
        best.append(option)
    return best


def _steps(units: Sequence[Unit]) -> Iterator[tuple[int, Option]]:
    """Yield (number of the unit, its next option), in order of the loss saved for each byte."""
    steps = [
        (_gain(before, after), -number, after)
        for number, unit in enumerate(units)
        for best in [hull(unit.options)]
        for before, after in pairwise(best)
    ]
    for _, number, after in sorted(steps, key=lambda step: step[:2], reverse=True):
        yield -number, after


def _gain(before: Option, after: Option) -> float:
    """Return the loss that each additional byte saves."""
    return (before.loss - after.loss) / (after.num_bytes - before.num_bytes)
