"""Every exporter with every preset: what is written is what was planned, and reads back as what was computed.

New presets and exporters are picked up by themselves.
"""

import pytest
import torch

from quantcore.checkpoint.layout import TensorLayout
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import QuantizationConfig, QuantizationSpec
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.export import EXPORTERS, Decoder, holds_codes
from quantcore.tensors.qtensor import QLayer
from quantcore.tensors.source import TORCH_DTYPES
from tests.support.exporting import CONFIGS, accepting, solved

PLAIN = {"int8_dynamic", "fp8", "w4a16", "w4a16_sym", "kv_cache_fp8"}
MUST_TAKE = {
    "quark": PLAIN
    | {"mxfp4", "mxfp6_e3m2", "mxfp8", "mxfp4_fp8", "nvfp4", "int4_fp8", "mxint8_weight_only"}
    | {"uint4_whole_row", "int4_per_channel", "int4_wo_per_channel"},
    "compressed_tensors": PLAIN
    | {"nvfp4", "nvfp4_weight_only", "mxfp4", "mxfp4_weight_only", "mxfp6_e2m3", "mxfp8", "mxfp8_weight_only"}
    | {"fp8_block", "fp8_block_weight_only", "fp8_dynamic", "fp8_weight_only", "int2", "int3", "uint2", "uint8"}
    | {"int8_weight_only", "int8_weight_only_asym", "int8_static_asym_input", "uint4_whole_row", "float32_scales"},
    "fp8": {"fp8", "kv_cache_fp8", "fp8_block"},
    "modelopt": {"fp8", "kv_cache_fp8", "nvfp4", "nvfp4_weight_only", "mxfp8"},
    "fake_quantized": set(CONFIGS),
    "bitsandbytes": {"nf4", "fp4_bnb", "nf4_double_quant", "fp4_bnb_double_quant", "llm_int8"},
    "gptq": {"w4a16_sym", "int4_per_channel", "int8_weight_only", "int2", "int3"},
    "gptq_v2": {"w4a16", "w4a16_sym", "uint4_whole_row", "int8_weight_only_asym", "uint2", "float32_scales"},
    "awq": {"w4a16", "w4a16_sym", "uint4_whole_row", "int4_per_channel", "float32_scales"},
    "onnx": {"int8_static", "int8", "int8_dynamic", "int8_weight_only", "int8_weight_only_asym", "uint8", "fp8"}
    | {"w4a16", "w4a16_sym", "uint4_whole_row", "float32_scales", "fp8_dynamic", "fp8_weight_only", "kv_cache_fp8"}
    | {"int8_static_asym_input", "int4_wo_32", "gguf_q4_0", "gguf_q8_0"},
    "mlx": {"w4a16", "w4a16_sym", "uint4_wo_32", "w3a16", "w3a16_sym", "w2a16", "int2", "int3", "uint2", "uint8"}
    | {"mxfp4_weight_only", "mxfp8_weight_only"},
    "gguf": {name for name in CONFIGS if name.startswith("gguf")} | {"uint4_wo_32", "int4_wo_32"},
}
WITH_CODES = [name for name in EXPORTERS if holds_codes(name)]


@pytest.mark.parametrize("name", list(EXPORTERS))
def test_layout_and_round_trip(name):
    """What comes back of an exporter without codes is the weight in the model's dtype, and nothing else."""
    exporter = EXPORTERS.get(name)
    seen = set()
    for config_name, layer, quantized in accepting(name):
        seen.add(config_name)
        layout = exporter.layout(layer, "BF16")
        stored = {
            part: tensor.to(TORCH_DTYPES[layout[part].dtype]).contiguous()
            for part, tensor in exporter.encode(layer, quantized, "BF16").items()
        }
        assert {part: tuple(tensor.shape) for part, tensor in stored.items()} == {
            part: entry.shape for part, entry in layout.items()
        }, config_name
        if not isinstance(exporter, Decoder):
            assert stored.keys() == {"weight"}
            assert torch.equal(stored["weight"], quantized.weight.dequantize().bfloat16()), (config_name, layer)
            continue
        read = exporter.decode(layer, stored)
        restored = read.weight.dequantize()
        assert torch.equal(restored, quantized.weight.dequantize()), (config_name, layer)
        assert restored.is_contiguous(), "a product with a transposed weight may be rounded otherwise"
        for part in ("inputs", "outputs"):
            before, after = getattr(quantized, part), getattr(read, part)
            assert (before is None) == (after is None), (config_name, part)
            if before is not None:
                assert torch.equal(before.scale, after.scale), (config_name, part)
                assert before.zero_point is after.zero_point is None or before.zero_point == after.zero_point
    assert seen and MUST_TAKE.get(name, seen) <= seen  # an installed package's takes what it takes


@pytest.mark.parametrize("name", list(EXPORTERS))
def test_every_refusal_is_a_sentence(name):
    exporter = EXPORTERS.get(name)
    refusals = [
        exporter.refuse(LayerPlan("model.layers.0.self_attn.k_proj", 0, (72, 192), config))
        for config in CONFIGS.values()
    ]
    for reason in filter(None, refusals):
        assert len(reason) > 15 and not reason.endswith("."), reason


@pytest.mark.parametrize("name", WITH_CODES)
@pytest.mark.parametrize("axis", [-1, 1])
def test_scales_of_input_channels_are_refused(name, axis):
    spec = QuantizationSpec(dtype="int8", qscheme="per_channel", ch_axis=axis)
    layer = LayerPlan("model.layers.0.self_attn.k_proj", 0, (64, 128), QuantizationConfig(weight=spec))
    assert "output channels" in EXPORTERS.get(name).refuse(layer)


def test_just_fake_quantized_holds_no_codes():
    assert MUST_TAKE.keys() - set(WITH_CODES) == {"fake_quantized"}


@pytest.mark.parametrize("spec", ["input channels", "float zero point", "bias", "int16"])
def test_fake_quantized_takes_what_no_other_format_does(spec):
    weight = {
        "input channels": QuantizationSpec(dtype="int8", qscheme="per_channel", ch_axis=1),
        "float zero point": QuantizationSpec(
            dtype="uint4", qscheme="per_group", group_size=64, symmetric=False, zero_point_type="float32"
        ),
        "bias": QuantizationSpec(dtype="int8"),
        "int16": QuantizationSpec(dtype="int16", qscheme="per_channel"),
    }[spec]
    config = QuantizationConfig(weight=weight, bias=QuantizationSpec(dtype="int8") if spec == "bias" else None)
    layer, quantized = solved(config, (64, 128))
    taking = ["fake_quantized", "mlx"] if spec == "float zero point" else ["fake_quantized"]
    assert [name for name in MUST_TAKE if EXPORTERS.get(name).refuse(layer) is None] == taking
    [(part, tensor)] = EXPORTERS.get("fake_quantized").encode(layer, quantized, "BF16").items()
    assert part == "weight" and torch.equal(tensor, quantized.weight.dequantize())


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_fake_quantized_keeps_the_layout_of_the_layer(kind):
    spec = QuantizationSpec(dtype="int8", qscheme="per_channel")
    layer = LayerPlan("h.0.attn.c_attn", 0, (48, 32), QuantizationConfig(weight=spec), kind)
    quantized = QLayer(round_to_nearest(torch.randn(48, 32), spec))
    exporter = EXPORTERS.get("fake_quantized")
    tensor = exporter.encode(layer, quantized, "BF16")["weight"]
    expected = quantized.weight.dequantize()
    assert torch.equal(tensor, expected.T if kind == "Conv1D" else expected) and tensor.is_contiguous()
    assert exporter.layout(layer, "F16") == {"weight": TensorLayout("F16", tuple(tensor.shape))}
