"""Scale, zero point, quantize, dequantize: pure functions that know a format's limits but no format's name.

Shapes: x is [out, in] for weights (or [tokens, features] for activations); scale and zero point are [rows, groups],
rows 1 or out, groups dividing the last dimension. Legend: O out, I in, R rows, G groups, S values that share a scale.
"""

from __future__ import annotations

import torch

from quantcore.config import QuantizationSpec, ScaleType
from quantcore.formats import Format

SCALE_DTYPES = {
    ScaleType.float32: torch.float32,
    ScaleType.float16: torch.float16,
    ScaleType.bfloat16: torch.bfloat16,
}


def scale_dtype(spec: QuantizationSpec, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype that the scale is stored in; ``ScaleType.float`` is the model's own."""
    return SCALE_DTYPES.get(spec.scale_type, model_dtype)


def grouped(x: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """View x [O, I] as [R, G, S]: all values that share one scale lie on the last axis."""
    return x.reshape(rows, groups, -1)


def min_max(x: torch.Tensor, rows: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of every group, each [R, G]. NaN in a group gives NaN."""
    minimum, maximum = torch.aminmax(grouped(x, rows, groups), dim=-1)
    return minimum, maximum


def affine_params(
    minimum: torch.Tensor, maximum: torch.Tensor, spec: QuantizationSpec, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale (float32, exact in ``dtype``) and zero point (int32 codes, or None) for values in [minimum, maximum].

    Symmetric: scale = max(|min|, |max|) / half_range. Asymmetric (Jacob et al. 2018, arXiv:1712.05877): the range is
    widened to hold zero, scale = (max - min) / (code_max - code_min), and the zero point is a code. The scale is
    rounded to ``dtype`` here, before any code is chosen, so that the codes fit the scale that is stored. A group of
    zeros gets scale 1; a scale too small for ``dtype`` becomes its smallest normal number.
    """
    fmt = spec.format
    minimum, maximum = minimum.float(), maximum.float()
    if spec.symmetric:
        scale = torch.maximum(minimum.abs(), maximum.abs()) / fmt.half_range
    else:
        minimum, maximum = minimum.clamp(max=0), maximum.clamp(min=0)
        scale = (maximum - minimum) / (fmt.max - fmt.min)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale.clamp(min=torch.finfo(dtype).tiny))
    scale = scale.to(dtype).float()
    if spec.symmetric:
        return scale, None
    zero_point = (fmt.min - torch.round(minimum / scale)).clamp(fmt.min, fmt.max)
    return scale, zero_point.to(torch.int32)


def quantize(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, fmt: Format, round_method: str = "half_even"
) -> torch.Tensor:
    """Codes of x, same shape, in the format's storage dtype; values outside the range take the nearest end."""
    x_RGS = grouped(x.float(), *scale.shape) / scale.unsqueeze(-1)
    if zero_point is not None:
        x_RGS = x_RGS + zero_point.unsqueeze(-1)
    return fmt.encode(x_RGS, round_method).reshape(x.shape)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, fmt: Format) -> torch.Tensor:
    """(code - zero_point) * scale in float32, same shape as ``codes``."""
    x_RGS = grouped(fmt.decode(codes), *scale.shape)
    if zero_point is not None:
        x_RGS = x_RGS - zero_point.unsqueeze(-1)
    return (x_RGS * scale.unsqueeze(-1)).reshape(codes.shape)


def fake_quantize(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, fmt: Format, round_method: str = "half_even"
) -> torch.Tensor:
    """x as a consumer would see it after quantize and dequantize, in x's dtype."""
    return dequantize(quantize(x, scale, zero_point, fmt, round_method), scale, zero_point, fmt).to(x.dtype)
