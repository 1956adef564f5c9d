"""Rounds numbers to the values of a format, inside of kernels."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from quantcore.formats import FloatFormat, Format, IntFormat
from quantcore.formats.floats import FLOAT32_BIAS, FLOAT32_EXPONENT, FLOAT32_MANTISSA_BITS

WHOLE = tl.constexpr(1.5 * 2.0**FLOAT32_MANTISSA_BITS)
"""Added to a float32 below 2^22 and subtracted again, it leaves the nearest whole number, the even one of two."""
EXPONENT = tl.constexpr(FLOAT32_EXPONENT)
SIGN = tl.constexpr(-0x80000000)


class Rounding(NamedTuple):
    """The properties of a format that ``rounded`` needs, as constants of a kernel."""

    IS_INT: bool
    LOW: float
    HIGH: float
    MAGIC: float = 0.0
    LOWEST_BINADE: int = 0


def rounding_of(fmt: Format, round_method: str) -> Rounding | None:
    """Return how kernels round to a format; None if they cannot."""
    if isinstance(fmt, IntFormat):
        return Rounding(True, float(fmt.min), float(fmt.max)) if round_method == "half_even" else None
    if isinstance(fmt, FloatFormat) and fmt.bias != FLOAT32_BIAS:
        return Rounding(False, fmt.min, fmt.max, fmt.half_magic, fmt.lowest_binade)
    return None


@triton.jit
def rounded(
    x, IS_INT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, MAGIC: tl.constexpr, LOWEST_BINADE: tl.constexpr
):
    """Round float32 numbers to the values of a format, as its ``round_`` does; NaN stays NaN."""
    inside = tl.where(x < LOW, LOW, tl.where(x > HIGH, HIGH, x))
    if IS_INT:  # with the sign of x where the sum would lose that of a zero
        whole = (inside + WHOLE) - WHOLE
        sign = inside.to(tl.int32, bitcast=True) & SIGN
        return (whole.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    binade = tl.maximum(inside.to(tl.int32, bitcast=True) & EXPONENT, LOWEST_BINADE).to(tl.float32, bitcast=True)
    return (inside + binade * MAGIC) - binade * MAGIC


@triton.jit
def nearest_bfloat16(x):
    """Round float32 numbers to those of bfloat16, the even one of two. Triton's interpreter would cut bits off."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(x == x, nearest, x)
