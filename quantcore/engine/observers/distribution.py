"""Counts of each value under many scales at once, the input of the observers percentile, mse and histogram."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import Self

import torch

from quantcore.config.grouping import Grouping
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.observers.observer import Observer

NUM_KEPT = 1 << 16
"""Upper bound on the values of a scale that are stored one by one; more are counted in bins."""
NUM_COUNTERS = 1 << 25
"""Upper bound on the counters (of 8 bytes) for all scales together, or 128 a scale if that is more."""
CHUNK = 1 << 17
"""Number of values processed at a time on a CPU, so that temporaries stay in its cache; 64 times as many elsewhere."""


@dataclass(frozen=True)
class Bins:
    """The values with a counter: 0 and +-2^e * (1 + k / 2^mantissa_bits); others count as the nearest of them.

    Exponents are ``num_exponents`` numbers from ``first_exponent`` on, as float32 stores them (127 is 2^0). Smaller
    values count as 0, larger ones as the last bin. Bins do not depend on the data, so that merging is adding.
    """

    mantissa_bits: int
    first_exponent: int
    num_exponents: int

    @classmethod
    def for_scales(cls, num_scales: int) -> Self:
        """Return all values of bfloat16 up to 512 scales, so that counting bfloat16 is exact; coarser bins for more.

        Those run from 2^-32 to 2^32, with 7 mantissa bits up to 2048 scales, 6 up to 4096, 4 up to 16384.
        """
        if num_scales * (1 << 16) <= NUM_COUNTERS:
            return cls(mantissa_bits=7, first_exponent=0, num_exponents=256)
        return cls(min(7, max(0, int(log2(NUM_COUNTERS / num_scales)) - 7)), first_exponent=95, num_exponents=64)

    @property
    def num_signed(self) -> int:
        """The number of bins of one sign."""
        return self.num_exponents << self.mantissa_bits

    @property
    def num(self) -> int:
        return 2 * self.num_signed

    def index(self, x: torch.Tensor) -> torch.Tensor:
        """Return the bin of every value, int32 in [0, num); NaN gets an arbitrary one."""
        dropped = 23 - self.mantissa_bits
        rounded = (x.float().view(torch.int32) + (1 << (dropped - 1))).bitwise_right_shift_(dropped)
        if self.first_exponent == 0:
            return rounded.bitwise_and_(self.num - 1)  # the bits of sign, exponent, mantissa
        magnitude = rounded & ((256 << self.mantissa_bits) - 1)
        magnitude.sub_(self.first_exponent << self.mantissa_bits).clamp_(0, self.num_signed - 1)
        return magnitude.add_(rounded.bitwise_right_shift_(31).bitwise_and_(self.num_signed))

    def values(self, device: torch.device) -> torch.Tensor:
        """Return the value of each bin, float32 [num].

        The first of each sign is 0, the highest may be infinite or NaN.
        """
        magnitude = torch.arange(self.num_signed, dtype=torch.int32, device=device)
        bits = (magnitude + (self.first_exponent << self.mantissa_bits)) << (23 - self.mantissa_bits)
        bits[0] = 0
        values = bits.view(torch.float32)
        return torch.cat([values, -values])


class Distribution:
    """The values seen under each of N scales, with their counts.

    Up to ``NUM_KEPT`` values a scale (all weights) are stored in their own dtype. More are counted in ``Bins``. Only
    their number decides, so the result does not depend on the split into batches.
    """

    def __init__(self, num_scales: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_scales = num_scales
        self.num_values = 0  # under each scale
        self.dtype = dtype  # holds every value exactly
        self.device = device
        self._kept: list[torch.Tensor] = []  # [N, S] each
        self._counts: torch.Tensor | None = None  # int64 [N, num bins]

    def add(self, x_NS: torch.Tensor) -> None:
        """Add S more values for every scale."""
        self.num_values += x_NS.shape[1]
        self.dtype = torch.promote_types(self.dtype, x_NS.dtype)
        if self.num_values <= NUM_KEPT:
            self._kept.append(x_NS.clone())
        else:
            self._count([*self._kept, x_NS])

    def merge(self, other: Distribution) -> None:
        """Add all values of ``other``, which has as many scales."""
        self.num_values += other.num_values
        self.dtype = torch.promote_types(self.dtype, other.dtype)
        kept = [*self._kept, *(x_NS.to(self.device) for x_NS in other._kept)]
        if self.num_values <= NUM_KEPT:
            self._kept = kept
            return
        counts = self._count(kept)
        if other._counts is not None:
            counts += other._counts.to(self.device)

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield (a slice of the scales, values_NK ascending float32, counts_NK int64 of each) until all are done."""
        if self._counts is None:
            self._kept = [torch.cat(self._kept, dim=1)]
        held = self._kept[0] if self._counts is None else self._counts
        num_rows = max(1, _chunk(held) // held.shape[1])
        for start in range(0, self.num_scales, num_rows):
            rows = slice(start, min(start + num_rows, self.num_scales))
            yield rows, *(self._sorted(held[rows]) if self._counts is None else self._used(held[rows]))

    def _count(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Count all of ``values`` and return the counts; none stay stored."""
        bins = Bins.for_scales(self.num_scales)
        if self._counts is None:
            with torch.inference_mode(False):  # else later batches outside that mode could not be counted
                self._counts = torch.zeros(self.num_scales, bins.num, dtype=torch.int64, device=self.device)
        one = torch.ones((), dtype=torch.int64, device=self.device)
        chunk = _chunk(self._counts)
        for x_NS in values:
            num_rows = max(1, chunk // x_NS.shape[1])
            for x_nS, counts_nB in zip(torch.split(x_NS, num_rows), torch.split(self._counts, num_rows), strict=True):
                offset = torch.arange(len(x_nS), device=self.device).unsqueeze(1) * bins.num
                for x_ns in torch.split(x_nS, chunk, dim=1):
                    index = (bins.index(x_ns) + offset).flatten()
                    counts_nB.view(-1).scatter_add_(0, index, one.expand_as(index))
        self._kept = []
        return self._counts

    def _sorted(self, kept_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values_NK = kept_NK.float().sort(dim=-1).values
        return values_NK, torch.ones((), dtype=torch.int64, device=kept_NK.device).expand_as(values_NK)

    def _used(self, counts_NB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values and counts without the bins that no scale uses."""
        values = Bins.for_scales(self.num_scales).values(counts_NB.device)
        used = counts_NB.any(dim=0).nonzero().squeeze(1)
        used = used[values[used].argsort(stable=True)]
        return values[used].expand(len(counts_NB), -1), counts_NB[:, used]


def _chunk(x: torch.Tensor) -> int:
    return CHUNK if x.is_cpu else CHUNK << 6


@dataclass(frozen=True)
class Seen:
    """Distribution of the values under N scales: values_NK ascending, their counts (int64), the exact ends; all finite.

    ``num_values`` is the number of values under each scale, ``dtype`` their original one (the model's own). ``peak`` is
    the largest magnitude under any scale, including those outside of this piece.
    """

    values_NK: torch.Tensor
    counts_NK: torch.Tensor
    minimum_N: torch.Tensor
    maximum_N: torch.Tensor
    num_values: int
    dtype: torch.dtype
    peak: torch.Tensor


class DistributionObserver(Observer):
    """An observer that chooses the range from the counts of values."""

    def __init__(self, spec: QuantizationSpec, grouping: Grouping | None = None) -> None:
        super().__init__(spec, grouping)
        self._distribution: Distribution | None = None

    @abstractmethod
    def _choose(self, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (minimum, maximum) of the range to quantize, float32 [N] each."""

    def _add(self, x_RGS: torch.Tensor) -> None:
        super()._add(x_RGS)
        x_NS = x_RGS.flatten(0, 1)
        if self._distribution is None:
            self._distribution = Distribution(len(x_NS), x_NS.dtype, x_NS.device)
        self._distribution.add(x_NS)

    def _merge(self, other: Self) -> None:
        super()._merge(other)
        seen = other._distribution
        assert seen is not None
        if self._distribution is None:
            self._distribution = Distribution(seen.num_scales, seen.dtype, seen.device)
        self._distribution.merge(seen)

    def _find(self, minimum_RG: torch.Tensor, maximum_RG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._distribution is not None
        finite_RG = minimum_RG.isfinite() & maximum_RG.isfinite()
        minimum, maximum = minimum_RG.where(finite_RG, 0).flatten(), maximum_RG.where(finite_RG, 0).flatten()
        peak = torch.maximum(maximum, -minimum).amax()
        chosen: list[torch.Tensor] = []
        for rows, values, counts in self._distribution.chunks():
            low, high = minimum[rows], maximum[rows]
            # Bins may lie outside the values seen; the exact ends clamp them. Scales without a range get zeros.
            values = values.nan_to_num().clamp(low.unsqueeze(1), high.unsqueeze(1))
            seen = Seen(values, counts, low, high, self._distribution.num_values, self._distribution.dtype, peak)
            chosen.append(torch.stack(self._choose(seen)))
        chosen_2RG = torch.cat(chosen, dim=1).view(2, *minimum_RG.shape)
        return minimum_RG.where(~finite_RG, chosen_2RG[0]), maximum_RG.where(~finite_RG, chosen_2RG[1])
