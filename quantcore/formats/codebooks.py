"""Codebooks: a few values that no arithmetic gives. A new one is one line in ``CODEBOOKS``.

NF4: Dettmers et al. 2023, "QLoRA", appendix E: quantiles of N(0, 1) on both sides of an exact zero, scaled to [-1, 1].
FP4 of bitsandbytes: a float of 2 exponent bits and 1 mantissa bit whose smallest value is 1/192 of the largest, scaled
to [-1, 1] (``bitsandbytes.functional.get_4bit_type``).
IQ4_NL of llama.cpp: whole numbers that are closer together near zero, which is not one of them (``ggml-common.h``).
IQ1 of llama.cpp: -1, 0 and 1 in vectors, an eighth above or below.
IQ2 and IQ3 of llama.cpp: magnitudes of vectors in the units of the book's numbers (``vectors``).
TQ1_0 and TQ2_0 of llama.cpp: the numbers -1, 0 and 1, stored in two ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quantcore.formats.tables import kept
from quantcore.formats.vectors import VectorBook

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CodebookFormat:
    """A code (uint8) is an index into ``table``; a value takes the nearest entry, beyond the ends the end.

    A tie goes to the lower of two entries, or, where the highest bit of a code is a ``sign_bit``, to the one nearer to
    zero, as the consumers of these formats do; ``round_method`` is for integers. There is no code for NaN: ``encode``
    gives that of 0 or of the value nearest to it, ``round`` keeps NaN so that a simulation shows it.
    """

    name: str
    table: tuple[float, ...]
    sign_bit: bool
    cells_per_unit: int  # cells of this width (see _Ladder) hold at most one threshold each
    vectors: VectorBook | None = None  # encode and round take each value by itself: see ``vectors.snap_``
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
    def has_zero(self) -> bool:
        return 0.0 in self.table

    @property
    def emax(self) -> int:
        """Exponent of the largest power of two within the range."""
        return math.frexp(self.max)[1] - 1

    def grid(self) -> list[float]:
        """All values, ascending."""
        return sorted(set(self.table))

    def encode(self, x: torch.Tensor, round_method: str = "half_even") -> torch.Tensor:
        """Scaled values (any shape, float32) to codes."""
        ladder = kept(_ladder, self, x.device)
        return ladder.nearest(x.float(), ladder.codes)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes to scaled values in float32."""
        table = kept(_value_table, self, codes.device)
        return table.index_select(0, codes.int().flatten()).view(codes.shape)

    def round(self, x: torch.Tensor, round_method: str = "half_even") -> torch.Tensor:
        """decode(encode(x)) in float32."""
        import torch

        return self.round_(x.to(torch.float32, copy=True), round_method)

    def round_(self, x: torch.Tensor, round_method: str = "half_even") -> torch.Tensor:
        """``round`` in place on a float32 tensor."""
        ladder = kept(_ladder, self, x.device)
        nearest = ladder.nearest(x, ladder.values)
        return x.clamp_(self.min, self.max).mul_(0.0).add_(nearest)  # 0 * NaN is NaN


@dataclass(frozen=True)
class _Ladder:
    """A codebook in ascending order, with cells of equal width that hold at most one threshold each.

    A value's cell and one comparison say which entry is nearest: several times faster than a binary search. ``codes``
    and ``values`` hold two entries for each cell: the answers below and above its threshold.
    """

    low: float
    high: float
    cells_per_unit: int
    threshold: torch.Tensor  # float32 [cells]: the smallest value that counts as above; infinity if the cell has none
    codes: torch.Tensor  # uint8 [2 * cells]
    values: torch.Tensor  # float32 [2 * cells]

    def nearest(self, x: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Return the element of ``answers`` for each x (float32, any shape); NaN counts as 0."""
        import torch

        shape, x = x.shape, x.nan_to_num(nan=0.0).clamp_(self.low, self.high).flatten()
        cell = x.sub(self.low).mul_(self.cells_per_unit).to(torch.int32)
        # The sign of the difference, as -1 for below and 0 for above.
        side = x.sub_(self.threshold.index_select(0, cell)).view(torch.int32).bitwise_right_shift_(31)
        return answers.index_select(0, side.add_(cell, alpha=2).add_(1)).view(shape)


def _value_table(fmt: CodebookFormat, device: torch.device) -> torch.Tensor:
    import torch

    return torch.tensor(fmt.table, dtype=torch.float32, device=device)


def _ladder(fmt: CodebookFormat, device: torch.device) -> _Ladder:
    import torch

    codes = sorted(range(len(fmt.table)), key=lambda code: (fmt.table[code], math.copysign(1, fmt.table[code])))
    values = torch.tensor([fmt.table[code] for code in codes], dtype=torch.float32, device=device)
    thresholds = _thresholds(values, ties_to_zero=fmt.sign_bit)
    cell = thresholds.sub(fmt.min).mul_(fmt.cells_per_unit).to(torch.int64)
    num_cells = int((fmt.max - fmt.min) * fmt.cells_per_unit) + 1
    threshold = torch.full((num_cells,), math.inf, device=device).scatter_(0, cell, thresholds)
    num_below = torch.searchsorted(cell, torch.arange(num_cells, device=device))  # thresholds in the cells below
    rank = torch.stack([num_below, (num_below + 1).clamp(max=len(codes) - 1)], dim=-1).flatten()
    sorted_codes = torch.tensor(codes, dtype=torch.uint8, device=device)
    return _Ladder(fmt.min, fmt.max, fmt.cells_per_unit, threshold, sorted_codes[rank], values[rank])


def _thresholds(values: torch.Tensor, *, ties_to_zero: bool) -> torch.Tensor:
    """The smallest float32 that belongs to the upper of two neighbours, for each pair of ascending ``values``."""
    import torch

    middle = (values[1:].double() + values[:-1].double()) / 2
    nearest = middle.float()
    is_tie = nearest.double() == middle
    # Below zero the upper neighbour is the one nearer to zero; so is 0 beside -0.
    goes_down = is_tie & ~values[:-1].signbit() if ties_to_zero else is_tie
    too_low = (nearest.double() < middle) | goes_down
    return torch.where(too_low, nearest.nextafter(torch.full_like(nearest, math.inf)), nearest)


_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_BNB = tuple(value / 12 for value in (0.0, 1 / 16, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
IQ4_NL = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))


def _of_vectors(book: VectorBook, *magnitudes: float) -> CodebookFormat:
    values = tuple(magnitude / book.unit for magnitude in magnitudes)
    table = (*(-value for value in reversed(values)), *values)
    return CodebookFormat(book.name.lower(), table, sign_bit=False, cells_per_unit=1, vectors=book)


def _of_shifted(book: VectorBook) -> CodebookFormat:
    """Return the format of vectors of -1, 0 and 1 that are moved: below and above each number, in ascending order."""
    table = tuple(number + side * book.shift for number in (-1, 0, 1) for side in (-1, 1))
    return CodebookFormat(book.name.lower(), table, sign_bit=False, cells_per_unit=2, vectors=book)


_TERNARY = (-1.0, 0.0, 1.0)
_IQ2, _IQ3_XXS, _IQ3_S = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62), (1, 3, 5, 7, 9, 11, 13, 15)

CODEBOOKS = (
    CodebookFormat("nf4", _NF4, sign_bit=False, cells_per_unit=16),
    CodebookFormat("iq4_nl", IQ4_NL, sign_bit=False, cells_per_unit=1),
    _of_vectors(VectorBook("IQ2_XXS", 8, 8, even_signs=True), *_IQ2),
    _of_vectors(VectorBook("IQ2_XS", 8, 8, even_signs=True), *_IQ2),
    _of_vectors(VectorBook("IQ2_S", 8, 8, even_signs=False), *_IQ2),
    _of_vectors(VectorBook("IQ3_XXS", 4, 4, even_signs=True), *_IQ3_XXS),
    _of_vectors(VectorBook("IQ3_S", 4, 1, even_signs=False), *_IQ3_S),
    _of_shifted(VectorBook("IQ1_S", 8, 1, shift=1 / 8, num_shifted=32)),
    _of_shifted(VectorBook("IQ1_M", 8, 1, shift=1 / 8, num_shifted=8)),
    CodebookFormat("tq1_0", _TERNARY, sign_bit=False, cells_per_unit=1),
    CodebookFormat("tq2_0", _TERNARY, sign_bit=False, cells_per_unit=1),
    CodebookFormat("fp4_bnb", _FP4_BNB + tuple(-value for value in _FP4_BNB), sign_bit=True, cells_per_unit=512),
)
