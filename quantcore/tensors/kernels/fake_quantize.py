"""Rounds numbers whose scales are known, in one pass over the memory: torch takes one for each of its operations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantcore.tensors.kernels.rounding import Rounding, nearest_bfloat16, rounded

VALUES = 1024
"""Number of values of a program."""


def there_and_back(
    x_RGS: torch.Tensor, step_RG: torch.Tensor, zero_RG: torch.Tensor | None, rounding: Rounding
) -> torch.Tensor:
    """Return x after quantize and dequantize, in its dtype: (round(x / step + zero) - zero) * step in float32.

    ``step_RG`` is float32; ``zero_RG``, of any type, holds whole numbers or real zero points.
    """
    x, result = x_RGS.contiguous(), torch.empty(x_RGS.shape, dtype=x_RGS.dtype, device=x_RGS.device)
    step = step_RG.contiguous()
    zero = step if zero_RG is None else zero_RG.contiguous()
    _there_and_back[(triton.cdiv(x.numel(), VALUES),)](
        x,
        result,
        step,
        zero,
        x.numel(),
        x.shape[-1],
        HAS_ZERO=zero_RG is not None,
        VALUES=VALUES,
        **rounding._asdict(),
        enable_fp_fusion=False,
    )
    return result


@triton.jit
def _there_and_back(
    x,
    result,
    step,
    zero,
    num_values,
    group_size,
    HAS_ZERO: tl.constexpr,
    VALUES: tl.constexpr,
    IS_INT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MAGIC: tl.constexpr,
    LOWEST_BINADE: tl.constexpr,
):
    place_V = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    is_inside_V = place_V < num_values
    group_V = place_V // group_size
    step_V = tl.load(step + group_V, mask=is_inside_V, other=1.0)
    value_V = tl.div_rn(tl.load(x + place_V, mask=is_inside_V, other=0.0).to(tl.float32), step_V)
    if HAS_ZERO:
        zero_V = tl.load(zero + group_V, mask=is_inside_V, other=0.0).to(tl.float32)
        value_V += zero_V
    value_V = rounded(value_V, IS_INT, LOW, HIGH, MAGIC, LOWEST_BINADE)
    if HAS_ZERO:
        value_V -= zero_V
    value_V *= step_V
    if result.dtype.element_ty == tl.bfloat16:
        value_V = nearest_bfloat16(value_V)
    tl.store(result + place_V, value_V.to(result.dtype.element_ty), mask=is_inside_V)
