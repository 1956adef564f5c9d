"""Bit packing: round trips on random codes, and words checked bit by bit and by another library."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given
from hypothesis import strategies as st

from quantcore.formats import FORMATS, IntFormat
from quantcore.formats.packing import AWQ_ORDER, pack, unpack


@pytest.mark.parametrize("name", ["int4", "uint4", "int8"])
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 5), words=st.integers(1, 7))
def test_unpack_undoes_pack(name, seed, rows, words):
    fmt = FORMATS[name]
    assert isinstance(fmt, IntFormat)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(fmt.min, fmt.max + 1, (rows, words * 32 // fmt.bits), generator=generator)
    orders = [None, AWQ_ORDER] if fmt.bits == 4 else [None]
    for order in orders:
        assert torch.equal(unpack(pack(codes, fmt.bits, order), fmt, order).long(), codes)


def test_sequential_words_bit_by_bit():
    assert pack(torch.arange(8), 4).item() == 0x76543210
    assert pack(torch.tensor([15, 0, 0, 0, 0, 0, 0, 8]), 4).item() == 0x8000000F - (1 << 32)


def test_awq_order_puts_even_columns_in_the_low_half():
    assert pack(torch.arange(8), 4, AWQ_ORDER).item() == 0x75316420


def test_same_words_as_compressed_tensors():
    codes = torch.randint(-8, 8, (6, 32), dtype=torch.int8)
    assert torch.equal(pack(codes.int() + 8, 4), pack_to_int32(codes, 4))
