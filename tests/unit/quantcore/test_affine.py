"""Scale, zero point, quantize, dequantize: properties, edges, and independent references."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantcore.affine import affine_params, dequantize, fake_quantize, min_max, quantize
from quantcore.config import QuantizationSpec

SPECS = {
    "int4": QuantizationSpec(dtype="int4"),
    "int4_asym": QuantizationSpec(dtype="int4", symmetric=False),
    "uint4_asym": QuantizationSpec(dtype="uint4", symmetric=False),
    "int8": QuantizationSpec(dtype="int8"),
    "int8_asym": QuantizationSpec(dtype="int8", symmetric=False),
    "fp8": QuantizationSpec(dtype="fp8_e4m3"),
}
GRANULARITIES = [(1, 1), (6, 1), (6, 4)]


@pytest.mark.parametrize("name", SPECS)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-20, 20), granularity=st.sampled_from(GRANULARITIES))
def test_error_is_at_most_half_a_step_and_a_second_pass_changes_nothing(name, seed, exponent, granularity):
    spec = SPECS[name]
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    scale, zero_point = affine_params(*min_max(x, *granularity), spec, torch.float32)
    once = fake_quantize(x, scale, zero_point, spec.format)
    step = scale if name != "fp8" else scale * 32  # the widest gap of e4m3 is 32, between 256 and 448
    worst = (x - once).reshape(*granularity, -1).abs().amax(-1)
    assert (worst <= 0.5 * step * (1 + 1e-4)).all()
    assert torch.equal(fake_quantize(once, scale, zero_point, spec.format), once)


@pytest.mark.parametrize("name", ["int4_asym", "uint4_asym", "int8_asym"])
def test_asymmetric_scale_is_the_smallest_of_all_zero_points_that_clips_nothing(name):
    fmt = SPECS[name].format
    x = torch.randn(200, 16) + torch.randn(200, 1)
    minimum, maximum = min_max(x, 200, 1)
    scale, zero_point = affine_params(minimum, maximum, SPECS[name], torch.float32)
    low, high = minimum.double().clamp(max=0), maximum.double().clamp(min=0)
    every_zero_point = torch.arange(fmt.min, fmt.max + 1, dtype=torch.float64)
    needed_below = torch.where(low < 0, -low / (every_zero_point - fmt.min), 0.0)
    needed_above = torch.where(high > 0, high / (fmt.max - every_zero_point), 0.0)
    needed = torch.maximum(needed_below, needed_above)
    torch.testing.assert_close(scale[:, 0].double(), needed.min(dim=1).values, rtol=1e-6, atol=0)
    chosen = needed.gather(1, (zero_point - fmt.min).long())
    torch.testing.assert_close(chosen[:, 0], needed.min(dim=1).values, rtol=1e-6, atol=0)
    codes = (x / scale + zero_point).round()
    assert codes.min() >= fmt.min and codes.max() <= fmt.max


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_symmetric_scale_puts_the_largest_value_on_the_last_code(name):
    fmt = SPECS[name].format
    x = torch.tensor([[-3.0, 1.0, 0.5], [-1.0, 3.0, 0.5]])
    scale, zero_point = affine_params(*min_max(x, 2, 1), SPECS[name], torch.float32)
    assert zero_point is None
    expected = torch.tensor([max(3 / -fmt.min, 1 / fmt.max), max(1 / -fmt.min, 3 / fmt.max)])
    torch.testing.assert_close(scale[:, 0], expected)


def test_codes_are_those_of_torch_fake_quantize():
    x = torch.randn(8, 64)
    spec = SPECS["int8_asym"]
    scale, zero_point = affine_params(*min_max(x, 8, 1), spec, torch.float32)
    ours = fake_quantize(x, scale, zero_point, spec.format)
    theirs = torch.fake_quantize_per_channel_affine(x, scale[:, 0], zero_point[:, 0], 0, -128, 127)
    assert (
        ours - theirs
    ).abs().max() <= scale.max() * 1.001  # they multiply by 1 / scale: a tie may fall the other way
    assert ((ours - theirs).abs() > 1e-6).float().mean() < 0.01


@pytest.mark.parametrize("name", SPECS)
def test_a_row_of_zeros_gets_scale_one_and_stays_zero(name):
    spec = SPECS[name]
    x = torch.zeros(3, 16)
    x[1] = torch.randn(16)
    scale, zero_point = affine_params(*min_max(x, 3, 1), spec, torch.bfloat16)
    assert scale[0].item() == 1.0
    restored = fake_quantize(x, scale, zero_point, spec.format)
    assert (restored[0] == 0).all() and (restored[2] == 0).all() and (restored[1] != 0).any()


@pytest.mark.parametrize("name", ["uint4_asym", "int8_asym"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_zero_is_exact_even_when_all_values_have_one_sign(name, sign):
    spec = SPECS[name]
    x = sign * (5 + torch.rand(2, 32))
    scale, zero_point = affine_params(*min_max(x, 2, 1), spec, torch.float32)
    codes = quantize(torch.zeros(2, 32), scale, zero_point, spec.format)
    assert (dequantize(codes, scale, zero_point, spec.format) == 0).all()


def test_the_scale_is_exact_in_its_stored_dtype_before_codes_are_chosen():
    x = torch.randn(16, 64)
    for dtype in (torch.bfloat16, torch.float16):
        scale, _ = affine_params(*min_max(x, 16, 1), SPECS["int8"], dtype)
        assert torch.equal(scale.to(dtype).float(), scale)


def test_a_scale_below_the_dtype_becomes_its_smallest_normal():
    x = torch.full((1, 4), 1e-9)
    scale, _ = affine_params(*min_max(x, 1, 1), SPECS["int8"], torch.float16)
    assert scale.item() == torch.finfo(torch.float16).tiny


def test_an_outlier_costs_only_its_own_group():
    x = torch.randn(1, 128)
    x[0, 0] = 1e4
    spec = SPECS["int4"]
    scale, zero_point = affine_params(*min_max(x, 1, 4), spec, torch.float32)
    restored = fake_quantize(x, scale, zero_point, spec.format)
    assert (restored[0, 1:32] == 0).all()
    assert (restored[0, 32:] - x[0, 32:]).norm() / x[0, 32:].norm() < 0.2


def test_nan_is_seen_by_min_max():
    x = torch.randn(2, 8)
    x[1, 3] = float("nan")
    minimum, maximum = min_max(x, 2, 1)
    assert torch.isfinite(minimum[0]).all() and torch.isnan(minimum[1]).all() and torch.isnan(maximum[1]).all()
