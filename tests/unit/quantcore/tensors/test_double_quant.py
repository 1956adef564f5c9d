"""Scales quantized once more: the map, what comes back, and the corners where a scale could become 0."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.presets import PRESETS
from quantcore.config.quantization import QuantizationSpec
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.errors import ConfigError
from quantcore.export import EXPORTERS
from quantcore.tensors.double_quant import NestedScales, dynamic_map
from quantcore.tensors.qtensor import QLayer

CPU = torch.device("cpu")
DOUBLE, PLAIN = PRESETS["nf4_double_quant"].layer_config, PRESETS["nf4"].layer_config


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_map_has_both_signs_and_more_steps_in_each_decade():
    values = dynamic_map(CPU)
    assert len(values) == 256 and (values.diff() > 0).all()
    assert values[127] == 0 and values[255] == 1
    assert torch.equal(values[:127], -values[128:255].flip(0))
    positive = values[128:255]
    assert [int(((positive > 10.0**-d / 10) & (positive < 10.0**-d)).sum()) for d in range(7)] == [
        64, 32, 16, 8, 4, 2, 1
    ]  # fmt: skip
    assert positive[-1] == pytest.approx(1 - 0.9 / 128) and positive[0] == pytest.approx(0.55e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 7), groups=st.integers(1, 150), magnitude=st.integers(-30, 30))
def test_every_scale_takes_the_nearest_value(seed, rows, groups, magnitude):
    scale = normal(rows, groups, seed=seed % 2**31).abs() * 2.0**magnitude
    nested = NestedScales.of(scale)
    assert nested.codes.shape == scale.shape and len(nested.absmax) == -(-scale.numel() // 256)
    assert nested.offset == scale.flatten().mean()
    distance = (scale - nested.offset).flatten().double()
    unit = nested.absmax.double().repeat_interleave(256)[: len(distance)]
    possible = dynamic_map(CPU).double() * unit.unsqueeze(-1)
    best = (possible - distance.unsqueeze(-1)).abs().amin(-1)
    found = (possible.gather(-1, nested.codes.flatten().long().unsqueeze(-1))[:, 0] - distance).abs()
    assert (found <= best + unit * 1e-6).all()
    assert torch.equal(NestedScales(nested.codes, nested.absmax, nested.offset).decode(), nested.decode())


@pytest.mark.parametrize("scale", [torch.full((3, 100), 0.5), torch.zeros(2, 4), torch.tensor([[1.0]])])
def test_scales_that_are_all_alike_come_back(scale):
    nested = NestedScales.of(scale)
    torch.testing.assert_close(nested.decode(), scale, rtol=0, atol=1e-30)
    assert (nested.codes - 127 <= 1).all()  # that of 0, or the next one, lest a scale be 0


def test_no_scale_is_zero():
    """A scale of 0 whose distance from the mean is exactly what a code stands for would come back as 0."""
    means = -dynamic_map(CPU)[:64].unsqueeze(-1)  # with distances up to 1
    scales = torch.cat([torch.zeros_like(means), means + 1, 2 * means - 1, means], dim=1)
    nearest = [NestedScales.of(scale.unsqueeze(0)) for scale in scales]
    assert all((nested.decode() != 0).all() for nested in nearest)
    assert sum(float(nested.decode()[0, 0]) > 0.005 for nested in nearest) > 10  # which took the code above


def test_a_group_of_zeros_does_not_outweigh_its_neighbours():
    weight = normal(4, 1024) * 1e-3
    weight[:, 64:128] = 0
    quantized = round_to_nearest(weight, DOUBLE.weight)
    assert quantized.params.nested.absmax.max() < 5e-3
    restored = quantized.dequantize()
    assert restored.isfinite().all() and (restored[:, 64:128] == 0).all()
    assert (restored - weight).norm() < 0.1 * weight.norm()


def test_what_the_second_quantization_costs():
    """Of normal weights, in a share of their norm; with float32 scales it is 0.0893."""
    weight = normal(64, 1024)
    costs = [
        ((round_to_nearest(weight, config.weight).dequantize() - weight).norm() / weight.norm()).item()
        for config in (PLAIN, DOUBLE)
    ]
    assert costs[0] < costs[1] < costs[0] * 1.01


@pytest.mark.parametrize("spec", [{"dtype": "int4"}, {"qscheme": "per_channel", "group_size": None}])
def test_other_specs_have_no_such_scales(spec):
    with pytest.raises(ConfigError, match="double_quant is only for nf4 and fp4_bnb weights"):
        QuantizationSpec(
            **{"dtype": "nf4", "qscheme": "per_group", "group_size": 64, "scale_type": "double_quant", **spec}
        )


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 3.0, 1e20])
def test_the_mean_is_stored_to_the_last_bit_in_a_text_of_one_length(magnitude):
    exporter, layer = EXPORTERS.get("bitsandbytes"), LayerPlan("proj", None, (8, 192), DOUBLE)
    quantized = round_to_nearest(normal(8, 192) * magnitude, layer.weight)
    parts = exporter.encode(layer, QLayer(quantized), "F32")
    layout = exporter.layout(layer, "F32")
    assert {part: tuple(tensor.shape) for part, tensor in parts.items()} == {
        part: entry.shape for part, entry in layout.items()
    }
    state = json.loads(bytes(parts["weight.quant_state.bitsandbytes__nf4"].tolist()))
    assert torch.tensor(state["nested_offset"]) == quantized.params.nested.offset
    assert torch.equal(exporter.decode(layer, parts).weight.dequantize(), quantized.dequantize())
