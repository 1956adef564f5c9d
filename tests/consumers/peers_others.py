"""compressed-tensors, bitsandbytes, gguf and ml_dtypes as peers. Runs in the peers' environment."""

import bitsandbytes.functional as bnb
import gguf
import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors.mx_utils import compress_mx_scale
from compressed_tensors.compressors.mxfp6.helpers import pack_fp6_to_uint8
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import forward
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from peers_cases import MX_GROUP, Case, power_of_two

STRATEGIES = {"per_tensor": "tensor", "per_channel": "channel", "per_group": "group", "per_block": "block"}
ML_DTYPES = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4": ml_dtypes.float4_e2m1fn,
    "bfloat16": ml_dtypes.bfloat16,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}


def compressed_tensors(case: Case, x_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    args, global_scale = _args(case), None
    rows, columns = case.block_size or (
        1 if case.scheme != "per_tensor" else len(x_OI),
        case.group_size or x_OI.shape[1],
    )
    blocks = x_OI.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    minimum, maximum = blocks.amin((1, 3)), blocks.amax((1, 3))
    if case.rule == "nvfp4":
        global_scale = generate_gparam(x_OI.min(), x_OI.max())
    scale, zero_point = calculate_qparams(minimum, maximum, args, global_scale)
    kind = {"zero_point": None if args.symmetric else zero_point, "global_scale": global_scale}
    levels = forward.quantize(x_OI, scale, args=args, dtype=torch.float32, **kind)
    outputs = {
        "scale": scale,
        "levels": levels,
        "values": forward.dequantize(levels, scale, args=args, dtype=torch.float32, **kind),
    }
    if args.type == "int":
        outputs["power_of_two_levels"] = forward.quantize(
            x_OI, power_of_two(scale), args=args, dtype=torch.float32, **kind
        )
    if not args.symmetric:
        outputs["zero_point"] = zero_point.int()
    if global_scale is not None:
        outputs["global_scale"] = global_scale
    if case.rule == "even":
        outputs["scale_byte"] = compress_mx_scale(scale, torch.uint8)
    return outputs


def _args(case: Case) -> QuantizationArgs:
    is_float = case.dtype.startswith("fp")
    return QuantizationArgs(
        num_bits=int(case.dtype.removeprefix("fp").removeprefix("int").partition("_")[0]),
        type="float" if is_float else "int",
        symmetric=case.rule != "asymmetric",
        strategy="tensor_group" if case.rule == "nvfp4" else STRATEGIES[case.scheme],
        group_size=case.group_size,
        block_structure=case.block_size and list(case.block_size),
        scale_dtype={"even": torch.uint8, "nvfp4": torch.float8_e4m3fn}.get(case.rule),
    )


def gguf_mxfp4(case: Case, x_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    data = gguf.quants.quantize(x_OI.numpy(), gguf.GGMLQuantizationType.MXFP4)
    blocks = torch.from_numpy(data).reshape(x_OI.shape[0], -1, 17)
    byte = blocks[..., 0].contiguous()
    values = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType.MXFP4))
    scale = torch.exp2(byte.double() - 127).float()
    levels = values / scale.repeat_interleave(MX_GROUP, dim=-1)
    return {"scale": scale, "scale_byte": byte, "values": values, "levels": levels}


def gguf_blocks(x_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the bytes of Q8_0, Q4_0 and Q4_1 and the values that gguf reads from them."""
    outputs = {}
    for name in ("Q8_0", "Q4_0", "Q4_1"):
        kind = gguf.GGMLQuantizationType[name]
        data = gguf.quants.quantize(x_OI.numpy(), kind)
        outputs[name] = torch.from_numpy(data)
        outputs[name + "-values"] = torch.from_numpy(gguf.quants.dequantize(data, kind))
    return outputs


def bitsandbytes_4bit(x_OI: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    """Return packed bytes, the largest magnitudes of blocks of 64, the table of values, and the values read back."""
    packed, state = bnb.quantize_4bit(x_OI, blocksize=64, quant_type=dtype)
    values = bnb.dequantize_4bit(packed, state)
    return {"packed": packed, "absmax": state.absmax, "table": state.code, "values": values}


def bitsandbytes_nested(scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize scales once more, by the rule of its GPU and reference code, and by its table-driven CPU code."""
    offset, quantize = scale.mean(), torch.ops.bitsandbytes.quantize_blockwise.default
    dynamic = bnb.create_dynamic_map()
    reference = torch._C.DispatchKey.CompositeExplicitAutograd
    codes, absmax = quantize._op_dk(reference, scale.flatten() - offset, dynamic, 256)
    state = bnb.QuantState(absmax=absmax, code=dynamic, blocksize=256, dtype=torch.float32)
    values = bnb.dequantize_blockwise(codes, state) + offset
    near, _ = quantize(scale.flatten() - offset, dynamic, 256)
    return {"codes": codes, "cpu_codes": near, "absmax": absmax, "offset": offset, "map": dynamic, "values": values}


def ml_dtypes_decode() -> dict[str, torch.Tensor]:
    """Return the value of every code of every small float."""
    outputs = {}
    for name, dtype in ML_DTYPES.items():
        codes = np.arange(1 << (16 if name == "bfloat16" else ml_dtypes.finfo(dtype).bits))
        codes = codes.astype(np.uint16 if name == "bfloat16" else np.uint8)
        outputs[name] = torch.from_numpy(codes.view(dtype).astype(np.float32))
    return outputs


def ml_dtypes_encode(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Encode scaled values. Clips x to the format's range, because ml_dtypes does not saturate all formats."""
    outputs = {}
    for name, dtype in ML_DTYPES.items():
        if name == "e8m0":
            continue
        largest = float(ml_dtypes.finfo(dtype).max)
        codes = x.numpy().clip(-largest, largest).astype(dtype)
        outputs[name] = torch.from_numpy(codes.view(np.int16 if name == "bfloat16" else np.uint8))
    return outputs


def compressed_tensors_pack(codes: dict[str, torch.Tensor], levels: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    packed = {
        f"int{bits}-dim{dim}": pack_to_int32(codes[f"int{bits}"], bits, dim) for bits in (2, 3, 4, 8) for dim in (0, 1)
    }
    packed["fp4"] = pack_fp4_to_uint8(levels["fp4"].clone())
    packed["fp6_e2m3"] = pack_fp6_to_uint8(levels["fp6_e2m3"])
    return packed
