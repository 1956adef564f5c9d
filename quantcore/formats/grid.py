"""Names the grid on which sampled rows of a weight lie: bits, group size and kind of levels.

Every group size and every kind of levels is tried. Of those that fit nearly all groups the one is taken that describes
them in the fewest bits, scales included: levels of more bits, or of smaller groups, fit as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from quantcore.formats import BUILT_IN, CodebookFormat, FloatFormat
from quantcore.formats.grid_levels import Fit, Value, fit_codebook, fit_steps, with_errors

GROUP_SIZES = (16, 32, 64, 128, 256, 512)
SHARE_OF_GROUPS = 0.95
"""Share of the groups that must fit: a few values of a file may have been computed otherwise."""
MIN_EVIDENCE = 64.0  # bits: real weights would fit once in 10^19 layers
FEWEST_VALUES = 3  # in a group, for its levels to say something
SCALE_BITS = 16
SUPER_BLOCK = 256
SUPER_BLOCK_EVIDENCE = 32.0
USUAL_BITS = (2, 3, 4, 5, 6, 8)


class _Codebook(NamedTuple):
    """Levels, ascending, and the bits of their codes."""

    levels: tuple[float, ...]
    bits: int


def _codebook(name: str) -> _Codebook:
    book = BUILT_IN[name]
    assert isinstance(book, FloatFormat | CodebookFormat)
    return _Codebook(tuple(sorted({*book.grid(), 0.0})), book.bits)


CODEBOOKS = {
    name: _codebook(name)
    for name in ("fp4", "nf4", "fp4_bnb", "iq4_nl", "iq3_xxs", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2")
} | {"iq1": _codebook("iq1_s"), "iq2": _codebook("iq2_s")}  # the levels of all types of these names
MICROSCALING = {
    "fp4": "MXFP4",
    "fp6_e2m3": "MXFP6 (e2m3)",
    "fp6_e3m2": "MXFP6 (e3m2)",
    "fp8_e4m3": "MXFP8 (e4m3)",
    "fp8_e5m2": "MXFP8 (e5m2)",
}
"""Names of float levels whose scales are powers of two. Twice such a scale fits as well: their groups are of 32."""
SMALLEST_BLOCK = 64
GGUF_WITH_MINIMUM = {4: ("Q4_1", "Q4_K"), 5: ("Q5_1", "Q5_K")}
"""Bits -> the types of GGUF whose levels count from a float, without and with scales that have levels themselves."""


Scope = Literal["group", "block", "row", "tensor"]


@dataclass(frozen=True)
class Grid:
    """The levels of a weight: ``bits`` a weight, and what shares a scale.

    ``name`` is a type of GGUF or a number format if only that one has such levels, else ``symmetric`` or
    ``asymmetric``. ``group_size`` counts the columns of a group, or of a block of several rows; it is None for a scale
    of a whole row or of the tensor.
    """

    name: str
    bits: int
    scope: Scope
    group_size: int | None = None

    def __str__(self) -> str:
        levels = f"{self.bits} bits, {self.name}" if self.name in ("symmetric", "asymmetric") else self.name
        shared = f"{self.scope}s of {self.group_size}" if self.group_size else f"one scale per {self.scope}"
        return f"{levels}, {shared}"


@dataclass(frozen=True)
class GridShare:
    """A grid, with the share of the weights that lie on it among all that were sampled."""

    grid: Grid
    share: float

    def __str__(self) -> str:
        return f"{self.grid} ({100 * self.share:.0f} %)"

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self.grid), "title": str(self.grid), "share": round(self.share, 4)}


@dataclass(frozen=True)
class _Found:
    """A kind of levels that fits groups of ``size``; ``cost`` is in bits a weight."""

    kind: str
    bits: int
    size: int
    fits: tuple[Fit, ...]

    @property
    def cost(self) -> float:
        return self.bits + SCALE_BITS * (2 if self.kind == "offset" else 1) / self.size


def find_grid(rows: Sequence[Sequence[float]], *, smallest_error: float = 0.0) -> Grid | None:
    """Return the grid on which rows of a weight lie, of which the first two are neighbours; None if there is none.

    The rows have one length, and each begins at the first column. ``smallest_error``: the distance to the next number
    where the dtype of the file ends, for float16. A grid whose step is one power of two everywhere is none: whole
    numbers were chosen so, not quantized.
    """
    rows = [row for row in rows if any(row)]
    if not rows or not all(map(math.isfinite, (value for row in rows for value in row))):
        return None
    mantissa_bits = _mantissa_bits(rows)
    valued = [list(with_errors(row, mantissa_bits, smallest_error)) for row in rows]
    width = len(rows[0])
    sizes = [size for size in GROUP_SIZES if size < width and width % size == 0] + [width]
    found: list[_Found] = []
    for kind, fit in _kinds():
        if kind not in CODEBOOKS or all(each.cost > CODEBOOKS[kind].bits for each in found):  # else it costs more
            found += _fitting(kind, fit, valued, sizes)
    if not found or any(each.kind == "zero" and _is_one_power_of_two(each.fits) for each in found):
        return None
    if any(each.kind == "fp8_e5m2" for each in found):  # its levels are among those of e4m3, but for its range
        found = [each for each in found if each.kind != "fp8_e4m3"]
    best = min(found, key=lambda each: each.cost)
    return _named(best, len(rows), width)


def _kinds() -> Iterator[tuple[str, Callable[[Sequence[Value]], Fit | None]]]:
    yield "zero", partial(fit_steps, has_offset=False)
    yield "offset", partial(fit_steps, has_offset=True)
    for name, book in CODEBOOKS.items():
        yield name, partial(fit_codebook, levels=book.levels)


def _fitting(
    kind: str,
    fit: Callable[[Sequence[Value]], Fit | None],
    rows: Sequence[Sequence[tuple[float, float]]],
    sizes: Sequence[int],
) -> Iterator[_Found]:
    """Yield what fits for each group size, from the smallest up to the first that does not fit."""
    for size in sizes:
        counts = [Counter(row[at : at + size]) for row in rows for at in range(0, len(row), size)]
        groups = [[(*value, num) for value, num in count.items()] for count in counts if len(count) >= FEWEST_VALUES]
        fits: list[Fit] = []
        for index, group in enumerate(groups, 1):
            if (found := fit(group)) is not None:
                fits.append(found)
            elif index - len(fits) > 2 + (1 - SHARE_OF_GROUPS) * index:
                return
        if len(fits) < SHARE_OF_GROUPS * len(groups) or sum(each.evidence for each in fits) < MIN_EVIDENCE:
            return
        bits = CODEBOOKS[kind].bits if kind in CODEBOOKS else _bits(fits)
        yield _Found(kind, bits, size, tuple(fits))


def _bits(fits: Sequence[Fit]) -> int:
    """Return the usual number of bits that codes of nearly all groups need."""
    spans = sorted(fit.last - fit.first for fit in fits)
    span = spans[math.ceil(SHARE_OF_GROUPS * len(spans)) - 1]
    return next(bits for bits in USUAL_BITS if span < 1 << bits)


def _named(found: _Found, num_rows: int, width: int) -> Grid:
    scope, size = _scope(found, num_rows, width)
    name = found.kind
    if found.kind == "offset":
        names = GGUF_WITH_MINIMUM.get(found.bits) if size == 32 else None
        name = names[_has_super_blocks(found.fits, num_rows, width)] if names else "asymmetric"
    elif found.kind == "zero":
        name = _name_of_steps(found)
    elif found.kind in MICROSCALING and all(map(_may_be_power_of_two, found.fits)):
        return Grid(MICROSCALING[found.kind], found.bits, "group", 32)
    elif found.kind == "fp4" and size == 16:
        name = "NVFP4"
    return Grid(name, found.bits, scope, size)


def _scope(found: _Found, num_rows: int, width: int) -> tuple[Scope, int | None]:
    """Return what shares a scale, with the size of a group or block."""
    per_row = width // found.size
    if len(found.fits) != num_rows * per_row or num_rows == 1:
        return ("row", None) if found.size == width else ("group", found.size)
    rows = [found.fits[at : at + per_row] for at in range(0, len(found.fits), per_row)]
    as_floats = found.kind in MICROSCALING
    if found.size == width:
        return ("tensor" if _share_a_scale(found.fits, as_floats) else "row"), None
    in_blocks = all(_share_a_scale(pair, as_floats) for pair in zip(rows[0], rows[1], strict=True))
    return ("block" if in_blocks and found.size >= SMALLEST_BLOCK else "group"), found.size


def _name_of_steps(found: _Found) -> str:
    half = 1 << (found.bits - 1)
    if (found.bits, found.size) == (6, 16) and _nearly_all(max(-fit.first, fit.last) <= half for fit in found.fits):
        return "Q6_K"  # where scales may be negative
    if _nearly_all(-half <= fit.first and fit.last < half for fit in found.fits):
        return "symmetric"
    # The largest value of a group of Q4_0 and Q5_0 has the code -half, whatever its sign: the scale takes the sign.
    if (found.bits, found.size) in ((4, 32), (5, 32)) and _nearly_all(
        max(-fit.first, fit.last) == half for fit in found.fits
    ):
        return f"Q{found.bits}_0"
    return "asymmetric"


def _nearly_all(outcomes: Iterable[bool]) -> bool:
    listed = list(outcomes)
    return sum(listed) >= SHARE_OF_GROUPS * len(listed)


def _has_super_blocks(fits: Sequence[Fit], num_rows: int, width: int) -> bool:
    """Return True if the steps of every 256 values are multiples of one number: they have 6 bits in Q4_K and Q5_K."""
    per_block = SUPER_BLOCK // 32
    if width % SUPER_BLOCK or len(fits) != num_rows * width // 32:
        return False
    evidence = 0.0
    for at in range(0, len(fits), per_block):
        block = fits[at : at + per_block]
        steps = [((fit.low + fit.high) / 2, (fit.high - fit.low) / 2, 1) for fit in block if fit.evidence > 0]
        found = fit_steps(steps, has_offset=False) if steps else None
        if found is None or found.last > 63:
            return False
        evidence += found.evidence
    return evidence >= SUPER_BLOCK_EVIDENCE


def _share_a_scale(fits: Sequence[Fit], as_floats: bool) -> bool:
    """Return True if one scale fits all. Of ``as_floats`` twice a scale fits as well, but for the smallest levels."""
    scales = [(fit.low, fit.high) for fit in fits if fit.low > 0]
    if as_floats and scales:
        first = scales[0][0]
        octaves = [math.ldexp(1.0, round(math.log2(low / first))) for low, _ in scales]
        scales = [(low / octave, high / octave) for (low, high), octave in zip(scales, octaves, strict=True)]
    return max((low for low, _ in scales), default=0.0) <= min((high for _, high in scales), default=0.0)


def _may_be_power_of_two(fit: Fit) -> bool:
    return math.ldexp(1.0, math.ceil(math.log2(fit.low))) <= fit.high if fit.low > 0 else True


def _is_one_power_of_two(fits: Sequence[Fit]) -> bool:
    low, high = max(fit.low for fit in fits), min(fit.high for fit in fits)
    return low <= high and low > 0 and math.ldexp(1.0, math.ceil(math.log2(low))) <= high


def _mantissa_bits(rows: Sequence[Sequence[float]]) -> int:
    """Return the bits after the first one in which all values can be written: of bfloat16, of float16, or of float32.

    A file of float32 may hold a model that was bfloat16.
    """
    for bits in (7, 10):
        if all(math.ldexp(math.frexp(value)[0], bits + 1).is_integer() for row in rows for value in row):
            return bits
    return 23
