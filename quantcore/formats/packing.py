"""Several small integer codes in one int32: packing along the last axis, vectorised, and back."""

from __future__ import annotations

import torch

from quantcore.formats import IntFormat

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Slot i of a word holds column AWQ_ORDER[i]: the order of the AWQ GEMM kernels, which AMD Quark calls "reorder"."""


def pack(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Integer codes [..., N] to int32 words [..., N * bits / 32]; only the low ``bits`` of each code are kept.

    Slot i of a word lies at bits [i * bits, (i + 1) * bits). N must be a multiple of 32 / bits.
    """
    slots = 32 // bits
    words = codes.to(torch.int64).reshape(*codes.shape[:-1], -1, slots) & ((1 << bits) - 1)
    if order is not None:
        words = words[..., list(order)]
    shifts = torch.arange(0, 32, bits, device=codes.device)
    return _as_int32((words << shifts).sum(-1))


def unpack(words: torch.Tensor, fmt: IntFormat, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 words [..., M] to codes [..., M * 32 / bits]: int8 (two's complement) or uint8 as the format is signed."""
    shifts = torch.arange(0, 32, fmt.bits, device=words.device)
    codes = (words.to(torch.int64).unsqueeze(-1) >> shifts) & ((1 << fmt.bits) - 1)
    if order is not None:
        codes = codes[..., [order.index(slot) for slot in range(len(order))]]
    codes = codes.flatten(-2)
    if fmt.signed:
        codes = torch.where(codes > fmt.max, codes - (1 << fmt.bits), codes)
    return codes.to(torch.int8 if fmt.signed else torch.uint8)


def _as_int32(words: torch.Tensor) -> torch.Tensor:
    """int64 values in [0, 2^32) with the same bits as int32."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
