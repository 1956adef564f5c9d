"""Scale, zero point, quantize, dequantize: properties, edges, and independent references."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantcore.config.grouping import Grouping, weight_grouping
from quantcore.config.presets import PRESETS
from quantcore.config.quantization import QuantizationSpec
from quantcore.errors import ConfigError
from quantcore.tensors.affine import (
    dequantize,
    fake_quantize,
    fake_quantize_activation,
    find_params,
    min_max,
    quantize,
)
from quantcore.tensors.qtensor import quantize_weight

SPECS = {
    "int4": QuantizationSpec(dtype="int4"),
    "int4_asym": QuantizationSpec(dtype="int4", symmetric=False),
    "uint4_asym": QuantizationSpec(dtype="uint4", symmetric=False),
    "int8": QuantizationSpec(dtype="int8"),
    "int8_asym": QuantizationSpec(dtype="int8", symmetric=False),
    "uint8_float_zero": QuantizationSpec(dtype="uint8", symmetric=False, zero_point_type="float32"),
    "fp8": QuantizationSpec(dtype="fp8_e4m3"),
}
GROUPINGS = [Grouping(), Grouping(axis=0, across=True), Grouping(axis=1, size=8), Grouping(block=(4, 8))]


def params_of(x, spec, grouping=None, dtype=torch.float32):
    return find_params(*min_max((grouping or weight_grouping(spec)).split(x)), spec, dtype)


@pytest.mark.parametrize("name", SPECS)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-20, 20), grouping=st.sampled_from(GROUPINGS))
def test_error_is_at_most_half_a_step_and_a_second_pass_changes_nothing(name, seed, exponent, grouping):
    spec = SPECS[name]
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    params = params_of(x, spec, grouping)
    once = fake_quantize(x, spec, grouping, params)
    step = params.scale if name != "fp8" else params.scale * 32  # the widest gap of e4m3 is 32, between 256 and 448
    worst = grouping.split((x - once).abs()).amax(-1)
    assert (worst <= 0.5 * step * (1 + 1e-4)).all()
    if name != "uint8_float_zero":  # its grid need not hold its own values to the last bit
        assert torch.equal(fake_quantize(once, spec, grouping, params), once)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_gives_a_weight_near_the_float_one_that_stays_put(preset):
    spec = PRESETS[preset].layer_config.weight
    weight = torch.randn(64, 256)
    codes = quantize_weight(weight, params_of(weight, spec), spec)
    restored = codes.dequantize()
    share = ((weight - restored).norm() / weight.norm()).item()
    bound = {"int8": 0.02, "int6": 0.05, "int5": 0.1, "uint5": 0.1, "int3": 0.25, "int2": 0.7, "uint2": 0.7}
    bound |= dict.fromkeys(("int4", "uint4", "fp4", "nf4", "fp4_bnb"), 0.2)
    bound |= dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s"), 0.4) | {"iq1_s": 0.6, "iq1_m": 0.55}
    bound |= {"tq1_0": 0.85, "tq2_0": 0.85}  # their range should not end at the largest value, as it does here
    assert 0 < share < bound.get(spec.dtype.value, 2.0 ** -(spec.format.mantissa_bits + 2))
    again = quantize_weight(restored, codes.params, spec)
    assert torch.equal(again.dequantize(), restored)
    assert torch.equal(fake_quantize(weight, spec, weight_grouping(spec), codes.params), restored)


@pytest.mark.parametrize("name", ["int4_asym", "uint4_asym", "int8_asym"])
def test_asymmetric_steps_divide_the_range_and_the_zero_point_is_the_best_of_all(name):
    fmt = SPECS[name].format
    x = torch.randn(200, 16) + torch.randn(200, 1)
    minimum, maximum = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    params = find_params(minimum, maximum, SPECS[name], torch.float32)
    low, high = minimum.double().clamp(max=0), maximum.double().clamp(min=0)
    step = (high - low) / (fmt.max - fmt.min)
    torch.testing.assert_close(params.scale.double(), step, rtol=1e-6, atol=0)
    every_zero_point = torch.arange(fmt.min, fmt.max + 1, dtype=torch.float64)
    steps_beyond = torch.maximum(fmt.min - every_zero_point - low / step, high / step + every_zero_point - fmt.max)
    chosen = steps_beyond.gather(1, (params.zero_point - fmt.min).long())
    torch.testing.assert_close(chosen[:, 0], steps_beyond.min(dim=1).values, rtol=0, atol=1e-4)
    assert (chosen <= 0.5 + 1e-4).all()  # 255 steps of float32


def test_a_float_zero_point_uses_the_whole_range_exactly():
    x = torch.tensor([[-0.3, 1.7, 0.2]])
    params = params_of(x, SPECS["uint8_float_zero"])
    assert params.zero_point.dtype == torch.float32
    torch.testing.assert_close(params.scale, torch.tensor([[2.0 / 255]]))
    codes = quantize(Grouping().split(x), params, SPECS["uint8_float_zero"])
    assert codes.flatten()[:2].tolist() == [0, 255]


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_symmetric_scale_puts_the_largest_value_on_the_last_code(name):
    fmt = SPECS[name].format
    x = torch.tensor([[-3.0, 1.0, 0.5], [-1.0, 3.0, 0.5]])
    params = params_of(x, SPECS[name], Grouping(axis=0, across=True))
    assert params.zero_point is None
    expected = torch.tensor([max(3 / -fmt.min, 1 / fmt.max), max(1 / -fmt.min, 3 / fmt.max)])
    torch.testing.assert_close(params.scale[:, 0], expected)


def test_codes_are_those_of_torch_fake_quantize():
    x = torch.randn(8, 64)
    spec, rows = SPECS["int8_asym"], Grouping(axis=0, across=True)
    params = params_of(x, spec, rows)
    ours = fake_quantize(x, spec, rows, params)
    theirs = torch.fake_quantize_per_channel_affine(x, params.scale[:, 0], params.zero_point[:, 0], 0, -128, 127)
    far = (ours - theirs).abs()
    assert far.max() <= params.scale.max() * 1.001  # they multiply by 1 / scale: a tie may fall the other way
    assert (far > 1e-6).float().mean() < 0.01


@pytest.mark.parametrize("name", [name for name in SPECS if name != "uint8_float_zero"])
def test_a_row_of_zeros_gets_scale_one_and_stays_zero(name):
    spec, rows = SPECS[name], Grouping(axis=0, across=True)
    x = torch.zeros(3, 16)
    x[1] = torch.randn(16)
    params = params_of(x, spec, rows, torch.bfloat16)
    assert params.scale[0].item() == 1.0
    restored = fake_quantize(x, spec, rows, params)
    assert (restored[0] == 0).all() and (restored[2] == 0).all() and (restored[1] != 0).any()


@pytest.mark.parametrize("preset", ["mxfp4", "nvfp4", "int4_fp8", "mxint8", "fp8_block", "nf4"])
def test_a_weight_of_zeros_stays_zero(preset):
    spec = PRESETS[preset].layer_config.weight
    weight = torch.zeros(64, 64)
    params = params_of(weight, spec)
    assert torch.isfinite(params.scale).all() and (params.scale > 0).all()
    assert (quantize_weight(weight, params, spec).dequantize() == 0).all()


@pytest.mark.parametrize("name", ["uint4_asym", "int8_asym"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_zero_is_exact_even_when_all_values_have_one_sign(name, sign):
    spec = SPECS[name]
    params = params_of(sign * (5 + torch.rand(2, 32)), spec)
    codes = quantize(torch.zeros(1, 1, 64), params, spec)
    assert (dequantize(codes, params, spec) == 0).all()


def test_the_scale_is_exact_in_its_stored_dtype_before_codes_are_chosen():
    x = torch.randn(16, 64)
    for dtype in (torch.bfloat16, torch.float16):
        scale = params_of(x, SPECS["int8"], Grouping(axis=0, across=True), dtype).scale
        assert torch.equal(scale.to(dtype).float(), scale)


def test_a_scale_below_the_dtype_becomes_its_smallest_normal():
    scale = params_of(torch.full((1, 4), 1e-9), SPECS["int8"], dtype=torch.float16).scale
    assert scale.item() == torch.finfo(torch.float16).tiny


@pytest.mark.parametrize("name", ["int8", "uint4_asym", "uint8_float_zero", "fp8"])
def test_a_range_as_wide_as_float32_does_not_overflow(name):
    x = torch.tensor([[-3e38, 3.2e38, 1e38]])
    params = params_of(x, SPECS[name])
    assert torch.isfinite(params.scale).all()
    restored = fake_quantize(x, SPECS[name], Grouping(), params)
    assert torch.isfinite(restored).all()
    assert ((restored - x).abs() <= 0.51 * params.scale * (32 if name == "fp8" else 1)).all()


@given(value=st.floats(1e-30, 1e30))
def test_pof2_is_the_next_power_of_two_so_that_nothing_clips(value):
    spec = QuantizationSpec(dtype="int8", scale_type="pof2")
    scale = find_params(torch.tensor([[-value]]), torch.tensor([[0.0]]), spec, torch.float32).scale.item()
    assert math.log2(scale).is_integer()
    assert scale >= value / 128 * (1 - 1e-7) > scale / 2 * (1 - 1e-6)


ELEMENTS = {"fp4": (6.0, 1.75), "fp6_e2m3": (7.5, 1.9375), "fp6_e3m2": (28.0, 1.875), "fp8_e4m3": (448.0, 1.9375),
            "fp8_e5m2": (57344.0, 1.875), "int8": (127.0, 2 - 2**-7)}  # fmt: skip
"""Element type -> (largest value, mantissa from which the even rule takes the next power of two)."""


@pytest.mark.parametrize("dtype", ELEMENTS)
@given(mantissa=st.floats(1, 2, exclude_max=True, width=32), exponent=st.integers(-100, 100))
def test_e8m0_scales_follow_their_rules(dtype, mantissa, exponent):
    largest, threshold = ELEMENTS[dtype]
    emax = math.floor(math.log2(largest))
    expected = {
        "floor": exponent,
        "ceil": exponent + (mantissa > 1),
        "even": exponent + (mantissa >= threshold),
    }
    for mode, power in expected.items():
        spec = QuantizationSpec(dtype=dtype, scale_type="e8m0", scale_calculation_mode=mode)
        amax = torch.tensor([[mantissa * 2.0**exponent]])
        scale = find_params(-amax / 3, amax, spec, torch.bfloat16).scale.item()
        assert scale == 2.0 ** max(min(power - emax, 127), -127), mode
        if mode == "ceil":
            assert amax.item() / scale <= largest


@pytest.mark.parametrize("mode", ["floor", "even", "ceil"])
def test_e8m0_scales_at_the_ends(mode):
    spec = QuantizationSpec(dtype="fp4", scale_type="e8m0", scale_calculation_mode=mode)
    inf, nan = float("inf"), float("nan")
    largest = torch.tensor([[0.0, -0.0, 1e-45, 2.0**-126, 2.0**-125, 3.4e38, inf, nan]])
    scale = find_params(-largest, largest, spec, torch.float32).scale[0]
    top = 128 if mode != "floor" else 127
    expected = [1.0, 1.0, 2.0**-127, 2.0**-127, 2.0**-127, 2.0 ** (top - 2), inf, nan]
    torch.testing.assert_close(scale, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_nvfp4_block_scales_fit_e4m3_under_one_global_scale():
    spec = PRESETS["nvfp4"].layer_config.weight
    weight = torch.randn(32, 64) * torch.logspace(-3, 3, 32).unsqueeze(1)
    params = params_of(weight, spec)
    torch.testing.assert_close(params.global_scale, weight.abs().max() / (6 * 448))
    assert params.scale.max() == 448
    assert torch.equal(params.scale.to(torch.float8_e4m3fn).float(), params.scale)
    assert params.scale.shape == (32, 4)


def test_int4_over_fp8_quantizes_the_fp8_codes():
    spec = PRESETS["int4_fp8"].layer_config.weight
    weight = torch.randn(16, 64)
    params = params_of(weight, spec)
    first = weight.abs().max() / 448
    fp8 = (weight / first).to(torch.float8_e4m3fn).float()
    second = torch.maximum(fp8.amax(1, keepdim=True) / 7, fp8.amin(1, keepdim=True) / -8)
    torch.testing.assert_close(params.scale, second)
    expected = (fp8 / second).round().clamp(-8, 7) * second * first
    torch.testing.assert_close(quantize_weight(weight, params, spec).dequantize(), expected)


def test_an_outlier_costs_only_its_own_group():
    x = torch.randn(1, 128)
    x[0, 0] = 1e4
    groups = Grouping(axis=1, size=32)
    restored = fake_quantize(x, SPECS["int4"], groups, params_of(x, SPECS["int4"], groups))
    assert (restored[0, 1:32] == 0).all()
    assert (restored[0, 32:] - x[0, 32:]).norm() / x[0, 32:].norm() < 0.2


def test_nan_is_seen_by_min_max_and_by_every_scale():
    x = torch.randn(2, 32)
    x[1, 3] = float("nan")
    minimum, maximum = min_max(Grouping(axis=0, across=True).split(x))
    assert torch.isfinite(minimum[0]).all() and torch.isnan(minimum[1]).all() and torch.isnan(maximum[1]).all()
    for spec in (SPECS["int8"], SPECS["uint4_asym"], PRESETS["mxfp4"].layer_config.weight):
        assert not torch.isfinite(find_params(minimum, maximum, spec, torch.float32).scale[1]).any()


class TestActivations:
    def test_tokens_do_not_know_each_other(self):
        spec = PRESETS["int8_dynamic"].layer_config.input_tensors
        x = torch.randn(2, 3, 64) * torch.tensor([1.0, 100.0, 1e-3]).view(1, 3, 1)
        whole = fake_quantize_activation(x, spec, None)
        alone = torch.stack([fake_quantize_activation(token, spec, None) for token in x.reshape(6, 1, 64)])
        assert torch.equal(whole.reshape(6, 1, 64), alone)

    def test_static_scales_of_features(self):
        spec = QuantizationSpec(dtype="int8", qscheme="per_channel", ch_axis=-1)
        x = torch.randn(2, 5, 8) * torch.logspace(-2, 2, 8)
        params = find_params(*min_max(Grouping(axis=-1, across=True).split(x)), spec, torch.float32)
        assert params.scale.shape == (8, 1)
        error = (fake_quantize_activation(x, spec, params) - x).abs().amax((0, 1))
        assert (error <= params.scale[:, 0] / 2 * 1.001).all()

    def test_a_calibrated_global_scale_is_used_by_dynamic_groups(self):
        spec = PRESETS["nvfp4"].layer_config.input_tensors
        x = torch.randn(1, 4, 32)
        known = find_params(*min_max(Grouping().split(x)), spec, torch.float32)
        assert torch.equal(
            fake_quantize_activation(x, spec, replace(known, scale=known.global_scale)),
            fake_quantize_activation(x, spec, None),
        )

    def test_a_plain_cast_rounds_and_nothing_else(self):
        spec = QuantizationSpec(dtype="bfloat16", observer_cls="PlaceholderObserver")
        x = torch.randn(3, 4, 5)
        assert torch.equal(fake_quantize_activation(x, spec, None), x.bfloat16().float())

    def test_features_with_an_outlier_pass_and_do_not_widen_the_others(self):
        """As LLM.int8() computes it: a feature that reaches the threshold in any token stays as it is."""
        spec = QuantizationSpec(dtype="int8", qscheme="per_channel", is_dynamic=True, outlier_threshold=6.0)
        x = torch.randn(2, 5, 16)
        x[0, 3, 7], x[1, 0, 2], x[1, 4, 9] = 6.0, -40.0, 5.99
        got = fake_quantize_activation(x, spec, None)
        kept = [feature for feature in range(16) if any(abs(v) >= 6 for v in x[..., feature].flatten().tolist())]
        assert kept == [2, 7] and torch.equal(got[..., kept], x[..., kept])
        rest = [feature for feature in range(16) if feature not in kept]
        for token, values in zip(x.flatten(0, 1), got.flatten(0, 1), strict=True):
            scale = max(token[rest].max() / 127, -token[rest].min() / 128)
            torch.testing.assert_close(values[rest], (token[rest] / scale).round() * scale, rtol=1e-5, atol=1e-6)

    def test_an_outlier_threshold_goes_with_dynamic_tokens_only(self):
        with pytest.raises(ConfigError, match="outlier_threshold is only for dynamic per_channel"):
            QuantizationSpec(dtype="int8", outlier_threshold=6.0)
