"""Every exporter with every preset: what is written is what was planned, and reads back as what was computed.

New presets and exporters are picked up by themselves.
"""

import pytest
import torch

from quantcore import presets
from quantcore.affine import QParams
from quantcore.checkpoint.source import TORCH_DTYPES
from quantcore.config import QuantizationConfig, QuantizationSpec, learns_from_data
from quantcore.export import EXPORTERS
from quantcore.layer import LayerPlan
from quantcore.qtensor import QLayer
from quantcore.solvers.rtn import round_to_nearest

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
    "kv_cache_fp8": presets.resolve("fp8", kv_cache="fp8").kv_cache_quant_config["*k_proj"],
    "float32_scales": QuantizationConfig(
        weight=QuantizationSpec(
            dtype="uint4", qscheme="per_group", group_size=32, symmetric=False, scale_type="float32"
        )
    ),
}
CONFIGS = {**{name: preset.layer_config for name, preset in presets.PRESETS.items()}, **EXTRA}
PLAIN = {"int8_dynamic", "fp8", "w4a16", "w4a16_sym", "kv_cache_fp8"}
MUST_TAKE = {
    "quark": PLAIN | {"mxfp4", "mxfp6_e3m2", "mxfp8", "mxfp4_fp8", "nvfp4", "int4_fp8"},
    "compressed_tensors": PLAIN,
    "fp8": {"fp8", "kv_cache_fp8"},
}
SHAPES = [(64, 128), (8, 64), (72, 192)]


def static(spec):
    if spec is None or not learns_from_data(spec):
        return None
    zero_point = None if spec.symmetric else torch.tensor([[-17]], dtype=torch.int32)
    scale = torch.tensor(0.0234375)
    return QParams(scale) if spec.is_dynamic else QParams(scale.reshape(1, 1), zero_point)


def solved(config, shape):
    layer = LayerPlan("model.layers.0.self_attn.k_proj", 0, shape, config)
    weight = torch.randn(shape, dtype=torch.float32).bfloat16()
    weight[3] = 0  # a dead row
    weight[5, 7] = 30  # an outlier
    quantized = round_to_nearest(weight, layer.weight)
    return layer, QLayer(quantized, static(config.input_tensors), static(config.output_tensors))


def accepting(name):
    """The shapes and configs that the exporter takes, so that a refusal is a decision and not a crash."""
    exporter = EXPORTERS.get(name)
    for config_name, config in CONFIGS.items():
        for shape in SHAPES:
            layer = LayerPlan("model.layers.0.self_attn.k_proj", 0, shape, config)
            if all(length % size == 0 for length, size in layer.groups) and exporter.refuse(layer) is None:
                yield config_name, *solved(config, shape)


@pytest.mark.parametrize("name", list(EXPORTERS))
def test_layout_and_round_trip(name):
    exporter = EXPORTERS.get(name)
    seen = set()
    for config_name, layer, quantized in accepting(name):
        seen.add(config_name)
        layout = exporter.layout(layer, "BF16")
        stored = {
            part: tensor.to(TORCH_DTYPES[layout[part].dtype]).contiguous()
            for part, tensor in exporter.encode(layer, quantized).items()
        }
        assert {part: tuple(tensor.shape) for part, tensor in stored.items()} == {
            part: entry.shape for part, entry in layout.items()
        }, config_name
        read = exporter.decode(layer, stored)
        assert torch.equal(read.weight.dequantize(), quantized.weight.dequantize()), (config_name, layer)
        for part in ("inputs", "outputs"):
            before, after = getattr(quantized, part), getattr(read, part)
            assert (before is None) == (after is None), (config_name, part)
            if before is not None:
                assert torch.equal(before.scale, after.scale), (config_name, part)
                assert before.zero_point is after.zero_point is None or before.zero_point == after.zero_point
    assert MUST_TAKE[name] <= seen


@pytest.mark.parametrize("name", list(EXPORTERS))
def test_every_refusal_is_a_sentence(name):
    exporter = EXPORTERS.get(name)
    refusals = [
        exporter.refuse(LayerPlan("model.layers.0.self_attn.k_proj", 0, (72, 192), config))
        for config in CONFIGS.values()
    ]
    for reason in filter(None, refusals):
        assert len(reason) > 15 and not reason.endswith("."), reason


@pytest.mark.parametrize("name", list(EXPORTERS))
@pytest.mark.parametrize("axis", [-1, 1])
def test_scales_of_input_channels_are_refused(name, axis):
    spec = QuantizationSpec(dtype="int8", qscheme="per_channel", ch_axis=axis)
    layer = LayerPlan("model.layers.0.self_attn.k_proj", 0, (64, 128), QuantizationConfig(weight=spec))
    assert "output channels" in EXPORTERS.get(name).refuse(layer)
