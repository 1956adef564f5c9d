"""torchao as a peer: its affine primitives, MX and NVFP4 casts. Runs in the peers' environment."""

import torch
from peers_cases import E8M0_MODES, MX_GROUP, Case, power_of_two
from torchao.prototype.mx_formats import kernels
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_scale_float8,
    _dequantize_affine_float8,
    _quantize_affine_float8,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
MX_DTYPES = {**FP8, "fp6_e2m3": DTYPE_FP6_E2M3, "fp6_e3m2": DTYPE_FP6_E3M2, "fp4": torch.float4_e2m1fn_x2}
DECODERS = {
    "fp4": kernels.f4_unpacked_to_f32,
    "fp6_e2m3": kernels.f6_e2m3_unpacked_to_f32,
    "fp6_e3m2": kernels.f6_e3m2_unpacked_to_f32,
}
MAPPINGS = {
    "symmetric": MappingType.SYMMETRIC,
    "asymmetric": MappingType.ASYMMETRIC,
    "no_clipping": MappingType.SYMMETRIC_NO_CLIPPING_ERR,
}


def quantize(case: Case, x_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    if case.rule in E8M0_MODES:
        return _mx(case, x_OI)
    if case.rule == "nvfp4":
        return _nvfp4(x_OI)
    rows, columns = x_OI.shape
    block = case.block_size or (1 if case.scheme != "per_tensor" else rows, case.group_size or columns)
    if case.dtype in FP8:
        scale = _choose_scale_float8(x_OI, block, FP8[case.dtype])
        codes = _quantize_affine_float8(x_OI, scale, FP8[case.dtype])
        return {"scale": scale, "levels": codes.float(), "values": _dequantize_affine_float8(codes, scale)}
    bits = int(case.dtype.lstrip("uint"))
    signed = case.dtype.startswith("int")
    limits = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    dtype = torch.int8 if signed else torch.uint8
    scale, zero_point = choose_qparams_affine(
        x_OI, MAPPINGS[case.rule], block, dtype, *limits, scale_dtype=torch.float32, zero_point_dtype=torch.int32,
        keepdim=True,
    )  # fmt: skip
    codes = quantize_affine(x_OI, block, scale, zero_point, dtype, *limits)
    values = dequantize_affine(codes, block, scale, zero_point, dtype, *limits, output_dtype=torch.float32)
    outputs = {"scale": scale, "levels": codes.float(), "values": values}
    codes = quantize_affine(x_OI, block, power_of_two(scale), zero_point, dtype, *limits)
    outputs["power_of_two_levels"] = codes.float()
    return outputs | ({"zero_point": zero_point} if case.rule == "asymmetric" else {})


def _mx(case: Case, x_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    scale, codes = to_mx(x_OI, MX_DTYPES[case.dtype], MX_GROUP, ScaleCalculationMode(case.rule))
    levels = codes.float() if case.dtype in FP8 else _decode(case.dtype, codes)
    byte = scale.view(torch.uint8)
    return {"scale": torch.exp2(byte.double() - 127).float(), "scale_byte": byte, "levels": levels}


def _decode(dtype: str, codes: torch.Tensor) -> torch.Tensor:
    return DECODERS[dtype](kernels.unpack_uint4(codes) if dtype == "fp4" else codes)


def _nvfp4(x_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    global_scale = per_tensor_amax_to_scale(x_OI.abs().amax())
    scale, packed = nvfp4_quantize(x_OI, 16, global_scale)
    return {"scale": scale.float(), "global_scale": global_scale, "levels": _decode("fp4", packed)}


def encode(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Encode scaled values as codes of the small floats."""
    return {
        "fp4": kernels.f32_to_f4_unpacked(x),
        "fp6_e2m3": kernels.f32_to_f6_e2m3_unpacked(x),
        "fp6_e3m2": kernels.f32_to_f6_e3m2_unpacked(x),
    }


def pack(codes: dict[str, torch.Tensor], _: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"fp4": kernels.pack_uint4(codes["fp4"])}
