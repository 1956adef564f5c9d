"""Scales in two levels: what is stored of them, also where they are tiny, zero, or far apart."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantcore.config.grouping import weight_grouping
from quantcore.config.presets import PRESETS
from quantcore.config.quantization import QuantizationSpec
from quantcore.errors import ConfigError
from quantcore.tensors.affine import QParams, find_params, minimum_of, quantize
from quantcore.tensors.qtensor import quantize_weight
from quantcore.tensors.super_blocks import LARGEST, as_two_levels, two_levels

K_PRESETS = (
    "gguf_iq2_xs",
    "gguf_iq3_s",
    "gguf_q2_k",
    "gguf_q3_k",
    "gguf_iq4_xs",
    "gguf_q4_k",
    "gguf_q5_k",
    "gguf_q6_k",
)
SPECS = {name: PRESETS[name].layer_config.weight for name in K_PRESETS}


def ends(x_OI, spec):
    x_RGS = weight_grouping(spec).split(x_OI)
    return x_RGS.amin(-1), x_RGS.amax(-1)


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), magnitude=st.integers(-26, 4), spread=st.integers(0, 12))
def test_every_parameter_is_a_whole_number_of_float16_units(name, seed, magnitude, spread):
    spec, generator = SPECS[name], torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 512, generator=generator) * 2.0**magnitude
    weight *= 2.0 ** -torch.randint(0, spread + 1, (6, 512 // 32, 1), generator=generator).expand(-1, -1, 32).flatten(1)
    weight[0] = 0
    weight[1, :40] = 0
    weight[2] = weight[2].abs()
    params = as_two_levels(find_params(*ends(weight, spec), spec, torch.float32), spec)
    assert (params.scale > 0).all() and params.scale.isfinite().all()
    stored = [(params.scale, 1)]
    if params.zero_point is not None:
        stored.append((-minimum_of(params.zero_point, params.scale, spec), 0))
    for values, at_least in stored:
        num_groups = 256 // spec.group_size
        values = values.reshape(6, -1, num_groups)
        unit, whole = two_levels(values, LARGEST[spec.scale_type])
        assert torch.equal(unit, unit.half().float())
        assert spec.scale_type != "odd4" or (whole % 2 == 1).all()
        assert (whole >= at_least).all() and (whole <= LARGEST[spec.scale_type]).all()
        torch.testing.assert_close(unit.unsqueeze(-1) * whole, values, rtol=2.0**-21, atol=0)
    again = as_two_levels(params, spec)
    torch.testing.assert_close(again.scale, params.scale, rtol=2.0**-5, atol=0)


@pytest.mark.parametrize(("name", "bound"), [
    ("gguf_iq2_xs", 0.33), ("gguf_iq3_s", 0.2),
    ("gguf_q2_k", 0.33), ("gguf_q3_k", 0.18), ("gguf_iq4_xs", 0.086), ("gguf_q4_k", 0.079), ("gguf_q5_k", 0.0385),
    ("gguf_q6_k", 0.0192),
])  # fmt: skip
def test_what_the_second_level_costs(name, bound):
    """Of normal weights. One float16 scale and minimum for each group would give 0.0783, 0.0378 and 0.0189."""
    spec, weight = SPECS[name], torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    params = find_params(*ends(weight, spec), spec, torch.float32)
    free, stored = (quantize_weight(weight, one, spec).dequantize() for one in (params, as_two_levels(params, spec)))
    costs = [((weight - restored).norm() / weight.norm()).item() for restored in (free, stored)]
    assert costs[0] < costs[1] < bound


def test_a_group_of_zeros_does_not_outweigh_its_neighbours():
    spec = SPECS["gguf_q4_k"]
    weight = torch.randn(1, 256) * 1e-3
    weight[:, 32:64] = 0
    params = as_two_levels(find_params(*ends(weight, spec), spec, torch.float32), spec)
    assert params.scale.max() < 1e-3
    codes = quantize(weight_grouping(spec).split(weight), params, spec)
    assert len(codes[0, 0].unique()) > 8


def test_other_specs_keep_their_parameters():
    params = QParams(torch.ones(2, 8))
    assert as_two_levels(params, PRESETS["gguf_q4_0"].layer_config.weight) is params


@pytest.mark.parametrize("change", [
    {"dtype": "uint8"}, {"group_size": 16}, {"zero_point_type": "int32"}, {"scale_type": "int8"},
    {"symmetric": True, "dtype": "int4", "zero_point_type": "int32"},
])  # fmt: skip
def test_only_what_the_k_types_store_is_a_spec(change):
    given = SPECS["gguf_q4_k"].to_dict() | change
    with pytest.raises(
        ConfigError, match=r"scale_type (uint6 is only for uint4 and uint5|int8 is only for symmetric int6)"
    ):
        QuantizationSpec(**given)
