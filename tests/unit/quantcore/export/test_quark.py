"""What the quark format writes into config.json, beside the tensors that tests/conformance covers."""

import pytest

from quantcore.config import presets
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import parse_config
from quantcore.config.quark import read_quark_config
from quantcore.export import EXPORTERS

QUARK = EXPORTERS.get("quark")
SHAPES = {
    "mlp.up_proj": (192, 64), "mlp.down_proj": (64, 192), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64),
    "self_attn.q_proj": (64, 64),
}  # fmt: skip


def plans(config):
    for name, shape in SHAPES.items():
        chosen, why = config.choose(f"model.layers.0.{name}", "Linear")
        yield LayerPlan(f"model.layers.0.{name}", 0, shape, chosen, chosen_by=why)


@pytest.mark.parametrize("kv_cache", [None, "fp8"])
@pytest.mark.parametrize(
    "weight",
    [
        {"dtype": "int4", "qscheme": "per_group", "group_size": -1},
        {"dtype": "uint4", "qscheme": "per_group", "group_size": -1, "symmetric": False},
        {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0},
    ],
)
def test_one_scale_a_row_is_written_as_a_group_of_the_width(weight, kv_cache):
    """AMD Quark cannot load group_size -1 (it asks for a tensor of -64 scales), and vLLM refuses it."""
    config = parse_config({"global_quant_config": {"weight": weight}, "exclude": ["lm_head"]})
    config = config if kv_cache is None else presets.with_kv_cache(config, kv_cache)
    layers = tuple(plans(config))
    written = QUARK.quantization_config(config, layers, ("lm_head",))
    assert written["global_quant_config"]["weight"]["group_size"] == 64
    names = set(written["layer_quant_config"])
    assert names == {"model.layers.0.mlp.down_proj", *(("*k_proj", "*v_proj") if kv_cache else ())}
    read = read_quark_config(written)
    for layer in layers:
        found = read.choose(layer.name, "Linear")[0]
        assert (found.weight.dtype, found.weight.symmetric) == (layer.weight.dtype, layer.weight.symmetric)
        assert (found.weight.qscheme, found.weight.group_size) == ("per_group", layer.in_features)
        assert found.output_tensors == layer.config.output_tensors


def test_mxint8_inputs_are_refused_with_the_reason():
    layer = LayerPlan("model.layers.0.mlp.up_proj", 0, (192, 64), presets.resolve("mxint8").global_quant_config)
    assert "does not support quantized inputs" in QUARK.refuse(layer)


def test_mxint8_weights_bear_the_names_that_amd_quark_reads():
    config = presets.resolve("mxint8_weight_only")
    written = QUARK.quantization_config(config, tuple(plans(config)), ("lm_head",))["global_quant_config"]["weight"]
    assert (written["dtype"], written["qscheme"], written["group_size"]) == ("int8", "per_group", 32)
    assert (written["scale_format"], written["symmetric"]) == ("e8m0", True)
    assert written["observer_cls"] == "PerGroupMinMaxObserver"  # PerBlockMXObserver takes no integers there
