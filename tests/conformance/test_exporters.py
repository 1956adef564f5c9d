"""Every exporter with every preset: what is written is what was planned, and reads back as what was computed.

New presets and exporters are picked up by themselves.
"""

import pytest
import torch

from quantcore.checkpoint.source import TORCH_DTYPES
from quantcore.config import QSchemeType, QuantizationConfig, QuantizationSpec
from quantcore.export import EXPORTERS
from quantcore.layer import LayerPlan
from quantcore.presets import PRESETS
from quantcore.qtensor import QParams
from quantcore.solvers import SOLVERS

EXTRA = {
    "int8_weight_only_asym": QuantizationConfig(
        weight=QuantizationSpec(dtype="int8", qscheme="per_channel", symmetric=False)
    ),
    "uint4_whole_row": QuantizationConfig(
        weight=QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=-1, symmetric=False)
    ),
    "int4_per_channel": QuantizationConfig(weight=QuantizationSpec(dtype="int4", qscheme="per_channel")),
    "fp8_weight_only": QuantizationConfig(weight=QuantizationSpec(dtype="fp8_e4m3", qscheme="per_channel")),
    "int8_static_asym_input": QuantizationConfig(
        weight=QuantizationSpec(dtype="int8", qscheme="per_channel"),
        input_tensors=QuantizationSpec(dtype="int8", symmetric=False),
    ),
    "float32_scales": QuantizationConfig(
        weight=QuantizationSpec(
            dtype="uint4", qscheme="per_group", group_size=32, symmetric=False, scale_type="float32"
        )
    ),
}
CONFIGS = {**{name: preset.layer_config for name, preset in PRESETS.items()}, **EXTRA}
SHAPES = [(64, 128), (8, 64), (72, 192)]


def solved(config, shape, solver="rtn"):
    layer = LayerPlan("model.layers.0.x", 0, *shape, config)
    weight = torch.randn(shape, dtype=torch.float32).bfloat16()
    weight[3] = 0  # a dead row
    weight[5, 7] = 30  # an outlier
    inputs = None
    if config.needs_calibration:
        zero_point = None if config.input_tensors.symmetric else torch.tensor(-17, dtype=torch.int32)
        inputs = QParams(torch.tensor(0.0234375), zero_point)
    return layer, SOLVERS.get(solver)(weight, layer), inputs


def accepting(name):
    """The shapes and configs that the exporter takes, so that a refusal is a decision and not a crash."""
    exporter = EXPORTERS.get(name)
    for config_name, config in CONFIGS.items():
        for shape in SHAPES:
            if config.weight.qscheme is QSchemeType.per_group and shape[1] % max(config.weight.group_size, 1):
                continue
            layer, weight, inputs = solved(config, shape)
            if exporter.refuse(layer) is None:
                yield config_name, layer, weight, inputs


@pytest.mark.parametrize("name", list(EXPORTERS))
def test_layout_and_round_trip(name):
    exporter = EXPORTERS.get(name)
    seen = set()
    for config_name, layer, weight, inputs in accepting(name):
        seen.add(config_name)
        layout = exporter.layout(layer, "BF16")
        stored = {
            part: tensor.to(TORCH_DTYPES[layout[part].dtype]).contiguous()
            for part, tensor in exporter.encode(layer, weight, inputs).items()
        }
        assert {part: tuple(tensor.shape) for part, tensor in stored.items()} == {
            part: entry.shape for part, entry in layout.items()
        }, config_name
        read, read_inputs = exporter.decode(layer, stored)
        assert torch.equal(read.dequantize(), weight.dequantize()), (config_name, layer)
        if inputs is None:
            assert read_inputs is None
        else:
            assert read_inputs.scale == inputs.scale
            assert (read_inputs.zero_point is None) == (inputs.zero_point is None)
            assert read_inputs.zero_point is None or read_inputs.zero_point == inputs.zero_point
    assert {"int8_dynamic", "fp8", "w4a16", "w4a16_sym"} <= seen


@pytest.mark.parametrize("name", list(EXPORTERS))
def test_every_refusal_is_a_sentence(name):
    exporter = EXPORTERS.get(name)
    refusals = [
        exporter.refuse(solved(config, (72, 192))[0]) for config in CONFIGS.values() if config.weight.group_size != 64
    ]
    for reason in filter(None, refusals):
        assert len(reason) > 15 and not reason.endswith("."), reason


@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("config_name", CONFIGS)
def test_every_solver_with_every_scheme(solver, config_name):
    layer, weight, _ = solved(CONFIGS[config_name], (64, 128), solver)
    restored = weight.dequantize()
    assert restored.shape == (64, 128) and torch.isfinite(restored).all()
    assert (restored[3] == 0).all()
    assert weight.params.scale.shape == layer.num_scales
