"""What every number format promises, for all of ``FORMATS``: a new one is tested by being there."""

import math

import hypothesis.extra.numpy as arrays
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantcore.formats import FORMATS, CodebookFormat, IntFormat
from quantcore.tensors.packing import AWQ_ORDER, HIGH_FIRST, pack, unpack

NAMES = list(FORMATS)
PACKED = [name for name in NAMES if FORMATS[name].bits <= 8 and not FORMATS[name].storage.startswith("float")]
FLOAT32_MAX = torch.finfo(torch.float32).max
ROUND_METHODS = ("half_even", "round", "floor")
SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)


@st.composite
def scaled_values(draw, fmt, shape=(500,)):
    """float32 values in and around the format's range: anywhere, of every magnitude, and on fractions of its largest
    power of two, where ties are. Ends and zeros of both signs come first."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = math.prod(shape)
    anywhere = torch.empty(count, dtype=torch.float64).uniform_(1.25 * fmt.min, 1.25 * fmt.max, generator=generator)
    magnitude = torch.empty(count, dtype=torch.float64).uniform_(-12, 3, generator=generator).exp2() * fmt.max
    steps = torch.randint(-1200, 1200, (count,), generator=generator) * math.ldexp(1.0, fmt.emax - 9)
    kind = torch.randint(0, 3, (count,), generator=generator)
    x = torch.stack([anywhere, magnitude * anywhere.sign(), steps.double()]).gather(0, kind.unsqueeze(0)).squeeze(0)
    ends = torch.tensor([fmt.max, fmt.min, -0.0, 0.0], dtype=torch.float64)[:count]
    x[: len(ends)] = ends
    return x.clamp(-FLOAT32_MAX, FLOAT32_MAX).float().view(shape)


def for_each_format(test):
    return pytest.mark.parametrize("name", NAMES)(settings(max_examples=25, deadline=None)(test))


def half_steps(fmt, x):
    """Half the distance between the values of the format on both sides of each x, from the format's definition."""
    if isinstance(fmt, IntFormat):
        return torch.full_like(x, 0.5)
    if isinstance(fmt, CodebookFormat):
        grid = torch.tensor(fmt.grid(), dtype=torch.float64)
        above = torch.searchsorted(grid.float().double(), x).clamp(1, len(grid) - 1)
        return (grid.float().double()[above] - grid.float().double()[above - 1]) / 2
    exponent = (torch.frexp(x).exponent - 1).clamp(min=1 - fmt.bias)
    return torch.ldexp(torch.ones_like(x), exponent - fmt.mantissa_bits - 1)


@for_each_format
@given(data=st.data())
def test_the_error_is_at_most_half_a_step(name, data):
    fmt = FORMATS[name]
    x = data.draw(scaled_values(fmt)).clamp(fmt.min, fmt.max)
    error = (fmt.decode(fmt.encode(x)).double() - x.double()).abs()
    assert (error <= half_steps(fmt, x.double())).all()


@for_each_format
@given(data=st.data())
def test_values_beyond_the_range_take_the_end(name, data):
    fmt = FORMATS[name]
    x = data.draw(scaled_values(fmt))
    assert torch.equal(fmt.decode(fmt.encode(x)), fmt.decode(fmt.encode(x.clamp(fmt.min, fmt.max))))
    assert (fmt.round(x).abs() <= max(abs(fmt.min), fmt.max)).all()


@for_each_format
@given(data=st.data(), method=st.sampled_from(ROUND_METHODS))
def test_round_is_encode_and_decode(name, data, method):
    fmt = FORMATS[name]
    x = data.draw(scaled_values(fmt, shape=data.draw(SHAPES)))
    before = x.clone()
    codes = fmt.encode(x, method)
    assert codes.shape == x.shape
    decoded = fmt.decode(codes)
    assert decoded.shape == x.shape
    assert torch.equal(fmt.round(x, method), decoded)
    assert torch.equal(x, before), "encode and round leave their argument alone"
    assert fmt.round_(x, method) is x
    assert torch.equal(x, decoded)


@for_each_format
@given(data=st.data(), method=st.sampled_from(ROUND_METHODS))
def test_rounding_twice_is_rounding_once(name, data, method):
    fmt = FORMATS[name]
    once = fmt.round(data.draw(scaled_values(fmt)), method)
    assert torch.equal(fmt.round(once, method), once)


@for_each_format
@given(data=st.data(), method=st.sampled_from(ROUND_METHODS))
def test_order_is_kept(name, data, method):
    fmt = FORMATS[name]
    x = data.draw(scaled_values(fmt)).sort().values
    assert (fmt.decode(fmt.encode(x, method)).diff() >= 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_code_comes_back(name):
    """All bit patterns in the storage; -0 may come back as 0, infinity as the end, NaN as any NaN."""
    fmt = FORMATS[name]
    num_codes = len(fmt.table) if isinstance(fmt, CodebookFormat) else 1 << fmt.bits
    patterns = torch.arange(num_codes, dtype=torch.int32)
    if isinstance(fmt, IntFormat):
        codes = (patterns + fmt.min).to(getattr(torch, fmt.storage))
    else:
        codes = patterns.to(torch.uint8 if fmt.bits <= 8 else torch.int16).view(getattr(torch, fmt.storage))
    values = fmt.decode(codes)
    again = fmt.encode(values)
    same = (bits_of(again) == bits_of(codes)) | (values == 0) | ~values.isfinite()
    assert same.all()
    torch.testing.assert_close(fmt.decode(again), values.clamp(fmt.min, fmt.max), rtol=0, atol=0, equal_nan=True)
    if fmt.bits <= 8:
        assert values[values.isfinite()].unique().tolist() == torch.tensor(fmt.grid()).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_any_memory_layout(name):
    fmt = FORMATS[name]
    dense = torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(1)) * fmt.max / 3
    for x in (dense.permute(2, 0, 1), dense[1:, ::3, 1:], dense[:, :1].expand(6, 5, 10), dense[0, 0, 0]):
        assert torch.equal(bits_of(fmt.encode(x)), bits_of(fmt.encode(x.contiguous())))
        assert torch.equal(fmt.round(x), fmt.round(x.contiguous()))
        codes = fmt.encode(x)
        assert torch.equal(fmt.decode(codes), fmt.decode(codes.contiguous()))
    x = dense.clone().permute(2, 0, 1)
    assert torch.equal(fmt.round_(x.clone(memory_format=torch.preserve_format)), fmt.round(x.contiguous()))
    assert torch.equal(bits_of(fmt.encode(dense.bfloat16())), bits_of(fmt.encode(dense.bfloat16().float())))


@pytest.mark.parametrize("name", PACKED)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.int32, torch.uint8]))
def test_unpack_undoes_pack(name, data, dtype):
    fmt = FORMATS[name]
    shape = data.draw(arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=40).filter(few_values))
    order = data.draw(st.sampled_from([None, HIGH_FIRST, AWQ_ORDER]))
    codes = fmt.encode(data.draw(scaled_values(fmt, shape=shape)))
    words = pack(codes, fmt.bits, order, dtype)
    assert words.dtype == dtype
    group = 1 if order is None else len(order)
    num_bits = math.ceil(shape[-1] / group) * group * fmt.bits
    assert words.shape == (*shape[:-1], math.ceil(num_bits / torch.iinfo(dtype).bits))
    back = unpack(words, fmt, order, length=shape[-1])
    assert back.dtype == codes.dtype
    assert torch.equal(back, codes)


def few_values(shape):
    return math.prod(shape) <= 2000


def bits_of(codes):
    """Codes as integers that can be compared, whatever the storage."""
    return codes.view({1: torch.uint8, 2: torch.int16}[codes.itemsize])
