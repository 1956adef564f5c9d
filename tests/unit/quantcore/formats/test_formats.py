"""Number formats against ml_dtypes and torch's casts on all bit patterns, and codebooks against their definitions."""

import math
import shutil
from itertools import pairwise
from statistics import NormalDist

import ml_dtypes
import numpy as np
import pytest
import torch

from quantcore.formats import FORMATS, CodebookFormat, FloatFormat, IntFormat, tables
from quantcore.formats.floats import decode_e8m0, encode_e8m0
from tests.support.params import with_rare, with_usual

NAMES = (
    "int2 int3 int4 int5 int6 int8 int16 uint2 uint4 uint5 uint8 uint16 float16 bfloat16 fp8_e4m3 fp8_e4m3fnuz "
    "fp8_e5m2 fp6_e3m2 fp6_e2m3 fp4 nf4 iq4_nl iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq1_s iq1_m tq1_0 tq2_0 fp4_bnb"
).split()
REFERENCES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4": ml_dtypes.float4_e2m1fn,
}
TORCH_CASTS = [name for name in REFERENCES if FORMATS[name].bits >= 8]


def ulps_around(x):
    """Every x with its two float32 neighbours."""
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    return torch.cat([x, x.nextafter(up), x.nextafter(down)])


def all_code_values(name):
    """The value of every bit pattern, by the reference."""
    bits = FORMATS[name].bits
    codes = np.arange(1 << bits, dtype=np.uint8 if bits <= 8 else np.uint16)
    return torch.from_numpy(codes.view(REFERENCES[name]).astype(np.float32))


def probes(name):
    """Where rounding goes wrong if it does: all values of the format and the middles between them, one float32 step
    off, zeros, ends, every bfloat16, and random float32 bit patterns. No NaN."""
    values = all_code_values(name)
    values = values[values.isfinite()].sort().values
    middles = ((values[1:].double() + values[:-1].double()) / 2).float()
    bfloat16 = torch.arange(1 << 16, dtype=torch.int32).bitwise_left_shift(16).view(torch.float32)
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(1 << 31), 1 << 31, (300_000,), generator=generator, dtype=torch.int32).view(torch.float32)
    x = torch.cat([ulps_around(values), ulps_around(middles), bfloat16, random])
    return x[~x.isnan()]


def bits_of(codes):
    return codes.view({1: torch.uint8, 2: torch.int16}[codes.itemsize])


def test_all_formats_are_there():
    assert list(FORMATS) == NAMES
    assert all(fmt.name == name for name, fmt in FORMATS.items())


def test_facts_of_the_ocp_documents():
    """emax and max of OCP MX 1.0, tables 1 to 5; the exponents decide e8m0 scales."""
    facts = {name: (fmt.max, fmt.emax, fmt.mantissa_bits) for name, fmt in FORMATS.items()}
    assert facts["fp8_e4m3"] == (448, 8, 3)
    assert facts["fp8_e5m2"] == (57344, 15, 2)
    assert facts["fp6_e3m2"] == (28, 4, 2)
    assert facts["fp6_e2m3"] == (7.5, 2, 3)
    assert facts["fp4"] == (6, 2, 1)
    assert facts["int8"] == (127, 6, 6)  # the document's 1.984 with emax 0, times its implied 2^6
    assert facts["fp8_e4m3fnuz"] == (240, 7, 3)


@pytest.mark.parametrize("name", NAMES)
def test_codes_have_the_storage_dtype(name):
    fmt = FORMATS[name]
    codes = fmt.encode(torch.zeros(2, 3))
    assert codes.dtype == getattr(torch, fmt.storage)
    assert fmt.decode(codes).dtype == torch.float32


@pytest.mark.parametrize("name", REFERENCES)
def test_encode_gives_the_codes_of_ml_dtypes(name):
    """Also the sign of zeros; values beyond the range saturate."""
    fmt, x = FORMATS[name], probes(name)
    limited = x.numpy().clip(np.float32(fmt.min), np.float32(fmt.max))
    expected = limited.astype(REFERENCES[name]).view(np.uint8 if fmt.bits <= 8 else np.int16)
    assert torch.equal(bits_of(fmt.encode(x)), torch.from_numpy(expected))


@pytest.mark.parametrize("name", REFERENCES)
def test_decode_gives_the_values_of_ml_dtypes(name):
    fmt, expected = FORMATS[name], all_code_values(name)
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32).to(torch.uint8 if fmt.bits <= 8 else torch.int16)
    decoded = fmt.decode(codes.view(getattr(torch, fmt.storage)))
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(decoded.signbit()[~expected.isnan()], expected.signbit()[~expected.isnan()])


@pytest.mark.parametrize("name", TORCH_CASTS)
def test_round_is_what_torch_casts_give(name):
    fmt, x = FORMATS[name], probes(name)
    expected = x.clamp(fmt.min, fmt.max).to(getattr(torch, fmt.storage)).float()
    assert torch.equal(fmt.round(x), expected)


@pytest.mark.parametrize("name", TORCH_CASTS)
def test_decode_is_what_torch_casts_give(name):
    fmt = FORMATS[name]
    dtype = getattr(torch, fmt.storage)
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32).to(torch.uint8 if fmt.bits == 8 else torch.int16).view(dtype)
    torch.testing.assert_close(fmt.decode(codes), codes.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_infinity_saturates(name):
    fmt = FORMATS[name]
    ends = torch.tensor([fmt.max, fmt.min], dtype=torch.float32)
    x = torch.tensor([math.inf, -math.inf])
    assert torch.equal(fmt.decode(fmt.encode(x)), ends)
    assert torch.equal(fmt.round(x), ends)


@pytest.mark.parametrize("name", NAMES)
def test_nan_is_kept_or_becomes_zero(name):
    """Formats with a NaN keep it; the others encode it as 0, and show it in a simulation."""
    fmt = FORMATS[name]
    patterns = torch.tensor([0x7FC00000, 0xFFC00000 - (1 << 32), 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32)
    x = torch.cat([patterns.view(torch.float32), torch.tensor([fmt.max])])  # quiet, negative, signalling, all ones
    decoded, rounded = fmt.decode(fmt.encode(x)), fmt.round(x)
    assert rounded[:-1].isnan().all()
    assert rounded[-1] == decoded[-1] == x[-1]
    if isinstance(fmt, FloatFormat) and fmt.bits >= 8:
        assert decoded[:-1].isnan().all()
    else:
        assert (decoded[:-1] == fmt.round(torch.zeros(1))).all()  # the value nearest to 0, where 0 is none


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        *(("int2", -2, 1), ("int3", -4, 3), ("int4", -8, 7), ("int8", -128, 127), ("int16", -32768, 32767)),
        *(("uint2", 0, 3), ("uint4", 0, 15), ("uint8", 0, 255), ("uint16", 0, 65535)),
    ],
)
def test_integers_reach_their_ends_and_no_further(name, low, high):
    fmt = FORMATS[name]
    assert (fmt.min, fmt.max) == (low, high)
    x = torch.tensor([-1e6, low - 0.6, low, low + 1, high - 1, high, high + 0.6, 1e6])
    assert fmt.encode(x).tolist() == [low, low, low, low + 1, high - 1, high, high, high]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("half_even", [-2, -2, -1, 0, 0, 0, 0, 1, 2, 2]),
        ("round", [-3, -2, -1, -1, 0, 0, 1, 1, 2, 3]),
        ("floor", [-3, -2, -1, -1, -1, 0, 0, 0, 1, 2]),
    ],
)
def test_rounding_of_integers(method, expected):
    below_half = 0.49999997  # the largest float32 below 1/2: adding 1/2 to it gives 1
    x = torch.tensor([-2.5, -1.5, -0.75, -0.5, -below_half, below_half, 0.5, 0.75, 1.5, 2.5])
    assert FORMATS["int8"].encode(x, method).tolist() == expected


def test_unknown_rounding_is_an_error():
    with pytest.raises(ValueError, match="half_even, round or floor, not 'up'"):
        FORMATS["int8"].encode(torch.ones(1), "up")


def test_nf4_is_the_quantiles_of_the_paper():
    """QLoRA, appendix E: 8 quantiles above zero, 7 below, zero itself; scaled to 1. The offset is its reference code's,
    the mean of 1 - 1/30 and 1 - 1/32; the published numbers were computed in float32."""
    offset = 1 - (1 / 30 + 1 / 32) / 2
    quantile = NormalDist().inv_cdf
    above = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    below = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    expected = [value / max(above) for value in sorted([*above, *below, 0.0])]
    assert FORMATS["nf4"].table == pytest.approx(expected, abs=2e-7)
    assert FORMATS["nf4"].table[7] == 0


def test_fp4_of_bitsandbytes_is_its_published_table():
    """In units of 1/12, by the three bits below the sign: exponent 0 is 0 and 1/16; the others are out of order."""
    units = {0b000: 0, 0b001: 1 / 16, 0b010: 8, 0b011: 12, 0b100: 4, 0b101: 6, 0b110: 2, 0b111: 3}
    fmt = FORMATS["fp4_bnb"]
    for code, unit in units.items():
        assert fmt.table[code] == pytest.approx(unit / 12)
        assert fmt.table[code | 0b1000] == pytest.approx(-unit / 12)
    assert fmt.encode(torch.tensor([1.0, -1.0, 0.0, -0.001, 0.2, -0.2])).tolist() == [3, 11, 0, 8, 6, 14]


@pytest.mark.parametrize("name", ["nf4", "fp4_bnb"])
def test_codebooks_take_the_nearest_entry(name):
    """By brute force in float64, a float32 step around every middle, and on a fine grid over the whole range."""
    fmt = FORMATS[name]
    grid = torch.tensor(fmt.grid()).double()
    middles = ((grid[1:] + grid[:-1]) / 2).float()
    x = torch.cat([ulps_around(middles), ulps_around(grid.float()), torch.linspace(-1.1, 1.1, 100_001)])
    inside = x.double().clamp(-1, 1)
    distance = (inside[:, None] - grid).abs().min(dim=1).values
    assert torch.equal((fmt.round(x).double() - inside).abs(), distance)


def test_ties_of_codebooks():
    lower = CodebookFormat("lower", (-1.0, -0.5, 0.0, 1.0), sign_bit=False, cells_per_unit=8)
    assert lower.decode(lower.encode(torch.tensor([-0.75, -0.25, 0.5]))).tolist() == [-1.0, -0.5, 0.0]
    to_zero = CodebookFormat("to_zero", (0.0, 0.5, -0.0, -1.0), sign_bit=True, cells_per_unit=8)
    assert to_zero.decode(to_zero.encode(torch.tensor([-0.5, 0.25]))).tolist() == [0.0, 0.0]
    assert to_zero.encode(torch.tensor([-1e-30, 0.0, 1e-30])).tolist() == [2, 0, 0]


@pytest.mark.parametrize("name", ["nf4", "fp4_bnb"])
def test_a_cell_holds_one_threshold(name):
    """What the look-up of codebooks rests on: thresholds no nearer to each other than two cells' borders."""
    fmt = FORMATS[name]
    grid = sorted(fmt.table, key=lambda value: (value, math.copysign(1, value)))
    cells = [math.floor((low + high) / 2 * fmt.cells_per_unit) for low, high in pairwise(grid)]
    assert len(set(cells)) == len(cells) == 15


def test_e8m0_like_ml_dtypes():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    decoded = decode_e8m0(codes)
    expected = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
    assert decoded[:255].log2().tolist() == [exponent - 127 for exponent in range(255)]
    assert torch.equal(encode_e8m0(decoded), codes)
    positive = torch.arange(1, 0x7F80, dtype=torch.int32).bitwise_left_shift(16).view(torch.float32)
    expected = torch.from_numpy(positive.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))
    assert torch.equal(encode_e8m0(positive), expected)


@pytest.mark.parametrize("name", with_usual(NAMES, ["int4", "fp8_e4m3", "fp4", "nf4", "bfloat16"]))
def test_torch_can_trace_every_format(name):
    """In one graph, without a branch on data; tables made while tracing do not stay behind."""
    fmt = FORMATS[name]
    x = torch.linspace(-1.5 * fmt.max, 1.5 * fmt.max, 1001) if fmt.scaled else torch.linspace(-3, 3, 1001)
    x = x.view(7, 11, 13)
    torch.compiler.reset()
    tables._TABLES.clear()
    traced = torch.compile(lambda x: (fmt.round(x), fmt.encode(x)), backend="aot_eager", fullgraph=True)
    rounded, codes = traced(x)
    assert not tables._TABLES
    assert torch.equal(rounded, fmt.round(x))
    assert torch.equal(bits_of(codes), bits_of(fmt.encode(x)))
    decode = torch.compile(fmt.decode, backend="aot_eager", fullgraph=True)
    assert torch.equal(decode(codes), fmt.decode(codes))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", with_rare(["bfloat16", "float16"], ["float16"]))
def test_the_compiler_does_not_take_rounding_for_nothing(name):
    """torch.compile drops a cast to 16 bits and back."""
    fmt, x = FORMATS[name], torch.linspace(-3, 3, 1001)
    torch.compiler.reset()
    assert torch.equal(torch.compile(fmt.round)(x), fmt.round(x))
    assert not torch.equal(fmt.round(x), x)


def test_grids_need_no_torch_and_large_ones_are_refused():
    assert FORMATS["fp4"].grid() == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert FORMATS["int3"].grid() == [-4, -3, -2, -1, 0, 1, 2, 3]
    assert len(FORMATS["fp8_e5m2"].grid()) == 2 * 123 + 1
    with pytest.raises(ValueError, match="bfloat16 has too many codes to list"):
        FORMATS["bfloat16"].grid()


def test_a_format_is_a_value():
    assert IntFormat("int4", 4, signed=True) == FORMATS["int4"]
    with pytest.raises(AttributeError):
        FORMATS["int4"].bits = 5
