"""Fits levels to the values of one group of weights: multiples of a step, with or without an offset, or a codebook.

A dequantized weight is a level times a scale, rounded to the dtype of the file. So a group lies on a set of levels if
one scale brings every value within its rounding error of a level. Real weights may do so by chance, if a level is near
every number: ``Fit.evidence`` says how unlikely that is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_CODE = 255
"""Levels are multiples of the step up to this one: 8 bits."""

Value = tuple[float, float, int]
"""A value, the largest error with which the file may hold it, and how often it is in the group."""


@dataclass(frozen=True)
class Fit:
    """The levels of a group. The scale lies between ``low`` and ``high``; codes from ``first`` to ``last`` occur.

    For a codebook the codes are 0. ``evidence`` is in bits: values at random would fit with a probability of
    2 ^ -evidence. It is 0 for a group of one value, which lies on any levels.
    """

    low: float
    high: float
    first: int
    last: int
    evidence: float


def fit_steps(values: Sequence[Value], *, has_offset: bool) -> Fit | None:
    """Fit multiples of a step to distinct values: as few as can be. None if up to ``MAX_CODE`` steps do not fit.

    With ``has_offset`` the multiples are added to one of the values, else zero is a level.
    """
    center, slack, _ = min(values, key=_size) if has_offset else (0.0, 0.0, 0)
    offsets = sorted(
        ((value - center, error + slack, num) for value, error, num in values if value != center), key=_size
    )
    if not offsets:
        return Fit(0.0, math.inf, 0, 0, 0.0)
    farthest, error, num_farthest = offsets.pop()
    for count in range(1, MAX_CODE + 1):
        ends = ((abs(farthest) - error) / count, (abs(farthest) + error) / count)
        codes = [count if farthest > 0 else -count, 0]
        evidence = (num_farthest - 1) * _surprise(ends[0], error) - math.log2(count)
        for offset, slack, num in offsets:
            code = round(2 * offset / (ends[0] + ends[1]))
            ends = _narrowed(ends, offset, slack, code)
            if ends[0] > ends[1]:
                break
            codes.append(code)
            evidence += num * _surprise(ends[0], slack)
        else:
            if max(codes) - min(codes) <= MAX_CODE and (evidence > 0 or not offsets):
                return Fit(*ends, min(codes), max(codes), max(evidence, 0.0))
    return None


def fit_codebook(values: Sequence[Value], levels: Sequence[float]) -> Fit | None:
    """Fit a codebook, ascending, times a positive scale to distinct values. None if no scale fits."""
    others = sorted(values, key=_size)
    farthest, error, num_farthest = others.pop()
    if farthest == 0:
        return Fit(0.0, math.inf, 0, 0, 0.0)
    reached = sorted((level for level in levels if level * farthest > 0), key=abs, reverse=True)
    gaps = _gaps(levels)
    for level in reached:
        ends = ((abs(farthest) - error) / abs(level), (abs(farthest) + error) / abs(level))
        gap = gaps[levels.index(level)]
        evidence = (num_farthest - 1) * _surprise(ends[0] * gap, error) - math.log2(len(reached))
        for value, slack, num in others:
            code = _nearest(levels, 2 * value / (ends[0] + ends[1]))
            ends = _narrowed(ends, value, slack, levels[code])
            if ends[0] > ends[1]:
                break
            if value:
                evidence += num * _surprise(ends[0] * gaps[code], slack)
        else:
            if evidence > 0 or not any(value for value, _, _ in others):
                return Fit(*ends, 0, 0, max(evidence, 0.0))
    return None


def _surprise(gap: float, error: float) -> float:
    """Return the bits of evidence in a number that is within ``error`` of a level, where levels are ``gap`` apart."""
    return max(0.0, math.log2(gap / (2 * error)))


def _size(value: Value) -> float:
    return abs(value[0])


def _narrowed(ends: tuple[float, float], value: float, error: float, level: float) -> tuple[float, float]:
    """Return the scales between ``ends`` with which ``level`` gives ``value``; the first end is above if none does."""
    if level == 0:
        return ends if abs(value) <= error else (math.inf, 0.0)
    return max(ends[0], (abs(value) - error) / abs(level)), min(ends[1], (abs(value) + error) / abs(level))


def _nearest(levels: Sequence[float], value: float) -> int:
    above = bisect_left(levels, value)
    if above in (0, len(levels)):
        return min(above, len(levels) - 1)
    return above if levels[above] - value < value - levels[above - 1] else above - 1


def _gaps(levels: Sequence[float]) -> list[float]:
    """Return the width of the numbers that are nearest to each level."""
    widths = [above - below for below, above in pairwise(levels)]
    return [(left + right) / 2 for left, right in pairwise([widths[0], *widths, widths[-1]])]


def with_errors(row: Sequence[float], mantissa_bits: int, smallest_error: float) -> Iterator[tuple[float, float]]:
    """Yield the values of a row with the errors of their rounding, to so many bits after the first one.

    A dequantized value was rounded once, or before that to a dtype of at least three bits more. Products in float32 may
    have cancelled each other: their error is relative to the largest value.
    """
    floor = max(smallest_error, max(map(abs, row)) * 2.0**-22)
    for value in row:
        half_ulp = math.ldexp(1.0, math.frexp(value)[1] - 2 - mantissa_bits) if value else 0.0
        yield value, half_ulp * 1.125 + floor
