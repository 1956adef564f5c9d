"""Plans: made from names and shapes alone, and refused with the layers named."""

import subprocess
import sys
from dataclasses import replace

import pytest

from quantcore import presets
from quantcore.checkpoint.headers import TensorHeader
from quantcore.config import CalibrationConfig, Config, QuantizationConfig
from quantcore.errors import ConfigError, ModelError
from quantcore.plan import resolve

SMOLLM2 = {"model_type": "llama", "num_hidden_layers": 30, "max_position_embeddings": 8192}


def header(shape, dtype="BF16"):
    count = {"BF16": 2, "F32": 4, "I8": 1}[dtype]
    for side in shape:
        count *= side
    return TensorHeader(dtype, shape, "model.safetensors", 0, count)


def smollm2(num_blocks=30, tied=True):
    """The names and shapes of SmolLM2-135M."""
    linears = {
        "self_attn.q_proj": (576, 576), "self_attn.k_proj": (192, 576), "self_attn.v_proj": (192, 576),
        "self_attn.o_proj": (576, 576), "mlp.gate_proj": (1536, 576), "mlp.up_proj": (1536, 576),
        "mlp.down_proj": (576, 1536),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": header((49152, 576)), "model.norm.weight": header((576,))}
    for i in range(num_blocks):
        tensors[f"model.layers.{i}.input_layernorm.weight"] = header((576,))
        tensors[f"model.layers.{i}.post_attention_layernorm.weight"] = header((576,))
        tensors |= {f"model.layers.{i}.{name}.weight": header(shape) for name, shape in linears.items()}
    if not tied:
        tensors["lm_head.weight"] = header((49152, 576))
    return tensors


def plan(preset="w4a16", tensors=None, model_config=None, calibration=None, exports=("quark",), **overrides):
    config = presets.resolve(preset, group_size=overrides.pop("group_size", None))
    config = replace(config, **overrides)
    return resolve(config, model_config or SMOLLM2, tensors or smollm2(), calibration=calibration, exports=exports)


def test_every_linear_layer_of_every_block_in_natural_order():
    result = plan("fp8")
    assert (result.block_prefix, result.num_blocks, len(result.layers)) == ("model.layers.", 30, 210)
    assert [layer.block for layer in result.layers] == sorted(layer.block for layer in result.layers)
    assert result.needs_calibration and not plan("int8_dynamic").needs_calibration
    assert [(entry.name, entry.reason) for entry in result.kept] == [
        ("lm_head", "shares its weight with the embedding")
    ]
    assert result.warnings == ()


def test_sizes_are_exact():
    """uint4, groups of 64, bfloat16 scales: 4 bits + (16 + 4) / 64 a weight; the embedding stays."""
    linears = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
    kept = 2 * (49152 * 576 + 61 * 576)
    result = plan("w4a16")
    assert result.size_before_bytes == 2 * linears + kept
    assert result.size_after_bytes == linears * (4 + 20 / 64) / 8 + kept


def test_untied_lm_head_is_excluded_by_the_presets_and_planned_without_them():
    kept = plan("fp8", smollm2(tied=False)).kept
    assert [(entry.name, entry.reason) for entry in kept] == [("lm_head", "excluded by 'lm_head'")]
    result = plan("fp8", smollm2(tied=False), exclude=())
    assert result.layers_of(None)[0].name == "lm_head"


def test_patterns_choose_and_useless_ones_are_said():
    weight_only = presets.PRESETS["int8_weight_only"].layer_config
    result = plan(
        "fp8",
        exclude=("lm_head", "*.o_proj", "*.nothing"),
        layer_quant_config={"*.down_proj": weight_only, "*.k_proj": QuantizationConfig()},
    )
    assert len(result.layers) == 30 * 5
    assert {layer.config for layer in result.layers if layer.name.endswith("down_proj")} == {weight_only}
    assert {entry.reason for entry in result.kept} == {
        "excluded by '*.o_proj'",
        "layer_quant_config '*.k_proj' has no weight spec",
        "shares its weight with the embedding",
    }
    assert result.warnings == ("The pattern '*.nothing' matches no linear layer.",)


def test_a_group_size_that_does_not_divide_names_the_layers_and_the_sizes_that_fit():
    with pytest.raises(ConfigError) as caught:
        plan("w4a16", group_size=128)
    error = caught.value
    assert error.code == "group_size_not_dividing"
    assert "576 inputs: model.layers.0.mlp.gate_proj and 179 more" in error.message
    assert "down_proj" not in error.message  # 1536 is a multiple of 128
    assert error.allowed == ("16", "32", "64", "96", "192", "-1")


@pytest.mark.parametrize("group_size", [16, 32, 64, 96, 192])
def test_the_sizes_that_fit_do_fit(group_size):
    layers = {layer.name: layer for layer in plan("w4a16", group_size=group_size).layers}
    assert layers["model.layers.7.self_attn.k_proj"].num_scales == (192, 576 // group_size)
    assert layers["model.layers.29.mlp.down_proj"].num_scales == (576, 1536 // group_size)


REFUSED = {
    "nothing_to_quantize": {"exclude": ("*",)},
    "incompatible_export": {"preset": "w4a16", "group_size": -1},
    "unknown_export_format": {"exports": ("gguf",)},
    "invalid_export": {"exports": ("quark", "quark")},
    "seq_len_too_long": {"calibration": CalibrationConfig(seq_len=16384)},
}


@pytest.mark.parametrize("code", REFUSED)
def test_impossible_requests_are_refused(code):
    with pytest.raises(ConfigError) as caught:
        plan(**REFUSED[code])
    assert caught.value.code == code and caught.value.hint


def test_an_impossible_export_says_which_format_can():
    with pytest.raises(ConfigError) as caught:
        plan("w4a16", group_size=-1)
    assert caught.value.allowed == ("compressed_tensors",)


ODD_MODELS = {
    "unsupported_architecture": {"embed.weight": header((8, 8))},
    "unsupported_architecture ": {**smollm2(), "model.layers.0.mlp.experts.0.w1.weight": header((64, 64))},
    "config_implausible": smollm2(num_blocks=29),
    "unsupported_weights_dtype": {**smollm2(), "model.layers.3.x.weight": header((8, 8), "I8")},
}


@pytest.mark.parametrize("case", ODD_MODELS)
def test_odd_models_are_refused(case):
    with pytest.raises(ModelError) as caught:
        plan("fp8", ODD_MODELS[case])
    assert caught.value.code == case.strip()


def test_planning_needs_no_torch():
    code = "import sys, quantcore.plan as p; list(p.EXPORTERS); sys.exit('torch._C' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_config_without_lm_head_exclusion_on_a_tied_model_keeps_the_head():
    result = resolve(Config(global_quant_config=presets.PRESETS["fp8"].layer_config), SMOLLM2, smollm2())
    assert result.tied_lm_head and result.layers_of(None) == ()
