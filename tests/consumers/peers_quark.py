"""AMD Quark as a peer: its own observers, quantizers and packers. Runs in the peers' environment."""

import os
from dataclasses import replace

os.environ.setdefault("QUARK_DISABLE_COMPILE", "1")

import torch
from peers_cases import E8M0_MODES, MX_GROUP, NVFP4_GROUP, Case, power_of_two
from quark.torch import kernel
from quark.torch.quantization.config.config import (
    FP4PerGroupSpec,
    FP8E4M3PerTensorSpec,
    Int4PerChannelSpec,
    ProgressiveSpec,
    QTensorConfig,
    ScaleQuantSpec,
)
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType, ZeroPointType
from quark.torch.quantization.observer import observer as observers
from quark.torch.quantization.post_calibration import realign_single_sequential_quantizer
from quark.torch.quantization.tensor_quantize import FakeQuantizeBase
from quark.torch.utils.numerics import to_e8m0_uint8
from quark.torch.utils.pack import create_pack_method

OBSERVERS = {
    "per_tensor": observers.PerTensorMinMaxObserver,
    "per_channel": observers.PerChannelMinMaxObserver,
    "per_group": observers.PerGroupMinMaxObserver,
}
POF2_OBSERVERS = {
    "per_tensor": observers.PerTensorPowOf2MinMaxObserver,
    "per_channel": observers.PerChannelPowOf2MinMaxObserver,
}


def quantize(case: Case, x_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    if case.rule == "nvfp4":
        return _nvfp4(x_OI)
    if case.rule == "two_level":
        return _two_level(x_OI)
    if case.dtype == "int8" and case.rule in E8M0_MODES:
        return _mxint8(case, x_OI)
    if case.rule == "pof2":
        return _power_of_two(case, x_OI)
    spec = _spec(case)
    quantizer = FakeQuantizeBase.get_fake_quantize(spec)
    values = quantizer(x_OI)
    scale, zero_point = quantizer.scale, quantizer.zero_point
    outputs = {"scale": _as_RG(scale), "fake_values": values}
    if case.rule in ("asymmetric", "float_zero_point"):
        outputs["zero_point"] = _as_RG(zero_point)
    if case.rule in E8M0_MODES:
        outputs["scale_byte"] = to_e8m0_uint8(scale)
    if case.dtype.startswith("fp8") and case.scheme == "per_group":
        return outputs  # Quark only simulates these
    where = (scale, zero_point, spec.ch_axis, spec.group_size)
    limits = (quantizer.quant_min, quantizer.quant_max, quantizer.round_method)
    levels = kernel.scaled_real_quantize(case.dtype, x_OI, *where, *limits, case.scheme)
    outputs["levels"] = levels.float()
    outputs["values"] = kernel.dequantize(case.dtype, levels, *where, case.scheme)
    if not case.dtype.startswith("fp"):
        where = (power_of_two(scale), *where[1:])
        outputs["power_of_two_levels"] = kernel.scaled_real_quantize(
            case.dtype, x_OI, *where, *limits, case.scheme
        ).float()
    return outputs


def _spec(case: Case) -> QTensorConfig:
    is_mx = case.rule in E8M0_MODES
    return QTensorConfig(
        dtype=Dtype.from_str(case.dtype),
        qscheme=QSchemeType(case.scheme),
        observer_cls=observers.PerBlockMXObserver if is_mx else OBSERVERS[case.scheme],
        symmetric=None if case.dtype.startswith("fp") else case.rule == "symmetric",
        scale_type=ScaleType.float32,
        scale_format="e8m0" if is_mx else None,
        scale_calculation_mode=case.rule if is_mx else None,
        round_method=RoundType.half_even,
        is_dynamic=False,
        ch_axis={"per_tensor": None, "per_channel": 0, "per_group": -1}[case.scheme],
        group_size=case.group_size,
        zero_point_type=ZeroPointType.float32 if case.rule == "float_zero_point" else ZeroPointType.int32,
    )


def _mxint8(case: Case, x_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    values = kernel.non_scaled_fake_quantize(x_OI, "mx", "int8", -1, MX_GROUP, case.rule)
    return {"fake_values": values}


def _power_of_two(case: Case, x_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    observer = POF2_OBSERVERS[case.scheme](replace(_spec(case), symmetric=True))
    observer(x_OI)
    return {"scale": _as_RG(observer._calculate_qparams()[0])}


def _nvfp4(x_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    specs = ScaleQuantSpec(
        first_stage=FP4PerGroupSpec(ch_axis=-1, group_size=NVFP4_GROUP, is_dynamic=False, scale_type="float32"),
        second_stage=FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False, scale_type="float32"),
    ).to_quantization_spec()
    quantizer = FakeQuantizeBase.get_fake_quantize(specs)
    quantizer(x_OI)
    realign_single_sequential_quantizer(quantizer)
    first, second = quantizer
    where = (first.scale, first.zero_point, -1, NVFP4_GROUP)
    limits = (first.quant_min, first.quant_max, first.round_method)
    levels = kernel.scaled_real_quantize("fp4", x_OI, *where, *limits, "per_group")
    return {
        "scale": first._quantized_block_scale.float(),
        "global_scale": second.scale,
        "levels": levels,
        "values": kernel.dequantize("fp4", levels, *where, "per_group"),
    }


def _two_level(x_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    specs = ProgressiveSpec(
        first_stage=FP8E4M3PerTensorSpec(observer_method="min_max", scale_type="float32", is_dynamic=False),
        second_stage=Int4PerChannelSpec(
            symmetric=True, scale_type="float32", round_method="half_even", ch_axis=0, is_dynamic=False
        ),
    ).to_quantization_spec()
    quantizer = FakeQuantizeBase.get_fake_quantize(specs)
    values = quantizer(x_OI)
    first, second = quantizer
    over = (first.scale, None, None, None, first.quant_min, first.quant_max, first.round_method, "per_tensor")
    fp8 = kernel.scaled_real_quantize("fp8_e4m3", x_OI, *over).to(x_OI.dtype)
    channel = (second.scale, second.zero_point, 0, None, second.quant_min, second.quant_max, second.round_method)
    return {
        "scale": _as_RG(second.scale),
        "global_scale": first.scale,
        "fp8": fp8.float(),
        "levels": kernel.scaled_real_quantize("int4", fp8, *channel, "per_channel").float(),
        "values": values,
    }


def _as_RG(scale: torch.Tensor) -> torch.Tensor:
    return scale.reshape(-1, 1) if scale.dim() < 2 else scale


def pack(codes: dict[str, torch.Tensor], levels: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pack codes (integers) and levels (values of fp4 and fp6) as Quark does; ``codes`` are [rows, columns]."""
    packed = {}
    for dtype in ("int4", "uint4"):
        for scheme in ("per_channel", "per_group"):
            for order in ("order", "reorder"):
                packer = create_pack_method(scheme, dtype)
                packed[f"{dtype}-{scheme}-{order}"] = packer.pack(codes[dtype].int(), order == "reorder")
    packed["int3"] = create_pack_method("per_channel", "int3").pack(codes["int3"], False)
    packed["uint2"] = create_pack_method("per_channel", "uint2").pack(codes["uint2"], False)
    packed["int8-per_group"] = create_pack_method("per_group", "int8").pack(codes["int8"], False)
    for dtype in ("fp4", "fp6_e2m3", "fp6_e3m2"):
        packed[dtype] = create_pack_method("per_group", dtype).pack(levels[dtype], False)
    return packed
