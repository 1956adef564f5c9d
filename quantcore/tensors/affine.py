"""Scale, zero point, quantize, dequantize: pure functions that use a format's limits but no format's name.

Tensors are split into [R, G, S] (see ``grouping``); scales and zero points are [R, G].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from quantcore.config.grouping import Grouping, activation_grouping
from quantcore.config.spec import QuantizationSpec, ScaleMode, ScaleType, ZeroPointType
from quantcore.formats import FORMATS, CodebookFormat, Format
from quantcore.formats.floats import FLOAT32_MANTISSA_BITS
from quantcore.formats.vectors import snap_
from quantcore.tensors.double_quant import NestedScales
from quantcore.tensors.kernels import switch

SCALE_DTYPES = {
    ScaleType.float32: torch.float32,
    ScaleType.float16: torch.float16,
    ScaleType.bfloat16: torch.bfloat16,
    ScaleType.e8m0: torch.float32,
    ScaleType.e4m3: torch.float32,
    ScaleType.ue4m3: torch.float32,
    ScaleType.uint4: torch.float32,
    ScaleType.uint6: torch.float32,
    ScaleType.odd3: torch.float32,
    ScaleType.odd4: torch.float32,
    ScaleType.int6: torch.float32,
    ScaleType.int8: torch.float32,
    ScaleType.double_quant: torch.float32,
}
FLAT_SCALE = 2.0**-28
"""The scale of a group whose codes all stand for its minimum, as a share of that: codes are below 2^5."""
E8M0_BIAS = 127  # exponents of an e8m0 scale run from -127 to 127
FLOAT32_INFINITY = 0xFF << FLOAT32_MANTISSA_BITS
CACHED_VALUES = 1 << 17  # values; with their float32 intermediates they fit the second-level cache of a core
E4M3 = FORMATS["fp8_e4m3"]
SMALLEST_E4M3 = 2.0**-9


@dataclass(frozen=True)
class QParams:
    """Parameters that turn codes into values: ``(decode(code) - zero_point) * scale * global_scale``.

    ``scale`` [R, G] is float32 with values that are exact in the stored type. ``zero_point`` [R, G], None if symmetric,
    is int32 codes or a float32 number (see ``with_stored_minimum``). ``global_scale``, a float32 scalar or None, lies
    above the scales of NVFP4 and of two-stage specs. A dynamic input with a calibrated global scale has only that one,
    as a scalar ``scale``. ``nested`` is the stored form of scales that are quantized themselves.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    nested: NestedScales | None = None

    def on(self, device: torch.device) -> QParams:
        """Return the parameters on ``device``; ``nested``, which only files need, stays where it is."""
        zero_point = None if self.zero_point is None else self.zero_point.to(device)
        global_scale = None if self.global_scale is None else self.global_scale.to(device)
        return QParams(self.scale.to(device), zero_point, global_scale, self.nested)

    def flattened(self) -> QParams:
        """Return the parameters of the groups of all rows one after another, each [N]."""
        zero_point = None if self.zero_point is None else self.zero_point.reshape(-1)
        return QParams(self.scale.reshape(-1), zero_point, self.global_scale)

    def of_groups(self, which: slice) -> QParams:
        """Return some of the groups of ``flattened`` parameters, as views."""
        zero_point = None if self.zero_point is None else self.zero_point[which]
        return QParams(self.scale[which], zero_point, self.global_scale)

    @property
    def zero_point_or_zeros(self) -> torch.Tensor:
        """The ``zero_point``, or zeros if there is none, for formats that always store one."""
        return torch.zeros_like(self.scale) if self.zero_point is None else self.zero_point

    @property
    def step(self) -> torch.Tensor:
        """The value of one unit of the format's grid, [R, G] float32."""
        return self.scale if self.global_scale is None else self.scale * self.global_scale


def min_max(x_RGS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and largest value of every group, each [R, G]. NaN in a group gives NaN."""
    size = x_RGS.shape[-1]
    if x_RGS.device.type != "cpu" or size > CACHED_VALUES:
        return x_RGS.amin(-1), x_RGS.amax(-1)
    # torch reduces short rows of float32 ten times faster than those of bfloat16; a tile is widened in the cache.
    tiles = torch.split(x_RGS.reshape(-1, size), max(1, CACHED_VALUES // size))
    ends = [(tile.amin(-1), tile.amax(-1)) for tile in map(torch.Tensor.float, tiles)]
    minimum, maximum = (torch.cat(end).reshape(x_RGS.shape[:2]) for end in zip(*ends, strict=True))
    return minimum, maximum


def find_params(
    minimum_RG: torch.Tensor,
    maximum_RG: torch.Tensor,
    spec: QuantizationSpec,
    model_dtype: torch.dtype,
    global_scale: torch.Tensor | None = None,
) -> QParams:
    """Return scales (and zero points) for values in [minimum, maximum].

    ``ScaleType.float`` is stored in ``model_dtype``. Symmetric integers and floats get the smallest scale with which
    neither end clips, asymmetric integers one that divides the range into all steps (docs/decisions/0002). The scale is
    rounded to its stored type here, before any code is chosen, so that the codes fit the stored scale. A group of zeros
    (or of values so small that their scale is 0 in float32) gets scale 1; a scale too small for its stored type becomes
    the smallest normal number. Codebooks without zero get the smallest number instead, in both cases. A known
    ``global_scale`` is used as it is.
    """
    minimum, maximum = minimum_RG.float(), maximum_RG.float()
    if not spec.format.scaled:
        return QParams(torch.ones_like(maximum))
    if global_scale is None:
        global_scale = find_global_scale(minimum, maximum, spec)
    if spec.over is not None and global_scale is not None:
        minimum, maximum = (spec.over.format.round(end / global_scale) for end in (minimum, maximum))
    zero_point = None
    if spec.zero_point_type is ZeroPointType.float32:
        return _with_real_zero_point(minimum.clamp(max=0), maximum.clamp(min=0), spec, model_dtype)
    if not spec.symmetric:
        scale, zero_point = _asymmetric(minimum.clamp(max=0), maximum.clamp(min=0), spec)
    elif spec.scale_type is ScaleType.e8m0:
        scale = _power_of_two(torch.maximum(maximum, -minimum), spec)
    else:
        unit = 1.0 if spec.over is not None or global_scale is None else global_scale
        scale = torch.maximum(maximum / (unit * spec.format.max), minimum / (unit * spec.format.min))
    return QParams(as_stored(scale, spec, model_dtype), zero_point, global_scale)


def quantize(x_RGS: torch.Tensor, params: QParams, spec: QuantizationSpec) -> torch.Tensor:
    """Return codes [R, G, S] in the format's storage dtype; values outside the range get the nearest end."""

    def encode(x: torch.Tensor, tile_params: QParams) -> torch.Tensor:
        return spec.format.encode(_scaled(x, tile_params, spec), spec.round_method.value)

    return _in_tiles(encode, x_RGS, params, getattr(torch, spec.format.storage))


def dequantize(codes_RGS: torch.Tensor, params: QParams, spec: QuantizationSpec) -> torch.Tensor:
    """Dequantize codes to float32 [R, G, S]."""

    def decode(codes: torch.Tensor, tile_params: QParams) -> torch.Tensor:
        return _unscaled(spec.format.decode(codes), tile_params, spec)

    return _in_tiles(decode, codes_RGS, params, torch.float32)


def fake_quantize(x: torch.Tensor, spec: QuantizationSpec, grouping: Grouping, params: QParams) -> torch.Tensor:
    """Return x after quantize and dequantize, in x's shape and dtype."""

    def there_and_back(x: torch.Tensor, tile_params: QParams) -> torch.Tensor:
        return _rounded(x, tile_params, spec)

    return grouping.join(_in_tiles(there_and_back, grouping.split(x), params, x.dtype), tuple(x.shape))


def static_params(params: QParams, spec: QuantizationSpec) -> QParams:
    """Return the static parameters of an activation: all, or only the global scale if groups are dynamic."""
    if not spec.is_dynamic:
        return params
    assert params.global_scale is not None
    return QParams(params.global_scale)


def fake_quantize_activation(x: torch.Tensor, spec: QuantizationSpec, static: QParams | None) -> torch.Tensor:
    """Return an activation [..., T, I] after quantize and dequantize.

    Scales that are not ``static`` are computed from x, in float32.
    """
    if spec.outlier_threshold is not None:
        outlier_I = (x.abs() >= spec.outlier_threshold).flatten(0, -2).any(0)
        rest = fake_quantize_activation(x.masked_fill(outlier_I, 0), replace(spec, outlier_threshold=None), static)
        return torch.where(outlier_I, x, rest)
    grouping = activation_grouping(spec)
    if static is not None and not spec.is_dynamic:
        return fake_quantize(x, spec, grouping, static.on(x.device))
    x_RGS = grouping.split(x)
    global_scale = None if static is None else static.scale.to(x.device)
    if x_RGS.shape[-1] > CACHED_VALUES or (global_scale is None and spec.scale_type is ScaleType.e4m3):
        params = find_params(*min_max(x_RGS), spec, torch.float32, global_scale)
        return fake_quantize(x, spec, grouping, params)

    def there_and_back(x: torch.Tensor, _: QParams | None) -> torch.Tensor:
        x = x if switch.are_used_on(x.device) else x.float()
        return _rounded(x, find_params(x.amin(-1), x.amax(-1), spec, torch.float32, global_scale), spec)

    return grouping.join(_in_tiles(there_and_back, x_RGS, None, x.dtype), tuple(x.shape))


def scale_dtype(spec: QuantizationSpec, model_dtype: torch.dtype) -> torch.dtype:
    """Return the torch dtype in which the scale is exact; ``ScaleType.float`` and ``pof2`` use the model's own."""
    return SCALE_DTYPES.get(spec.scale_type, model_dtype)


P = TypeVar("P", QParams, None)


def _in_tiles(
    compute: Callable[[torch.Tensor, P], torch.Tensor], x_RGS: torch.Tensor, params: P, dtype: torch.dtype
) -> torch.Tensor:
    """Apply ``compute`` to all of x, with a result in ``dtype``; on a CPU in tiles that stay in a core's cache.

    That is three times faster than step after step through main memory, and needs no float32 copy of x. Without
    ``params`` a tile consists of whole groups, so that ``compute`` can find its own.
    """
    if x_RGS.device.type != "cpu" or x_RGS.numel() <= CACHED_VALUES or torch.compiler.is_compiling():
        return compute(x_RGS, params).to(dtype)
    rows, groups, size = x_RGS.shape
    x_NS, result_NS = x_RGS.reshape(-1, size), torch.empty(rows * groups, size, dtype=dtype)
    step = max(1, CACHED_VALUES // size)
    flat = None if params is None else params.flattened()  # once: that of a transposed scale is a copy
    for start in range(0, rows * groups, step):
        tile = slice(start, start + step)
        own = None if flat is None else flat.of_groups(tile)
        for column in range(0, size, CACHED_VALUES):
            columns = slice(column, column + CACHED_VALUES)
            result_NS[tile, columns] = compute(x_NS[tile, columns], own)
    return result_NS.reshape(x_RGS.shape)


def _rounded(x: torch.Tensor, params: QParams, spec: QuantizationSpec) -> torch.Tensor:
    """Return x after quantize and dequantize, float32, or in the dtype of x from a kernel."""
    is_plain = spec.over is not None or x.requires_grad or torch.compiler.is_compiling()
    if not is_plain and switch.are_used_on(x.device):
        from quantcore.tensors.kernels import fake_quantize as kernel
        from quantcore.tensors.kernels.rounding import rounding_of

        rounding = rounding_of(spec.format, spec.round_method.value)
        if rounding is not None:
            return kernel.there_and_back(x, params.step, params.zero_point, rounding)
    return _unscaled(spec.format.round_(_scaled(x, params, spec), spec.round_method.value), params, spec)


def _scaled(x_RGS: torch.Tensor, params: QParams, spec: QuantizationSpec) -> torch.Tensor:
    """Return x on the format's grid, not rounded yet: a float32 copy, so that rounding may work in place.

    Of a format with vectors these are chosen already.
    """
    x = x_RGS.float()
    if spec.over is not None and params.global_scale is not None:
        x = spec.over.format.round(x / params.global_scale) / params.scale.unsqueeze(-1)
    else:
        x = x / params.step.unsqueeze(-1)
    return snap_(spec.format, x if params.zero_point is None else x.add_(params.zero_point.unsqueeze(-1)), -1)


def _unscaled(values_RGS: torch.Tensor, params: QParams, spec: QuantizationSpec) -> torch.Tensor:
    """Return the inverse of ``_scaled``; overwrites its argument."""
    if params.zero_point is not None:
        values_RGS = values_RGS.sub_(params.zero_point.unsqueeze(-1))
    if spec.over is not None and params.global_scale is not None:
        return values_RGS.mul_(params.scale.unsqueeze(-1)).mul_(params.global_scale)
    return values_RGS.mul_(params.step.unsqueeze(-1))


def find_global_scale(minimum: torch.Tensor, maximum: torch.Tensor, spec: QuantizationSpec) -> torch.Tensor | None:
    """Return the scale above all groups: of NVFP4, so that group scales fit e4m3, or of the first stage; 1 for zeros.

    Returns None for a spec without such a scale.

    The scale of NVFP4 is changed by at most one unit in the last place, so that it survives being stored as its
    reciprocal, as compressed-tensors does. Then dividing an e4m3 scale by the stored reciprocal gives the same result
    as multiplying by the scale, for all e4m3 scales (docs/decisions/0003).
    """
    if spec.over is not None:
        largest = spec.over.format.max
    elif spec.scale_type is ScaleType.e4m3:
        largest = spec.format.max * E4M3.max
    else:
        return None
    scale = torch.maximum(maximum, -minimum).amax() / largest
    scale = torch.where(scale == 0, torch.ones_like(scale), scale.clamp(min=torch.finfo(torch.float32).tiny))
    return scale if spec.over is not None else 1 / (1 / scale)


def as_stored(scale: torch.Tensor, spec: QuantizationSpec, model_dtype: torch.dtype) -> torch.Tensor:
    """Return float32 scales rounded to the stored type, as far as each can be rounded alone; none is 0."""
    if spec.scale_type is ScaleType.e8m0:
        return scale
    if spec.scale_type is ScaleType.e4m3:
        scale = E4M3.round(scale)
        return torch.where(scale == 0, torch.ones_like(scale), scale)
    if spec.scale_type is ScaleType.ue4m3:
        return torch.where(scale == 0, torch.ones_like(scale), E4M3.round(scale.clamp(min=SMALLEST_E4M3)))
    dtype = scale_dtype(spec, model_dtype)
    if spec.scale_type.in_two_levels:  # rounded together in super_blocks, where a 1 would outweigh the other scales
        return scale.clamp(min=torch.finfo(dtype).tiny)
    of_zeros, smallest = 1.0, torch.finfo(dtype).tiny
    if isinstance(spec.format, CodebookFormat) and not spec.format.has_zero:
        of_zeros = smallest = smallest * torch.finfo(dtype).eps  # the smallest subnormal number
    scale = torch.where(scale == 0, of_zeros, scale.clamp(min=smallest))
    if spec.scale_type is ScaleType.pof2:
        fraction, exponent = torch.frexp(scale)  # scale = fraction * 2^exponent, 0.5 <= fraction < 1
        scale = torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int())
    return scale.to(dtype).float()


def with_stored_minimum(
    zero_point: torch.Tensor, scale: torch.Tensor, spec: QuantizationSpec, model_dtype: torch.dtype
) -> torch.Tensor:
    """Return the zero point for ``scale``; a real one is changed so that the smallest code's value can be stored.

    Files store a real zero point as that value, ``(smallest code - zero_point) * scale``, in the scale's type
    (GGUF's Q4_1: code * d + m with float16 d and m). It is rounded to that type here, before any code is chosen.
    """
    dtype = scale_dtype(spec, model_dtype)
    if spec.zero_point_type is not ZeroPointType.float32 or dtype is torch.float32:
        return zero_point
    return zero_point_of(minimum_of(zero_point, scale, spec).to(dtype), scale, spec)


def minimum_of(zero_point: torch.Tensor, scale: torch.Tensor, spec: QuantizationSpec) -> torch.Tensor:
    """Return the value of the smallest code, float32.

    ``zero_point_of`` is the inverse, exact after rounding to a type.
    """
    return (spec.format.min - zero_point) * scale


def zero_point_of(minimum: torch.Tensor, scale: torch.Tensor, spec: QuantizationSpec) -> torch.Tensor:
    """Return the real zero point that gives the smallest code the value ``minimum``, float32."""
    return spec.format.min - minimum.float() / scale


def params_of_minimum(scale: torch.Tensor, minimum: torch.Tensor, spec: QuantizationSpec) -> QParams:
    """Return the parameters of stored scales and values of the smallest code, float32.

    Where a scale is 0, every code stands for the minimum, as in files of llama.cpp. It becomes so small that this holds
    in float32.
    """
    scale = torch.where(scale == 0, minimum.abs() * FLAT_SCALE, scale)
    flat = scale == 0  # so is the minimum
    return QParams(scale, zero_point_of(minimum, torch.where(flat, 1.0, scale), spec))


def _with_real_zero_point(
    minimum: torch.Tensor, maximum: torch.Tensor, spec: QuantizationSpec, model_dtype: torch.dtype
) -> QParams:
    """Return the smallest scale that holds [minimum, maximum], with the minimum rounded to its stored type first."""
    num_steps = spec.format.max - spec.format.min
    minimum = minimum.to(scale_dtype(spec, model_dtype)).float()
    span = maximum / num_steps - minimum / num_steps  # of one step: the whole range may overflow
    scale = as_stored(span, spec, model_dtype)
    return QParams(scale, zero_point_of(minimum, scale, spec))


def _power_of_two(largest: torch.Tensor, spec: QuantizationSpec) -> torch.Tensor:
    """Return the e8m0 scale for groups with this largest magnitude (OCP Microscaling Formats v1.0, section 6.3).

    Exponents are taken from the bits of float32. The number added first carries into the exponent exactly where the
    rule takes the next power of two.
    """
    bits = largest.abs().view(torch.int32)  # abs: the largest of zeros may be -0
    exponent = (bits + carry_to_power(spec)) >> FLOAT32_MANTISSA_BITS
    exponent = exponent.sub_(spec.format.emax).clamp_(0, 2 * E8M0_BIAS)
    scale = (exponent << FLOAT32_MANTISSA_BITS).view(torch.float32)
    scale = torch.where(exponent == 0, 2.0**-E8M0_BIAS, scale)  # below the normal numbers
    scale = torch.where(bits == 0, 1.0, scale)
    return torch.where(bits >= FLOAT32_INFINITY, largest, scale)


def carry_to_power(spec: QuantizationSpec) -> int:
    """Return the number that ``_power_of_two`` adds to the bits of the largest magnitude."""
    return {
        ScaleMode.floor: 0,
        ScaleMode.even: 1 << (FLOAT32_MANTISSA_BITS - 1 - spec.format.mantissa_bits),
        ScaleMode.ceil: (1 << FLOAT32_MANTISSA_BITS) - 1,
    }[spec.scale_calculation_mode or ScaleMode.even]


def _asymmetric(
    minimum: torch.Tensor, maximum: torch.Tensor, spec: QuantizationSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale that divides [minimum, maximum], which holds 0, into all steps of the format, and a zero point.

    It is rounded to a whole code, which moves all codes by at most half a step: no value of the range is farther than
    that from its code.
    """
    fmt: Format = spec.format
    num_steps = fmt.max - fmt.min
    scale = (maximum / 2 - minimum / 2) / (num_steps / 2)  # in halves: the whole range may overflow
    below = torch.where(scale > 0, -minimum / scale, 0).round().clamp(max=num_steps)
    return scale, (below + fmt.min).to(torch.int32)
