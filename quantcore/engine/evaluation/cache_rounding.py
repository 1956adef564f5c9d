"""Keys and values as programs would read them back from a cache of fewer bits.

Sources: llama.cpp's ``quantize_row_*_ref`` (``ggml/src/ggml-quants.c``) for blocks of 32 channels, and the Hadamard
matrices of ``src/llama-kv-cache.cpp`` before them; vLLM's ``v1/attention/ops/triton_reshape_and_cache_flash.py`` and
``int4_per_token_head.py`` there, and for TurboQuant ``triton_turboquant_store.py`` and ``triton_turboquant_decode.py``.
The programs also rotate the queries, so that scores are those of the keys as they are
returned here.

Legend: [..., D] the channels of one head of a token, float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from statistics import NormalDist

import torch

from quantcore.config.cache_dtypes import CacheDtype
from quantcore.engine.transforms.rotation.hadamard import hadamard
from quantcore.errors import ConfigError
from quantcore.formats.codebooks import IQ4_NL

Rounding = Callable[[torch.Tensor], torch.Tensor]
BLOCK = 32
ROTATED = 64
"""llama.cpp rotates heads whose number of channels this divides."""
SMALLEST_SCALE = 1e-6
SMALLEST_OF_CODEBOOK = 1e-15
SIGNS_SEED = 0x9E3779B9
FP8_BITS = 8
NUM_STEPS = 1000
"""Steps of the Lloyd-Max iteration: more than it needs for float32."""


def stored(x_BHTD: torch.Tensor, dtype: CacheDtype, *, are_keys: bool) -> torch.Tensor:
    """Return keys or values [B, H, T, D] as ``dtype`` keeps them, in their own dtype.

    Raises ConfigError ``cache_dtype_does_not_fit``.
    """
    size = x_BHTD.shape[-1]
    if size % dtype.block_size:
        raise ConfigError(
            f"The heads of this model have {size} channels, which do not divide into the blocks of "
            f"{dtype.block_size} that a KV cache of {dtype.name} has.",
            code="cache_dtype_does_not_fit",
            hint=f"{dtype.program} refuses it as well. Leave out {dtype.name}.",
        )
    x = x_BHTD.float()
    if dtype.program != "llama.cpp":
        return _of_vllm(x, dtype, x_BHTD.dtype, are_keys=are_keys).to(x_BHTD.dtype)
    width = _width_of_rotation(size, are_keys=are_keys)
    turned = x if width is None else _turned(x, width) / math.sqrt(width)
    blocks = turned.reshape(*x.shape[:-1], -1, BLOCK)
    read = _OF_LLAMA_CPP[dtype.name](blocks).flatten(-2)
    return (read if width is None else _turned(read, width) / math.sqrt(width)).to(x_BHTD.dtype)


def _of_vllm(x: torch.Tensor, dtype: CacheDtype, model_dtype: torch.dtype, *, are_keys: bool) -> torch.Tensor:
    if dtype.value_bits is None:
        return _OF_VLLM[dtype.name](x, model_dtype)
    if not are_keys:
        return _turboquant_values(x, int(dtype.value_bits))
    if dtype.bits == FP8_BITS:
        return _to_float8(x, torch.float8_e4m3fn)
    return _turboquant_keys(x, int(dtype.bits))


def _width_of_rotation(size: int, *, are_keys: bool) -> int | None:
    """Return the order of the matrices with which llama.cpp rotates heads of ``size`` channels; None if it does not."""
    if size % ROTATED:
        return None
    return size & -size if are_keys else ROTATED


def _turned(x: torch.Tensor, width: int) -> torch.Tensor:
    """Multiply each ``width`` channels by the Hadamard matrix of that order, which is its own inverse but for a
    factor.
    """
    matrix = _hadamard(width).to(x.device)
    return (x.reshape(*x.shape[:-1], -1, width) @ matrix).flatten(-2)


@cache
def _hadamard(order: int) -> torch.Tensor:
    return hadamard(order).float()


def _from_largest(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round blocks whose scale makes the value of the largest magnitude the lowest code (Q4_0, Q5_0)."""
    half = 1 << (bits - 1)
    scale = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -half
    codes = (x * _inverse(scale) + (half + 0.5)).floor().clamp(max=2 * half - 1)
    return (codes - half) * _as_half(scale)


def _from_range(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round blocks from their smallest to their largest value (Q4_1, Q5_1)."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / ((1 << bits) - 1)
    codes = ((x - low) * _inverse(scale) + 0.5).floor().clamp(max=(1 << bits) - 1)
    return codes * _as_half(scale) + _as_half(low)


def _q8_0(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return _half_away(x * _inverse(scale)) * _as_half(scale)


def _iq4_nl(x: torch.Tensor) -> torch.Tensor:
    """Choose codes with the scale of the largest value, then the scale that suits them, weighted by squares."""
    book = torch.tensor(IQ4_NL, device=x.device)
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    is_zero = largest.abs() < SMALLEST_OF_CODEBOOK
    codes = torch.bucketize(x * _inverse(largest / book[0]), (book[1:] + book[:-1]) / 2, right=True)
    values, weights = book[codes], x * x
    scale = (weights * values * x).sum(-1, keepdim=True) / (weights * values * values).sum(-1, keepdim=True)
    return torch.where(is_zero, 0, values * _as_half(scale))


def _fp8(x: torch.Tensor, _: torch.dtype, kind: torch.dtype) -> torch.Tensor:
    """Round as with a scale of 1, which vLLM takes where the files have no scales."""
    return _to_float8(x, kind)


def _fp8_by_head(x: torch.Tensor, _: torch.dtype) -> torch.Tensor:
    kind = torch.float8_e4m3fn
    scale = (x.abs().amax(-1, keepdim=True) / torch.finfo(kind).max).clamp(min=SMALLEST_SCALE)
    return _to_float8(x * (1 / scale), kind) * scale


def _int8_by_head(x: torch.Tensor, _: torch.dtype) -> torch.Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=SMALLEST_SCALE)
    return _half_away(x * (1 / scale)).clamp(-128, 127) * scale


def _int4_by_head(x: torch.Tensor, model_dtype: torch.dtype) -> torch.Tensor:
    """Round after random signs and a Hadamard matrix; the lowest bits of the scale hold the zero point."""
    size = x.shape[-1]
    width = size & -size
    signs = _signs(width).to(x.device).repeat(size // width)
    turned = _turned(x * signs, width).to(model_dtype).float()
    low, high = turned.amin(-1, keepdim=True), turned.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=SMALLEST_SCALE)
    zero_point = _half_away(-low / scale).clamp(0, 15)
    codes = _half_away(turned * (1 / scale) + zero_point).clamp(0, 15)
    kept_scale = ((scale.view(torch.int32) & -16) | zero_point.int()).view(torch.float32)
    return _turned((codes - zero_point) * kept_scale, width) * signs / width


@cache
def _signs(size: int) -> torch.Tensor:
    """Return vLLM's signs for ``size`` channels, which it draws with a seed of its own."""
    generator = torch.Generator().manual_seed(SIGNS_SEED)
    return 2.0 * torch.bernoulli(torch.full((size,), 0.5), generator=generator) - 1.0


def _turboquant_keys(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round the direction of each head after a Hadamard matrix, and keep its length in float16."""
    size = x.shape[-1]
    if size & (size - 1):
        raise ConfigError(
            f"The heads of this model have {size} channels; the Hadamard matrices of TurboQuant need a power of two.",
            code="cache_dtype_does_not_fit",
            hint="vLLM cannot serve it so, either. Leave out the dtypes whose names begin with turboquant.",
        )
    length = x.norm(dim=-1, keepdim=True)
    turned = _turned(x / (length + 1e-8), size) / math.sqrt(size)
    levels = _levels(bits).to(x.device) / math.sqrt(size)
    values = levels[torch.bucketize(turned, (levels[1:] + levels[:-1]) / 2, right=True)]
    values = values / (values.square().sum(-1, keepdim=True) + 1e-16).sqrt()
    direction = _turned(values, size) / math.sqrt(size)
    return direction * _as_half(length)


def _turboquant_values(x: torch.Tensor, bits: int) -> torch.Tensor:
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / ((1 << bits) - 1)).clamp(min=1e-8)
    codes = ((x - low) / scale + 0.5).floor().clamp(0, (1 << bits) - 1)
    return codes * _as_half(scale) + _as_half(low)


@cache
def _levels(bits: int) -> torch.Tensor:
    """Return the 2^bits values that represent a standard normal variable best (Lloyd 1957, Max 1960), in order."""
    normal = NormalDist()
    levels = [normal.inv_cdf((place + 0.5) / (1 << bits)) for place in range(1 << bits)]
    for _ in range(NUM_STEPS):
        edges = [-math.inf, *((low + high) / 2 for low, high in pairwise(levels)), math.inf]
        levels = [
            (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low)) for low, high in pairwise(edges)
        ]
    return torch.tensor(levels)


def _to_float8(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(kind).max
    return x.clamp(-limit, limit).to(kind).float()


def _as_half(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0, 1 / scale)


def _half_away(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest whole number, halves away from zero."""
    return (x.abs() + 0.5).floor() * x.sign()


_OF_LLAMA_CPP: dict[str, Rounding] = {
    "q8_0": _q8_0,
    "q5_1": partial(_from_range, bits=5),
    "q5_0": partial(_from_largest, bits=5),
    "q4_1": partial(_from_range, bits=4),
    "q4_0": partial(_from_largest, bits=4),
    "iq4_nl": _iq4_nl,
}
_OF_VLLM: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
    "fp8": partial(_fp8, kind=torch.float8_e4m3fn),
    "fp8_e5m2": partial(_fp8, kind=torch.float8_e5m2),
    "fp8_per_token_head": _fp8_by_head,
    "int8_per_token_head": _int8_by_head,
    "int4_per_token_head": _int4_by_head,
}
