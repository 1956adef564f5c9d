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

    The smallest scale with which neither end clips: the largest values of a group matter most, and min-max rules that
    round the zero point afterwards cut up to half a step from one of them (docs/decisions/0002). The scale is rounded
    to ``dtype`` here, before any code is chosen, so that the codes fit the scale that is stored. A group of zeros gets
    scale 1; a scale too small for ``dtype`` becomes its smallest normal number.
    """
    fmt = spec.format
    minimum, maximum = minimum.float(), maximum.float()
    zero_point = None
    if spec.symmetric:
        scale = torch.maximum(maximum / fmt.max, minimum / fmt.min)
    else:
        scale, zero_point = _asymmetric(minimum.clamp(max=0), maximum.clamp(min=0), fmt)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale.clamp(min=torch.finfo(dtype).tiny))
    return scale.to(dtype).float(), zero_point


def _asymmetric(minimum: torch.Tensor, maximum: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest scale that holds [minimum, maximum] around 0 with a whole zero point, and that zero point.

    With z codes below zero and n - z above, the scale must be at least -minimum / z and maximum / (n - z). The best
    real z is n * -minimum / (maximum - minimum); the best whole one is a neighbour of it.
    """
    num_steps = fmt.max - fmt.min
    span = maximum - minimum
    best = torch.where(span > 0, -minimum / span * num_steps, 0)
    below_2 = torch.stack([best.floor(), best.ceil()])
    scale_2 = torch.maximum(_divide(-minimum, below_2), _divide(maximum, num_steps - below_2))
    scale, choice = scale_2.min(dim=0)
    below = below_2.gather(0, choice.unsqueeze(0)).squeeze(0)
    return scale, (below + fmt.min).to(torch.int32)


def _divide(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """x / count for x >= 0, where nothing needs no room: 0 / 0 is 0."""
    return torch.where(x == 0, 0, x / count)


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
