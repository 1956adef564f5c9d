"""Bit packing against a stream built bit by bit, the published layouts, compressed-tensors and gguf."""

import math

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st

from quantcore.formats import FORMATS, IntFormat
from quantcore.tensors.packing import AWQ_ORDER, HIGH_FIRST, pack, pack_halves, unpack, unpack_halves


def random_codes(shape, low, high, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def stream(row, bits, word_bits):
    """The words of the little-endian bit stream, by the arithmetic of Python's unlimited integers."""
    number = sum((code & ((1 << bits) - 1)) << (i * bits) for i, code in enumerate(row))
    return [(number >> shift) & ((1 << word_bits) - 1) for shift in range(0, len(row) * bits, word_bits)]


@given(
    seed=st.integers(0, 2**31),
    bits=st.integers(1, 8),
    length=st.integers(0, 100),
    signed=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.uint8]),
)
def test_code_i_takes_bits_i_times_bits(seed, bits, length, signed, dtype):
    fmt = IntFormat("code", bits, signed=signed)
    codes = random_codes((2, length), fmt.min, fmt.max + 1, seed)
    word_bits = torch.iinfo(dtype).bits
    packed = pack(codes, bits, dtype=dtype)
    unsigned = (packed.long() & ((1 << word_bits) - 1)).tolist()
    assert unsigned == [stream(row, bits, word_bits) for row in codes.tolist()]
    assert torch.equal(unpack(packed, fmt, length=length).int(), codes)


def test_sequential_words_bit_by_bit():
    assert pack(torch.arange(8), 4).item() == 0x76543210
    assert pack(torch.tensor([15, 0, 0, 0, 0, 0, 0, 8]), 4).item() == 0x8000000F - (1 << 32)
    assert pack(torch.tensor([-1, -8, 7]), 4).item() == 0x78F


def test_awq_order_puts_even_columns_in_the_low_half():
    assert pack(torch.arange(8), 4, AWQ_ORDER).item() == 0x75316420
    codes = random_codes((3, 32), 0, 16).to(torch.uint8)
    assert torch.equal(unpack(pack(codes, 4, AWQ_ORDER), FORMATS["uint4"], AWQ_ORDER), codes)


def test_bytes_of_two_codes():
    """MXFP4, NVFP4 and AMD Quark begin with the low half, bitsandbytes with the high half."""
    codes = torch.tensor([1, 2, 3, 4])
    assert pack(codes, 4, dtype=torch.uint8).tolist() == [0x21, 0x43]
    assert pack(codes, 4, HIGH_FIRST, torch.uint8).tolist() == [0x12, 0x34]
    assert unpack(torch.tensor([0x12], dtype=torch.uint8), FORMATS["nf4"], HIGH_FIRST).tolist() == [1, 2]
    assert pack(codes[:3], 4, HIGH_FIRST, torch.uint8).tolist() == [0x12, 0x30]


def test_bytes_of_fp6():
    """AMD Quark's: from the lowest bit up v0, v1, v2, v3 in 3 bytes, the lowest byte first."""
    packed = pack(torch.tensor([0b000001, 0b100010, 0b110011, 0b101101]), 6, dtype=torch.uint8)
    assert packed.tolist() == [0b10_000001, 0b0011_1000, 0b101101_11]
    assert unpack(packed, FORMATS["fp6_e2m3"]).tolist() == [0b000001, 0b100010, 0b110011, 0b101101]


def test_three_bits_as_gptq_packs_them():
    """32 codes in 3 words; codes 10 and 21 lie across two: AutoGPTQ's rule, stated word by word."""
    codes = random_codes((32,), 0, 8).tolist()
    first = sum(code << 3 * i for i, code in enumerate(codes[:10])) | (codes[10] & 0b11) << 30
    second = codes[10] >> 2 | sum(code << 3 * i + 1 for i, code in enumerate(codes[11:21])) | (codes[21] & 1) << 31
    third = codes[21] >> 1 | sum(code << 3 * i + 2 for i, code in enumerate(codes[22:]))
    packed = pack(torch.tensor(codes), 3)
    assert [word % (1 << 32) for word in packed.tolist()] == [first, second, third]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("length", [32, 33, 7])
def test_same_words_as_compressed_tensors(bits, length):
    fmt = IntFormat("code", bits, signed=False)
    codes = random_codes((6, length), -(1 << (bits - 1)), 1 << (bits - 1)).to(torch.int8)
    theirs = pack_to_int32(codes, bits)
    assert torch.equal(pack(codes.int() + (1 << (bits - 1)), bits), theirs)
    assert torch.equal(unpack_from_int32(theirs, bits, codes.shape), codes)
    assert torch.equal(unpack(theirs, fmt, length=length).int() - (1 << (bits - 1)), codes.int())


@pytest.mark.parametrize(
    ("qtype", "start", "scale_bytes", "fifth_bits"),
    [("Q4_0", 8, 2, False), ("Q4_1", 0, 4, False), ("Q5_0", 16, 2, True), ("Q5_1", 0, 4, True)],
)
def test_halves_are_the_blocks_of_gguf(qtype, start, scale_bytes, fifth_bits):
    """Blocks made by gguf, read by us, give its values; what we read packs into the same bytes."""
    kind = GGMLQuantizationType[qtype]
    values = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    blocks = quants.quantize(values, kind).reshape(10, -1)
    scales, rest = np.hsplit(blocks, [scale_bytes])
    high, nibbles = np.hsplit(rest, [4 if fifth_bits else 0])
    codes = unpack_halves(torch.from_numpy(nibbles))
    if fifth_bits:
        one_bit = IntFormat("bit", 1, signed=False)
        codes = codes | unpack(torch.from_numpy(high), one_bit) << 4
        assert torch.equal(pack(codes >> 4, 1, dtype=torch.uint8), torch.from_numpy(high))
    assert torch.equal(pack_halves(codes), torch.from_numpy(nibbles))
    scale_offset = scales.copy().view(np.float16).astype(np.float32)
    offset = scale_offset[:, 1:] if start == 0 else 0.0
    decoded = scale_offset[:, :1] * (codes.numpy().astype(np.float32) - start) + offset
    assert np.array_equal(decoded.reshape(5, 64), quants.dequantize(blocks, kind).reshape(5, 64))


def test_any_memory_layout():
    codes = random_codes((9, 24), 0, 16).to(torch.uint8)
    odd_start = codes.flatten()[3:19]
    single = codes[:, ::24]
    for view in (single, single[0], codes.T, codes[1:, 3:19], codes[:, ::3], codes[:, :1].expand(9, 8), odd_start):
        packed = pack(view, 4)
        assert torch.equal(packed, pack(view.clone(memory_format=torch.contiguous_format), 4))
        words = torch.stack([packed, packed], dim=-1)[..., 0]
        assert torch.equal(unpack(words, FORMATS["uint4"], length=view.shape[-1]), view)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), pack(odd_start, 4, dtype=torch.uint8)])[1:]
    assert torch.equal(unpack(shifted, FORMATS["uint4"]), odd_start)


def test_arguments_are_left_alone():
    codes = random_codes((4, 16), 0, 256).to(torch.uint8)
    before = codes.clone()
    words = pack(codes, 4)
    assert torch.equal(codes, before)
    assert torch.equal(words, pack(codes & 0xF, 4))
    before = words.clone()
    unpack(words, FORMATS["int4"])
    assert torch.equal(words, before)


def test_without_a_length_all_whole_codes_are_given():
    words = torch.zeros(2, 1, dtype=torch.int32)
    assert unpack(words, FORMATS["int3"]).shape == (2, 10)
    assert unpack(words, FORMATS["uint2"]).shape == (2, 16)
    assert math.prod(unpack(torch.zeros(3, dtype=torch.uint8), FORMATS["fp6_e3m2"]).shape) == 4


def test_wide_codes_are_refused():
    with pytest.raises(ValueError, match="codes of 16 bits cannot be packed: bits is 1 to 8"):
        pack(torch.zeros(4), 16)


def test_more_codes_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="2 words hold 16 codes of 4 bits, not 17"):
        unpack(torch.zeros(3, 2, dtype=torch.int32), FORMATS["int4"], length=17)
