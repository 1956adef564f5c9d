"""Searches ranges: among many candidates, the one whose codes change a layer's output least.

Legend: C candidates, P parameters that are searched together (any shape).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, Self

import torch

from quantcore.config.grouping import weight_grouping
from quantcore.config.spec import QuantizationSpec, ScaleType, ZeroPointType
from quantcore.formats import Format
from quantcore.tensors.affine import (
    QParams,
    as_stored,
    carry_to_power,
    find_global_scale,
    find_params,
    min_max,
    scale_dtype,
    with_stored_minimum,
)
from quantcore.tensors.kernels import switch

OCTAVES = (1.0, 2.0, 0.5, 0.25)
"""Factors to try for scales that are powers of two."""
WIDEST_RANGE, NARROWEST_RANGE, RANGE_STEP = 1.6, 0.5, 0.1
"""Widest and narrowest share of the full range that are tried, and the approximate step of the first round."""
NARROWEST_OF_THREE = 0.1
"""The narrowest share for formats of at most three values: the best one is 0.4 for normal values, and outliers cost."""
FINER_FACTORS = (0.88, 0.94, 1.06, 1.12)
"""Factors of the second round for the best range; with a zero point, for each of its ends by itself."""


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]]


class Measure(Protocol):
    """Measures the error of candidate parameters for a search."""

    def errors(self, params_CP: QParams) -> torch.Tensor:
        """Return the error [C, P] of the candidates."""

    def fit(self, params_P: QParams) -> torch.Tensor:
        """Return the best step [P] for the codes that ``params_P`` give, if these stay.

        It is NaN if any step is equally good.
        """


@dataclass(frozen=True)
class FullRange:
    """The start of a search: the ends [P] of the weights, and the data to turn ends into parameters.

    ``global_scale`` is fixed: None, or a tensor that fits [P].
    """

    minimum: torch.Tensor
    maximum: torch.Tensor
    spec: QuantizationSpec
    dtype: torch.dtype
    global_scale: torch.Tensor | None

    @classmethod
    def of(cls, weight_OI: torch.Tensor, spec: QuantizationSpec, global_scale: torch.Tensor | None = None) -> Self:
        """Return the range from the smallest to the largest weight of every group [R, G].

        Without a ``global_scale`` one is computed, if the spec needs it.
        """
        low, high = (end.float() for end in min_max(weight_grouping(spec).split(weight_OI)))
        if global_scale is None:
            global_scale = find_global_scale(low, high, spec)
        return cls(low, high, spec, weight_OI.dtype, global_scale)

    @classmethod
    def concat(cls, parts: Sequence[FullRange]) -> Self:
        """Concatenate the ranges of weights along the rows."""
        minimum, maximum = torch.cat([part.minimum for part in parts]), torch.cat([part.maximum for part in parts])
        scales = [part.global_scale.expand(len(part.minimum), 1) for part in parts if part.global_scale is not None]
        return cls(minimum, maximum, parts[0].spec, parts[0].dtype, torch.cat(scales) if scales else None)

    def params(self, low: torch.Tensor | float = 1.0, high: torch.Tensor | float = 1.0) -> QParams:
        """Return the parameters of the range with its ends multiplied by ``low`` and ``high`` [C, P]."""
        return find_params(self.minimum * low, self.maximum * high, self.spec, self.dtype, self.global_scale)

    def of_rows(self, rows: slice, group: int) -> FullRange:
        """Return the range of one group [N] of some rows, for a result of ``concat``."""
        scale = None if self.global_scale is None else self.global_scale[rows, 0]
        return FullRange(self.minimum[rows, group], self.maximum[rows, group], self.spec, self.dtype, scale)


def search(full: FullRange, measure: Measure) -> QParams:
    """Return the best parameters [P]. The full range is one of the candidates.

    Shrinks both ends alike (or widens them, if a format with few large values rounds better then), then moves each end,
    then tries the least-squares scale for the resulting codes. Scales that are powers of two are tried octave by octave
    instead. A global scale does not change.
    """
    best = _Best(full, measure)
    if full.spec.scale_type in (ScaleType.e8m0, ScaleType.pof2):
        best.widen(OCTAVES, OCTAVES)
        return best.params
    best.scale(_factors(full.spec.format))
    still = (1.0,) * len(FINER_FACTORS)
    if full.spec.symmetric:
        best.scale(FINER_FACTORS)
    else:
        best.widen(FINER_FACTORS, still)
        best.widen(still, FINER_FACTORS)
    best.fit()
    return best.params


def kernel_for(spec: QuantizationSpec, dtype: torch.dtype, group_size: int, device: torch.device) -> Kernel | None:
    """Return a kernel that runs ``search`` for groups of the inputs of a weight; None if torch does.

    It takes weights [S, O] of one group, the cost [S] of their squared errors, and the global scales [O] or None, and
    returns scales and zero points [O].
    """
    if not switch.are_used_on(device):
        return None
    from quantcore.tensors.kernels import ranges, rounding

    found = rounding.rounding_of(spec.format, spec.round_method.value)
    is_known = spec.scale_type not in (ScaleType.pof2, ScaleType.ue4m3) and not spec.scale_type.in_two_levels
    is_known = is_known and spec.over is None and spec.zero_point_type is ZeroPointType.int32
    if found is None or not is_known or group_size > ranges.MOST_INPUTS:
        return None
    stored, num_first = scale_dtype(spec, dtype), len(_factors(spec.format))
    scales, factors = ranges.Scales(str(stored).removeprefix("torch.")), _factors(spec.format) + FINER_FACTORS
    if spec.scale_type is ScaleType.e4m3:
        scales = ranges.Scales("e4m3")
    elif spec.scale_type is ScaleType.e8m0:
        scales = ranges.Scales("e8m0", carry_to_power(spec), spec.format.emax)
        factors, num_first = OCTAVES, len(OCTAVES)
    return ranges.Search(scales, found, not spec.symmetric, _on_device(factors, device), num_first)


class _Best:
    """The best candidate so far, for every parameter by itself."""

    def __init__(self, full: FullRange, measure: Measure) -> None:
        self._full, self._measure = full, measure
        self._low = self._high = torch.ones_like(full.minimum)
        self._error = torch.full_like(full.minimum, torch.inf)
        self.params = full.params()

    def scale(self, factors: tuple[float, ...]) -> None:
        """Try the best range so far times each of ``factors``. The zero point stays."""
        factors_CP = self._candidates(factors)
        self._offer(self._rescaled(self.params.scale * factors_CP), self._low * factors_CP, self._high * factors_CP)

    def widen(self, low: tuple[float, ...], high: tuple[float, ...]) -> None:
        """Try the best range so far with its ends multiplied by each of ``low`` and ``high``."""
        low_CP, high_CP = self._low * self._candidates(low), self._high * self._candidates(high)
        self._offer(self._full.params(low_CP, high_CP), low_CP, high_CP)

    def fit(self) -> None:
        """Try the least-squares scale."""
        step = self._measure.fit(self.params)
        scale = step if self.params.global_scale is None else step / self.params.global_scale
        tried = self._rescaled(torch.where(scale > 0, scale, self.params.scale).unsqueeze(0))
        self._offer(tried, self._low.unsqueeze(0), self._high.unsqueeze(0))

    def _rescaled(self, scale_CP: torch.Tensor) -> QParams:
        """Return the best parameters with other scales, rounded to the stored type.

        The zero point stays as far as it can be stored.
        """
        params, spec, dtype = self.params, self._full.spec, self._full.dtype
        scale_CP = as_stored(scale_CP, spec, dtype)
        if params.zero_point is None:
            return QParams(scale_CP, None, params.global_scale)
        zero_point = with_stored_minimum(params.zero_point.expand_as(scale_CP), scale_CP, spec, dtype)
        return QParams(scale_CP, zero_point, params.global_scale)

    def _candidates(self, factors: tuple[float, ...]) -> torch.Tensor:
        return _on_device(factors, self._low.device).view(-1, *[1] * self._low.ndim)

    def _offer(self, tried: QParams, low_CP: torch.Tensor, high_CP: torch.Tensor) -> None:
        """Use the best of ``tried`` where it is better; its range has these ends, as shares of the full one's."""
        error, best_index = self._measure.errors(tried).min(dim=0)
        best_index = best_index.unsqueeze(0)
        better = error < self._error
        self._error = torch.where(better, error, self._error)
        scale = torch.where(better, tried.scale.gather(0, best_index)[0], self.params.scale)
        zero_point = self.params.zero_point
        if zero_point is not None and tried.zero_point is not None:
            zero_point = torch.where(better, tried.zero_point.gather(0, best_index)[0], zero_point)
        self.params = QParams(scale, zero_point, self.params.global_scale)
        self._low = torch.where(better, low_CP.gather(0, best_index)[0], self._low)
        self._high = torch.where(better, high_CP.gather(0, best_index)[0], self._high)


@cache
def _on_device(factors: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return the factors as a tensor, which is copied to the device once and not for every group."""
    return torch.tensor(factors, device=device)


@cache
def _factors(fmt: Format) -> tuple[float, ...]:
    """Return the factor of the full range first, then evenly spaced ones from the widest to the narrowest.

    The widest maps the largest weight to the second largest value of the format's grid: 4 instead of 6 for fp4. If that
    value is 0 (int2), it is WIDEST_RANGE.
    """
    largest, second = sorted(fmt.grid())[:-3:-1]
    widest = min(WIDEST_RANGE, max(largest / second, 1 + RANGE_STEP)) if second > 0 else WIDEST_RANGE
    narrowest = NARROWEST_RANGE if len(fmt.grid()) > 3 else NARROWEST_OF_THREE
    num = round((widest - narrowest) / RANGE_STEP)
    return (1.0, *(widest + (narrowest - widest) * i / num for i in range(num + 1)))
