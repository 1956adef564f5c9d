"""Runs in vLLM's own environment: store keys in a KV cache with vLLM's kernels, and read them back.

usage: check_cache_dtypes.py KEYS.safetensors STORED.safetensors

KEYS has the tensor ``keys`` [T, H, D]. STORED gets a tensor of the same shape for each dtype of the cache; TurboQuant
stores values in another way than keys. The kernels
run in Triton's interpreter, which cuts values off where a GPU rounds them to fp8: of that dtype only the scales are
vLLM's.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.backends import backends

backends["cpu"] = next(iter(backends.values()))  # vLLM uses Triton on a CPU only if there is such a backend

from safetensors.torch import load_file, save_file  # noqa: E402
from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids  # noqa: E402
from vllm.model_executor.layers.quantization.turboquant.config import TQ_PRESETS, TurboQuantConfig  # noqa: E402
from vllm.v1.attention.backends.turboquant_attn import _build_hadamard  # noqa: E402
from vllm.v1.attention.ops import int4_per_token_head as int4  # noqa: E402
from vllm.v1.attention.ops import triton_reshape_and_cache_flash as ops  # noqa: E402
from vllm.v1.attention.ops import triton_turboquant_decode as decode  # noqa: E402
from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store  # noqa: E402
from vllm.v1.kv_cache_interface import KVQuantMode  # noqa: E402


def by_head(keys_THD: torch.Tensor, dtype: torch.dtype, mode: KVQuantMode, packing: int = 1):
    """Return the codes [T, H, D / packing] and the scales [T, H] that vLLM writes for ``keys_THD``."""
    num_tokens, num_heads, size = keys_THD.shape
    cache = torch.zeros(1, num_tokens, num_heads, size // packing, dtype=dtype)
    scales = torch.zeros(1, num_tokens, num_heads)
    ops.triton_reshape_and_cache_flash_per_token_head_quant(
        keys_THD, keys_THD, cache, cache.clone(), scales, scales.clone(), torch.arange(num_tokens), mode
    )
    return cache[0], scales[0]


def by_turboquant(x_THD: torch.Tensor, name: str):
    """Return ``x_THD`` as keys and as values that vLLM stores and reads back for the dtype ``name``, [T, H, D] each."""
    num_tokens, num_heads, size = x_THD.shape
    config = TurboQuantConfig.from_cache_dtype(name, size)
    levels = get_centroids(size, config.centroid_bits)
    matrix = _build_hadamard(size, "cpu")
    cache = torch.zeros(1, 16, num_heads, config.slot_size_aligned, dtype=torch.uint8)
    triton_turboquant_store(
        x_THD, x_THD, cache, torch.arange(num_tokens, dtype=torch.int32), matrix, (levels[1:] + levels[:-1]) / 2,
        config.mse_bits, config.key_packed_size, config.value_quant_bits, key_fp8=config.key_fp8,
    )  # fmt: skip
    keys, values = (torch.zeros(1, num_heads, 16, size, dtype=torch.float16) for _ in range(2))
    layout = decode._get_layout(size, config.mse_bits, config.value_quant_bits, config.key_packed_size)
    decode._tq_full_dequant_kv[(num_tokens, num_heads)](
        cache, torch.zeros(1, 1, dtype=torch.int32), levels, keys, values, *keys.stride()[:3], *values.stride()[:3],
        *cache.stride()[:3], 1, HEAD_DIM=size, BLOCK_SIZE=16, NUM_KV_HEADS=num_heads, MSE_BYTES=layout["mse_bytes"],
        KPS=config.key_packed_size, VQB=config.value_quant_bits, VAL_DATA_BYTES=layout["val_data_bytes"],
        MSE_BITS=config.mse_bits, KEY_FP8=int(config.key_fp8), BLOCK_D=layout["BLOCK_D"],
        NORM_CORRECTION=int(config.norm_correction),
    )  # fmt: skip
    keys = keys if config.key_fp8 else keys.float() @ matrix
    return (part[0, :, :num_tokens].transpose(0, 1).float().contiguous() for part in (keys, values))


def main() -> None:
    keys_THD = load_file(sys.argv[1])["keys"]
    found = {}
    codes, scales = by_head(keys_THD, torch.int8, KVQuantMode.INT8_PER_TOKEN_HEAD)
    found["int8_per_token_head"] = codes.float() * scales[..., None]
    _, scales = by_head(keys_THD, ops.FP8_DTYPE, KVQuantMode.FP8_PER_TOKEN_HEAD)
    codes = (keys_THD.float() * (1 / scales[..., None])).to(ops.FP8_DTYPE)
    found["fp8_per_token_head"] = codes.float() * scales[..., None]
    codes, scales = by_head(keys_THD, torch.uint8, KVQuantMode.INT4_PER_TOKEN_HEAD, packing=2)
    zero_points = (scales.view(torch.int32) & 15).float()
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float()
    turned = (nibbles - zero_points[..., None]) * scales[..., None]
    width = int4.largest_power_of_2_divisor(keys_THD.shape[-1])
    found["int4_per_token_head"] = int4.single_rht(turned, inverse=True) / width
    if width == keys_THD.shape[-1]:
        for name in TQ_PRESETS:
            keys, found[f"{name} values"] = by_turboquant(keys_THD, name)
            if "nc" in name:  # the others are fp8
                found[f"{name} keys"] = keys
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, sys.argv[2])
    print('RESULT {"stored": true}')


if __name__ == "__main__":
    main()
