"""Words of 32 bits in which the smallest code is 0."""

import pytest
import torch

from quantcore.export.words import codes_of, pack_from_zero, unpack_from_zero
from quantcore.formats import IntFormat
from quantcore.tensors.packing import AWQ_ORDER


@pytest.mark.parametrize("order", [None, AWQ_ORDER])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_come_back_and_words_stay(bits, signed, order):
    fmt = IntFormat("codes", bits, signed=signed)
    codes = torch.arange(int(fmt.min), int(fmt.max) + 1).repeat(3, 24).to(getattr(torch, fmt.storage))
    words = pack_from_zero(codes, fmt, order)
    before = words.clone()
    found = codes_of(words, fmt, order)
    assert found.dtype == codes.dtype and torch.equal(found, codes)
    assert torch.equal(words, before)
    numbers = unpack_from_zero(words, fmt, order)
    assert numbers.dtype == torch.int32 and torch.equal(numbers, codes.int())


def test_the_smallest_code_is_zero():
    fmt = IntFormat("int4", 4, signed=True)
    words = pack_from_zero(torch.tensor([-8, -7, 0, 7, -8, -8, -8, 1], dtype=torch.int8), fmt)
    assert words.tolist() == [0x9000F810 - (1 << 32)]
