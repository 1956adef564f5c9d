"""Plans: made from names and shapes alone, and refused with the layers named."""

import subprocess
import sys
from dataclasses import replace

import pytest

from quantcore import RotationConfig
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.checkpoint.layers import find_conv1d
from quantcore.checkpoint.layout import TensorHeader
from quantcore.checkpoint.roles import SHARED
from quantcore.config import presets
from quantcore.config.algorithms import NAMES, config_of
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import CalibrationConfig, Config, QuantizationConfig
from quantcore.engine.calibration.stats import Needs
from quantcore.engine.solvers import SOLVERS, TUNERS
from quantcore.engine.transforms import SMOOTHINGS
from quantcore.errors import ConfigError, ModelError
from quantcore.plan.planner import make_plan

SMOLLM2 = {"model_type": "llama", "num_hidden_layers": 30, "max_position_embeddings": 8192}


def header(shape, dtype="BF16"):
    count = {"BF16": 2, "F32": 4, "I8": 1, "U8": 1}[dtype]
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


USUAL = CalibrationConfig()


def plan_of(config, model_config, tensors, **options):
    return make_plan(JobSpec(config=config, **options), ModelHeaders(model_config, tensors))


def plan(preset="w4a16", tensors=None, model_config=None, calibration=USUAL, exports=("quark",), **overrides):
    config = presets.resolve(preset, group_size=overrides.pop("group_size", None))
    config = replace(config, **overrides)
    return plan_of(config, model_config or SMOLLM2, tensors or smollm2(), calibration=calibration, export=exports)


def test_every_linear_layer_of_every_block_in_natural_order():
    result = plan("fp8")
    assert (result.blocks.lists, result.num_blocks, len(result.layers)) == ((("model.layers.", 30),), 30, 210)
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
    assert result.warnings[0] == "The pattern '*.nothing' matches no layer."


@pytest.mark.parametrize("field", ["exclude", "include", "layer_quant_config", "kv_cache_quant_config"])
@pytest.mark.parametrize(
    ("pattern", "glob"),
    [("re:.*o_proj$", "'*o_proj'"), (r"re:.*\.mlp\.gate", "'*.mlp.gate'"), ("re:a|b", "'*.o_proj'")],
)
def test_regular_expressions_are_refused(field, pattern, glob):
    """They matched nothing, and all layers were quantized."""
    outputs = QuantizationConfig(output_tensors=presets.FP8)
    value = {pattern: outputs} if field.endswith("config") else ("lm_head", pattern)
    with pytest.raises(ConfigError, match="regular expression") as caught:
        plan("fp8", **{field: value})
    assert glob in caught.value.hint and caught.value.field == f"/{field}"


def test_what_looks_like_one_is_said_to_be_none():
    assert "shell globs" in plan("fp8", exclude=("lm_head", ".*o_proj")).warnings[0]


def test_a_head_that_is_included_by_name_is_quantized():
    config = presets.resolve("fp8", exclude=("*.o_proj",), include=("lm_head",))
    result = plan_of(config, SMOLLM2, smollm2(tied=False))
    assert result.layers_of(None)[0].name == "lm_head" and len(result.layers) == 30 * 6 + 1
    assert len(plan_of(presets.resolve("fp8", exclude=("*.o_proj",)), SMOLLM2, smollm2(tied=False)).layers) == 30 * 6


def test_a_class_that_matches_nothing_is_a_warning_and_with_strict_an_error():
    unmatched = {
        "exclude": ("lm_head", "*.nothing"),
        "layer_type_quant_config": {"Conv1D": presets.PRESETS["fp8"].layer_config},
    }
    said = (
        "The pattern '*.nothing' matches no layer.", "The class 'Conv1D' of layer_type_quant_config matches no layer.",
    )  # fmt: skip
    assert plan("fp8", **unmatched).warnings == said
    with pytest.raises(ConfigError) as caught:
        plan("fp8", **unmatched, strict=True)
    assert caught.value.code == "unmatched_names" and caught.value.message == " ".join(said)
    assert plan("fp8", strict=True).warnings == ()


def test_layers_that_vllm_fuses_with_different_schemes_are_a_warning_and_with_strict_an_error():
    parts = {"exclude": ("lm_head", "model.layers.*.v_proj")}
    [warning] = plan("fp8", **parts).warnings
    assert warning.startswith("vLLM will not load this result. vLLM fuses model.layers.0.self_attn.q_proj and")
    assert "v_proj into one layer and needs one scheme for both" in warning
    with pytest.raises(ConfigError) as caught:
        plan("fp8", **parts, strict=True)
    assert caught.value.code == "not_for_vllm" and "one scheme" in caught.value.hint
    assert plan("fp8", exports=("onnx",), strict=True, **parts).warnings == ()  # not for vLLM
    whole = {"exclude": ("lm_head", *(f"model.layers.*.{part}_proj" for part in "qkv"))}
    assert plan("fp8", **whole, strict=True).warnings == ()


def test_whatever_else_vllm_does_not_load_is_a_warning_too():
    config = presets.resolve("w4a16_sym", group_size=64, include=("lm_head",))
    for exports, heads in ((("compressed_tensors",), 1), (("compressed_tensors", "awq"), 2), (("gptq",), 0)):
        warnings = plan_of(config, SMOLLM2, smollm2(tied=False), export=exports).warnings
        assert sum("vLLM does not read a quantized lm_head" in warning for warning in warnings) == heads


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
    "incompatible_export": {"preset": "w4a16", "exports": ("fp8",)},
    "unknown_export_format": {"exports": ("ggml",)},
    "invalid_export": {"exports": ("quark", "quark")},
    "seq_len_too_long": {"calibration": CalibrationConfig(seq_len=16384)},
}


@pytest.mark.parametrize("code", REFUSED)
def test_impossible_requests_are_refused(code):
    with pytest.raises(ConfigError) as caught:
        plan(**REFUSED[code])
    assert caught.value.code == code and caught.value.hint


def test_a_rotation_that_no_file_holds_says_who_runs_it():
    with pytest.raises(ConfigError, match="rotation r3, which is not available") as caught:
        plan("int8_dynamic", algo_config=(RotationConfig(r3=True),))
    assert "Only a model in memory (ModelQuantizer) can run r3 and r4" in caught.value.hint


def test_an_impossible_export_says_which_format_can():
    with pytest.raises(ConfigError) as caught:
        plan("w4a16", group_size=-1, exports=("gptq",))
    assert caught.value.allowed == ("awq", "compressed_tensors", "quark", "gptq_v2", "fake_quantized")


def test_what_a_format_says_once_must_be_the_same_in_all_layers():
    narrow = presets.resolve("w4a16", group_size=32).global_quant_config
    with pytest.raises(ConfigError, match=r"one group_size for all layers, but .* has 64 and .*q_proj 32") as caught:
        plan("w4a16", exports=("awq",), layer_quant_config={"*q_proj": narrow})
    assert caught.value.code == "incompatible_export"


ODD_MODELS = {
    "unsupported_architecture": {"embed.weight": header((8, 8))},
    "unsupported_architecture ": {**smollm2(), "model.layers.0.mlp.experts.gate_up_proj": header((4, 64, 128))},
    "config_implausible": smollm2(num_blocks=29),
    "unsupported_weights_dtype": {**smollm2(), "model.layers.3.x.weight": header((8, 8), "I8")},
}


@pytest.mark.parametrize("case", ODD_MODELS)
def test_odd_models_are_refused(case):
    with pytest.raises(ModelError) as caught:
        plan("fp8", ODD_MODELS[case])
    assert caught.value.code == case.strip()


def test_planning_needs_no_torch():
    code = "import sys, quantcore.plan.planner as p; list(p.EXPORTERS); sys.exit('torch._C' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_config_without_lm_head_exclusion_on_a_tied_model_keeps_the_head():
    result = plan_of(Config(global_quant_config=presets.PRESETS["fp8"].layer_config), SMOLLM2, smollm2())
    assert result.tied_lm_head and result.layers_of(None) == ()


def mixtral(num_blocks=2):
    """The names of Mixtral: eight experts, a router beside them."""
    tensors = {"model.embed_tokens.weight": header((1000, 64)), "lm_head.weight": header((1000, 64))}
    for i in range(num_blocks):
        tensors[f"model.layers.{i}.self_attn.q_proj.weight"] = header((64, 64))
        tensors[f"model.layers.{i}.block_sparse_moe.gate.weight"] = header((8, 64))
        for expert in range(8):
            for name, shape in {"w1": (32, 64), "w2": (64, 32), "w3": (32, 64)}.items():
                tensors[f"model.layers.{i}.block_sparse_moe.experts.{expert}.{name}.weight"] = header(shape)
    return tensors


MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 2}


def test_every_expert_is_planned_and_routers_are_kept():
    result = plan("w4a16", mixtral(), MIXTRAL, group_size=32)
    assert len(result.layers) == 2 * (1 + 8 * 3)
    assert result.layers_of(1)[7].name == "model.layers.1.block_sparse_moe.experts.2.w2"
    kept = {entry.name: entry.reason for entry in result.kept}
    assert kept == {
        "lm_head": "excluded by 'lm_head'",
        "model.layers.0.block_sparse_moe.gate": "router",
        "model.layers.1.block_sparse_moe.gate": "router",
    }
    assert result.warnings == ()
    num_tokens = CalibrationConfig().num_samples * CalibrationConfig().seq_len
    assert result.memory_of_rank()["activations"] == 0
    learning = plan("w4a16", mixtral(), MIXTRAL, group_size=32, algo_config=(config_of("gptq"),))
    assert learning.memory_of_rank()["activations"] == num_tokens * 64 * 2  # the hidden size; experts are narrower


def test_a_router_is_planned_only_if_it_is_named_exactly():
    weight_only = presets.PRESETS["int8_weight_only"].layer_config
    name = "model.layers.1.block_sparse_moe.gate"
    patterns = {"*.block_sparse_moe.*": weight_only, name: weight_only}
    layers = plan("fp8", mixtral(), MIXTRAL, layer_quant_config=patterns).layers
    assert [layer.name for layer in layers if layer.name.endswith(".gate")] == [name]


def test_include_quantizes_what_its_role_would_keep():
    weight_only, gates = presets.PRESETS["int8_weight_only"].config, {"model.layers.0.block_sparse_moe.gate"}
    planned = plan_of(replace(weight_only, include=("*.0.*.gate",)), MIXTRAL, mixtral()).layers
    assert {layer.name for layer in planned if layer.name.endswith(".gate")} == gates
    [warning] = plan_of(replace(weight_only, include=("*.router",)), MIXTRAL, mixtral()).warnings
    assert warning == "The pattern '*.router' matches no layer."
    excluded = replace(weight_only, include=("*.gate",), exclude=("*.gate", "lm_head"))
    assert not [layer for layer in plan_of(excluded, MIXTRAL, mixtral()).layers if layer.name.endswith(".gate")]


def test_blocks_for_multi_token_prediction_are_kept():
    """DeepSeek-V3: config.json says 61 blocks, the files hold a 62nd that Transformers does not build."""
    model_config = {**MIXTRAL, "num_nextn_predict_layers": 1}
    result = plan("int8_dynamic", mixtral(3), model_config)
    assert result.num_blocks == 2 and {layer.block for layer in result.layers} == {0, 1}
    reasons = {entry.reason for entry in result.kept if entry.name.startswith("model.layers.2.")}
    assert reasons == {"only for multi-token prediction"}
    with pytest.raises(ModelError, match="declares 2 blocks, but the weights contain 3"):
        plan("w4a16", mixtral(3), MIXTRAL)


def gpt2():
    """GPT-2's names and its layout: weights [in, out]; the square one does not show it."""
    shapes = {"attn.c_attn": (768, 2304), "attn.c_proj": (768, 768), "mlp.c_fc": (768, 3072), "mlp.c_proj": (3072, 768)}
    tensors = {"wte.weight": header((50257, 768)), "wpe.weight": header((1024, 768))}
    for name, shape in shapes.items():
        tensors |= {f"h.0.{name}.weight": header(shape), f"h.0.{name}.bias": header(shape[1:])}
    return tensors


def test_weights_stored_as_in_out_are_seen_by_their_biases():
    assert find_conv1d(gpt2(), "h.") == {name for name in gpt2() if name.startswith("h.") and name.endswith("weight")}
    assert find_conv1d(smollm2(), "model.layers.") == set()
    dense = {
        "h.0.up.weight": header((3072, 768)), "h.0.up.bias": header((3072,)),
        "h.0.o.weight": header((768, 768)), "h.0.o.bias": header((768,)),
    }  # fmt: skip
    assert find_conv1d(dense, "h.") == set()
    elsewhere = {"vision.fc.weight": header((768, 3072)), "vision.fc.bias": header((3072,))}
    assert find_conv1d(dense | elsewhere, "h.") == set()


def test_groups_of_a_conv1d_run_along_its_inputs():
    with pytest.raises(ConfigError) as caught:
        plan("w4a16", gpt2(), {"model_type": "gpt2", "n_layer": 1}, group_size=512)
    assert "of 3 layer(s): 768 inputs: h.0.attn.c_attn and 2 more" in caught.value.message


def neox(**tensors):
    names = {"gpt_neox.embed_in.weight": (1000, 64), "embed_out.weight": (1000, 64)}
    names |= {f"gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight": (256, 64) for i in range(2)}
    return {name: header(shape) for name, shape in names.items()} | tensors


NEOX = {"model_type": "gpt_neox", "num_hidden_layers": 2}


def test_a_head_of_another_name_is_the_lm_head_of_patterns():
    """GPT-NeoX calls it embed_out. Both names work; the presets' ``lm_head`` excludes it."""
    for exclude in (("lm_head",), ("embed_out",)):
        result = plan("w4a16", neox(), NEOX, exclude=exclude)
        assert [(entry.name, entry.reason) for entry in result.kept] == [("embed_out", f"excluded by '{exclude[0]}'")]
        assert result.warnings == () and not result.tied_lm_head
    assert [layer.name for layer in plan("w4a16", neox(), NEOX, exclude=()).layers_of(None)] == ["embed_out"]


def test_layers_outside_the_blocks_are_kept_and_said():
    """OPT-350m projects its embeddings; a model that also sees has a second tower. Formats must know: not quantized."""
    outside = {
        "gpt_neox.project_in.weight": (64, 32), "vision_tower.layers.0.mlp.fc1.weight": (32, 16),
        "gpt_neox.embed_positions.weight": (2048, 64), "gpt_neox.wpe.weight": (2048, 64), "norm.weight": (64,),
        "embed_vision.embedding_projection.weight": (64, 32), "word_embeddings.weight": (1000, 64),
    }  # fmt: skip
    result = plan("w4a16", neox(**{name: header(shape) for name, shape in outside.items()}), NEOX)
    assert {entry.name: entry.reason for entry in result.kept if entry.name not in ("embed_out",)} == {
        "gpt_neox.project_in": "outside the blocks",
        "vision_tower.layers.0.mlp.fc1": "part outside the language model",
        "embed_vision.embedding_projection": "projector between parts of the model",
    }
    assert len(result.layers) == 2


NOT_LINEAR = {
    "mixer.A_log": ((64, 16), "parameter whose name is not that of a layer's weight"),
    "attn.rel_logits_proj.proj": ((16, 64), "parameter whose name is not that of a layer's weight"),
    "mixer.conv1d.weight": ((64, 1, 4), "convolution kernel"),
    "attn.conv_qk_grouped.weight": ((64, 16, 2), "convolution kernel"),
    "attn.q_norm.weight": ((4, 16), "norm"),
    "SelfAttention.relative_attention_bias.weight": ((32, 4), "embedding"),
    "attn.rel_pos_emb.weight": ((32, 16), "embedding"),
    "attn.position_embeddings.weight": ((32, 64), "embedding"),
    "rel_attn.q": ((64, 4, 16), "weight with three axes"),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_matrices_that_are_no_linear_layers_are_kept_and_listed(name):
    shape, reason = NOT_LINEAR[name]
    full = f"gpt_neox.layers.1.{name}"
    result = plan("int8_weight_only", neox(**{full: header(shape)}), NEOX)
    assert [(entry.reason, entry.is_layer) for entry in result.kept if full.startswith(entry.name)] == [(reason, False)]
    assert len(result.layers) == 2


def test_vectors_are_no_matrices():
    others = {
        "mix": header((1, 1, 64)),
        "bias": header((1, 8)),
        "mask": header((1, 1, 64, 64)),
        "ids": header((8, 8), "U8"),
    }
    tensors = neox(**{f"gpt_neox.layers.0.{name}": one for name, one in others.items()})
    assert [entry.name for entry in plan("int8_weight_only", tensors, NEOX).kept] == ["embed_out"]


ROUTERS = {
    "one more output than experts": {"mlp.gate.weight": (9, 64), "mlp.experts.7.up_proj.weight": (32, 64)},
    "an axis for the experts last": {"mlp.gate.weight": (64, 8), "mlp.experts.7.up_proj.weight": (32, 64)},
    "some layers": {
        "mlp.gate.down_proj.weight": (16, 64), "mlp.gate.router_mlp.fc1.weight": (16, 16),
        "mlp.gate.router_mlp.out_proj.weight": (9, 16), "mlp.experts.7.up_proj.weight": (32, 64),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ROUTERS)
def test_routers_of_any_shape_are_kept(case):
    """Inkling, Ernie 4.5 VL and Zaya. A gate without experts beside it is a linear layer."""
    others = {"mlp.linear_gate.weight": (64, 64), "attn.gate.weight": (64, 64)}
    shapes = {f"gpt_neox.layers.1.{name}": header(shape) for name, shape in {**ROUTERS[case], **others}.items()}
    result = plan("int8_weight_only", neox(**shapes), NEOX)
    routers = {entry.name.removeprefix("gpt_neox.layers.1.") for entry in result.kept if entry.reason == "router"}
    assert routers == {name.removesuffix(".weight") for name in ROUTERS[case] if ".gate." in name}
    assert len(result.layers) == 2 + 1 + len(others)


STACKS = {
    "moe.up_proj.weight": "*.moe.*",
    "mlp.experts.fc1.weight": "*.experts.*",
    "mlp.experts.w13_weight": "*.experts.*",
}
"""Stacks without their other half, and the pattern that keeps them."""


@pytest.mark.parametrize("name", STACKS)
def test_experts_in_a_layout_that_is_not_split_are_refused_unless_they_are_excluded(name):
    tensors = neox(**{f"gpt_neox.layers.1.{name}": header((4, 32, 64))})
    with pytest.raises(ModelError, match=r"experts .* unsupported layout: .* \[4, 32, 64\]") as caught:
        plan("int8_weight_only", tensors, NEOX)
    assert f"Exclude '{STACKS[name]}'" in caught.value.hint
    result = plan("int8_weight_only", tensors, NEOX, exclude=("lm_head", STACKS[name]))
    kept = {entry.name: entry.reason for entry in result.kept}
    assert kept[f"gpt_neox.layers.1.{name.removesuffix('.weight')}"] == f"excluded by '{STACKS[name]}'"
    assert result.warnings == () and len(result.layers) == 2


def test_shared_experts_in_one_stack_are_kept():
    """Inkling's. The reason of a pattern that excludes them goes first."""
    name = "gpt_neox.layers.1.mlp.shared_experts.gate_proj"
    tensors = neox(**{name: header((4, 32, 64))})
    for exclude, reason in ((), SHARED), (("*.shared_experts.*",), "excluded by '*.shared_experts.*'"):
        result = plan("int8_weight_only", tensors, NEOX, exclude=("lm_head", *exclude))
        assert {entry.name: entry.reason for entry in result.kept}[name] == reason
        assert len(result.layers) == 2


def test_masks_in_the_checkpoint_are_no_weights():
    """Old GPT-NeoX checkpoints hold causal masks as bytes."""
    mask = {"gpt_neox.layers.0.attention.bias": header((1, 1, 2048, 2048), "U8")}
    assert len(plan("w4a16", mask | neox(), NEOX).layers) == 2
    assert ModelHeaders({}, mask | neox()).main_dtype == "BF16"


@pytest.mark.parametrize("name", NAMES)
def test_plans_count_the_matrices_that_algorithms_ask_for(name):
    config = config_of(name)
    asking = config.start() if name in TUNERS else config
    made = next((kind.get(asking.name)(asking) for kind in (SMOOTHINGS, SOLVERS) if asking.name in kind), None)
    needs = Needs() if made is None else made.needs
    assert config.num_grams == needs.gram + needs.shift
    assert getattr(config, "needs_backward", False) == needs.outputs
    assert all(getattr(config, cost, None) == getattr(asking, cost, None) for cost in ("compares", "num_factors"))


@pytest.mark.parametrize("name", NAMES)
def test_plans_know_which_algorithms_run_in_one_process_or_on_whole_blocks(name):
    assert config_of(name).on_one_process == (name == "distill")
    assert getattr(config_of(name), "needs_whole_blocks", False) == (name in TUNERS)
