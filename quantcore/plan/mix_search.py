"""Finds the smallest candidate that is measured to be good enough, with few measurements. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CLOSE_BY_SIZE = 0.02
"""The search ends once the smallest good candidate is at most this much larger than the largest bad one."""
CLOSE_BY_LOSS = 0.9
"""It ends as well at a candidate that uses this share of what it may lose."""


@dataclass(frozen=True)
class Point:
    """A candidate: the size of its weights, and the estimated divergence of plain rounding, in nats per token."""

    num_bytes: int
    loss: float


def find_smallest(
    points: Sequence[Point],
    max_loss: float,
    measure: Callable[[int], float],
    max_trials: int,
    *,
    may_go_on: Callable[[], bool] = lambda: True,
    first_guess: float = 1.0,
) -> dict[int, float]:
    """Measure some of ``points`` (ascending in size, each better than the one before), and return the results by index.

    The smallest point that was measured to lose at most ``max_loss`` is the answer. Estimates are corrected by the
    ratio of measured and estimated loss at the nearest measured point, at first by ``first_guess``. Where the corrected
    estimate contradicts a measurement, the interval between the largest bad and the smallest good point is halved. The
    last measurement is that of the largest point if no other one was good enough.
    """
    measured: dict[int, float] = {}
    bad, good = -1, len(points)
    while bad + 1 < good and len(measured) < max_trials and (not measured or may_go_on()):
        if bad >= 0 and good < len(points) and points[good].num_bytes <= (1 + CLOSE_BY_SIZE) * points[bad].num_bytes:
            break
        expected = ((index, predict(points, measured, index, first_guess)) for index in range(bad + 1, good))
        index = next((index for index, loss in expected if loss <= max_loss), None)
        if good == len(points) and (index is None or len(measured) == max_trials - 1 > 0):
            index = good - 1  # the largest one decides whether there is an answer at all
        if index is None or (index == bad + 1 and bad >= 0):
            index = _middle(points, bad, good)
        measured[index] = measure(index)
        if measured[index] > max_loss:
            bad = index
        else:
            good = index
            if measured[index] >= CLOSE_BY_LOSS * max_loss:
                break
    return measured


def predict(points: Sequence[Point], measured: dict[int, float], index: int, first_guess: float = 1.0) -> float:
    """Return the loss to expect at a point, from its estimate and the nearest measurement, or ``first_guess``."""
    if index in measured:
        return measured[index]
    factor = first_guess
    if measured:
        nearest = min(measured, key=lambda other: abs(_log(points[other].loss) - _log(points[index].loss)))
        factor = measured[nearest] / max(points[nearest].loss, 1e-12)
    return factor * points[index].loss


def _log(loss: float) -> float:
    return math.log(max(loss, 1e-12))


def _middle(points: Sequence[Point], bad: int, good: int) -> int:
    """Return the point between ``bad`` and ``good``, exclusive, whose size is nearest to the middle."""
    inside = range(bad + 1, good)
    ends = points[inside[0]].num_bytes, points[inside[-1]].num_bytes
    return min(inside, key=lambda index: abs(2 * points[index].num_bytes - sum(ends)))
