"""Codebooks: sixteen values that no arithmetic gives. A new one is one line in ``CODEBOOKS``.

NF4: Dettmers et al. 2023, "QLoRA", appendix E: quantiles of N(0, 1) on both sides of an exact zero, scaled to [-1, 1].
FP4 of bitsandbytes: a float of 2 exponent bits and 1 mantissa bit whose smallest value is 1/192 of the largest, scaled
to [-1, 1] (``bitsandbytes.functional.get_4bit_type``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CodebookFormat:
    """A code (uint8) is an index into ``table``; a value takes the nearest entry, beyond the ends the end.

    A tie goes to the lower of two entries, or, where the highest bit of a code is a ``sign_bit``, to the one nearer to
    zero, as the consumers of these formats do; ``round_method`` is for integers. There is no code for NaN: ``encode``
    gives the code of 0, ``round`` keeps NaN so that a simulation shows it.
    """

    name: str
    table: tuple[float, ...]
    sign_bit: bool
    storage: ClassVar[str] = "uint8"
    scaled: ClassVar[bool] = True
    signed: ClassVar[bool] = True
    zero_point_ok: ClassVar[bool] = False
    mantissa_bits: ClassVar[int] = 0

    @property
    def bits(self) -> int:
        return (len(self.table) - 1).bit_length()

    @property
    def min(self) -> float:
        return min(self.table)

    @property
    def max(self) -> float:
        return max(self.table)

    @property
    def emax(self) -> int:
        """Exponent of the largest power of two within the range."""
        return math.frexp(self.max)[1] - 1

    def grid(self) -> list[float]:
        """All values, ascending."""
        return sorted(set(self.table))

    def encode(self, x: torch.Tensor, round_method: str = "half_even") -> torch.Tensor:
        """Scaled values (any shape, float32) to codes."""
        ladder = _ladder(self)
        return ladder.nearest(x, ladder.codes)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes to scaled values in float32."""
        import torch

        table = torch.tensor(self.table, dtype=torch.float32, device=codes.device)
        return table.index_select(0, codes.int().flatten()).view(codes.shape)

    def round(self, x: torch.Tensor, round_method: str = "half_even") -> torch.Tensor:
        """decode(encode(x)) in float32."""
        return self.round_(x.float().clone(), round_method)

    def round_(self, x: torch.Tensor, round_method: str = "half_even") -> torch.Tensor:
        """``round`` in place on a float32 tensor."""
        ladder = _ladder(self)
        nearest = ladder.nearest(x, ladder.values)
        return x.clamp_(self.min, self.max).mul_(0.0).add_(nearest)  # 0 * NaN is NaN


@dataclass(frozen=True)
class _Ladder:
    """A codebook's entries in ascending order, and cells of equal width that hold at most one threshold each.

    A value's cell says how many thresholds lie below, save for one comparison: four times faster than a binary search.
    """

    low: float
    high: float
    cells_per_unit: float
    codes: torch.Tensor  # uint8 [16]
    values: torch.Tensor  # float32 [16]
    num_below: torch.Tensor  # int32 [cells]: thresholds in the cells below
    threshold: torch.Tensor  # float32 [cells]: values above it are one step higher; infinity if the cell has none

    def cell(self, x: torch.Tensor) -> torch.Tensor:
        """Index of the cell (int32) of each value in [low, high]."""
        import torch

        return x.sub(self.low).mul_(self.cells_per_unit).to(torch.int32)

    def nearest(self, x: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """The element of ``answers`` (one for each entry) that belongs to the entry nearest to each x; NaN is 0."""
        import torch

        shape, x = x.shape, x.flatten().float().nan_to_num(nan=0.0).clamp_(self.low, self.high)
        cell = self.cell(x)
        is_above = self.threshold.to(x.device).index_select(0, cell).sub_(x).view(torch.int32).bitwise_right_shift_(31)
        rank = self.num_below.to(x.device).index_select(0, cell).sub_(is_above)  # is_above is -1 or 0
        return answers.to(x.device).index_select(0, rank).view(shape)


@cache
def _ladder(fmt: CodebookFormat) -> _Ladder:
    import torch

    codes = sorted(range(len(fmt.table)), key=lambda code: (fmt.table[code], math.copysign(1, fmt.table[code])))
    values = torch.tensor([fmt.table[code] for code in codes], dtype=torch.float32)
    thresholds = _thresholds(values, ties_to_zero=fmt.sign_bit)
    cells_per_unit = 8
    while True:
        cell = ((thresholds - fmt.min) * cells_per_unit).to(torch.int64)
        if bool((cell.diff() > 0).all()):
            break
        cells_per_unit *= 2
    num_cells = int((fmt.max - fmt.min) * cells_per_unit) + 1
    threshold = torch.full((num_cells,), math.inf).scatter_(0, cell, thresholds)
    num_below = torch.searchsorted(cell, torch.arange(num_cells), out_int32=True)
    codes_in_order = torch.tensor(codes, dtype=torch.uint8)
    return _Ladder(fmt.min, fmt.max, cells_per_unit, codes_in_order, values, num_below, threshold)


def _thresholds(values: torch.Tensor, *, ties_to_zero: bool) -> torch.Tensor:
    """The largest float32 that still belongs to the lower of two neighbours, for each pair of ascending ``values``."""
    import torch

    middle = (values[1:].double() + values[:-1].double()) / 2
    nearest = middle.float()
    too_high = nearest.double() > middle
    if ties_to_zero:  # below zero the upper neighbour is the one nearer to it; so is +0 beside -0
        too_high |= (nearest.double() == middle) & (values[:-1].signbit())
    return torch.where(too_high, nearest.nextafter(torch.tensor(-math.inf)), nearest)


_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_BNB = tuple(value / 12 for value in (0.0, 1 / 16, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))

CODEBOOKS = (
    CodebookFormat("nf4", _NF4, sign_bit=False),
    CodebookFormat("fp4_bnb", _FP4_BNB + tuple(-value for value in _FP4_BNB), sign_bit=True),
)
