"""Codes of 1 to 8 bits, packed along the last axis into int32 words or bytes, and back. Any leading shape.

Nearly every layout in use is one: a little-endian stream in which code i takes the bits [i * bits, (i + 1) * bits).
It is AutoGPTQ's and GPTQModel's words (3 bits: 32 codes in 3 words), compressed-tensors' (3 bits as well), the bytes of
OCP MXFP4 and NVFP4 (the even code in the low half), and AMD Quark's fp6 (4 codes in 3 bytes) and int3. What differs is
the order of the codes within a word (``AWQ_ORDER``, ``HIGH_FIRST``) and GGUF's ``pack_halves``.

Eight codes at a time, as the bytes of an int64, move together in three steps of shift and mask: there is no wider
copy of the codes, and no loop. Memory is read as little-endian, as safetensors and GGUF files are.
"""

from __future__ import annotations

import math

import torch

from quantcore.formats import Format

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Slot i of a word holds column AWQ_ORDER[i]: the order of the AWQ GEMM kernels, which AMD Quark calls "reorder"."""
HIGH_FIRST = (1, 0)
"""The even code in the high half of a byte: bitsandbytes' NF4 and FP4."""

_CODES_IN_INT64 = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their number of bytes


def pack(
    codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """Integer codes [..., N] to the fewest words that hold N * bits bits: [..., M], int32 or uint8 as ``dtype`` says.

    Only the low ``bits`` (1 to 8) of each code are kept, so signed codes become two's complement. Codes missing in the
    last word are zeros. Where ``order`` is given, slot i of every len(order) slots holds the code order[i], and N is
    rounded up to whole such groups.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"codes of {bits} bits cannot be packed: bits is 1 to 8")
    word_bits = torch.iinfo(dtype).bits
    group = 1 if order is None else len(order)
    num_words = math.ceil(math.ceil(codes.shape[-1] / group) * group * bits / word_bits)
    # The smallest number of codes that fills both whole words and whole int64.
    unit = math.lcm(word_bits // math.gcd(word_bits, bits), _CODES_IN_INT64)
    codes = _padded(codes.to(torch.uint8), unit)
    if order is not None:
        codes = _reordered(codes, order)
    x = _viewed(codes, torch.int64).clone()
    for width in (8, 16, 32):
        _join_lanes(x, width, bits * width // 8)
    return _viewed(_low_bytes(x, bits), dtype)[..., :num_words].contiguous()


def unpack(
    words: torch.Tensor, fmt: Format, order: tuple[int, ...] | None = None, length: int | None = None
) -> torch.Tensor:
    """The inverse of ``pack``: words [..., M] (int32 or uint8) to codes [..., length] in the format's storage dtype.

    Without ``length`` all codes that lie whole in the words, padding included. ValueError if ``length`` is more.
    """
    bits = fmt.bits
    num_whole = words.shape[-1] * torch.iinfo(words.dtype).bits // bits
    num_codes = num_whole if length is None else length
    if num_codes > num_whole:
        raise ValueError(f"{words.shape[-1]} words hold {num_whole} codes of {bits} bits, not {length}")
    x = _from_low_bytes(_padded(_viewed(words, torch.uint8), bits), bits)
    for width in (32, 16, 8):
        _split_lanes(x, width, bits * width // 8)
    codes = _viewed(x, torch.uint8)
    if order is not None:
        codes = _reordered(codes, tuple(order.index(slot) for slot in range(len(order))))
    if fmt.storage == "int8":
        codes = codes.view(torch.int8)
        if bits < 8:
            sign = 1 << (bits - 1)
            codes = (codes ^ sign).sub_(sign)
    return codes[..., :num_codes].contiguous()


def pack_halves(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [..., 2 * H] to bytes [..., H]: code i in the low half of byte i, code H + i in the high half.

    GGUF's Q4_0, Q4_1, Q5_0 and Q5_1 with blocks of 32 on the last axis; the fifth bits of the last two, a mask of 32
    bits, are ``pack(codes >> 4, 1, dtype=torch.uint8)``. Only the low 4 bits of each code are kept.
    """
    low, high = codes.to(torch.uint8).chunk(2, dim=-1)
    return (low & 0xF) | (high << 4)


def unpack_halves(packed: torch.Tensor) -> torch.Tensor:
    """Return the inverse of ``pack_halves``: bytes [..., H] to codes [..., 2 * H] in 0 to 15 (uint8)."""
    return torch.cat([packed & 0xF, packed >> 4], dim=-1)


def _padded(x: torch.Tensor, unit: int) -> torch.Tensor:
    """x with zeros at the end of the last axis, up to a multiple of ``unit``."""
    missing = -x.shape[-1] % unit
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _viewed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory of x as another type, copied only where it has gaps or starts between two elements."""
    flat = x.flatten()
    if flat.stride(0) != 1 or flat.storage_offset() * x.itemsize % dtype.itemsize:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(dtype).view(*x.shape[:-1], x.shape[-1] * x.itemsize // dtype.itemsize)


def _reordered(codes: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([codes[..., slot :: len(order)] for slot in order], dim=-1).flatten(-2)


def _repeated(field: int, every: int) -> int:
    """``field`` at every ``every``-th bit of an int64, as the number (perhaps negative) that torch takes."""
    value = sum(field << shift for shift in range(0, 64, every))
    return value - (1 << 64) if value >> 63 else value


def _join_lanes(x: torch.Tensor, width: int, field: int) -> None:
    """In place: lanes of ``width`` bits, ``field`` of them in use, become half as many with two fields side by side."""
    if field == width:
        return
    moved = (x >> (width - field)).bitwise_and_(_repeated((1 << field) - 1 << field, every=2 * width))
    x.bitwise_and_(_repeated((1 << field) - 1, every=2 * width)).bitwise_or_(moved)


def _split_lanes(x: torch.Tensor, width: int, field: int) -> None:
    """The inverse of ``_join_lanes``."""
    if field == width:
        return
    moved = (x & _repeated((1 << field) - 1 << field, every=2 * width)).bitwise_left_shift_(width - field)
    x.bitwise_and_(_repeated((1 << field) - 1, every=2 * width)).bitwise_or_(moved)


def _low_bytes(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` lowest bytes of each int64: [..., N] to uint8 [..., N * count]."""
    if count in _INTEGERS:
        return _viewed(x.to(_INTEGERS[count]), torch.uint8)
    return _viewed(x.unsqueeze(-1), torch.uint8)[..., :count].flatten(-2)


def _from_low_bytes(data: torch.Tensor, count: int) -> torch.Tensor:
    """Return the inverse of ``_low_bytes`` (for less than 8 a copy); what lies above the low bytes is undefined."""
    if count in _INTEGERS:
        return _viewed(data, _INTEGERS[count]).to(torch.int64)
    x = data.new_zeros(*data.shape[:-1], data.shape[-1] // count, 8)
    x[..., :count] = data.view(*x.shape[:-1], count)
    return _viewed(x, torch.int64).squeeze(-1)
