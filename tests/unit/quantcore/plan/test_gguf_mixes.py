"""The rules of llama.cpp's named mixes. ``tests/consumers/test_llamacpp_mixes.py`` compares with its own tool."""

import pytest

from quantcore.checkpoint.layout import TensorHeader
from quantcore.config import presets
from quantcore.config.gguf_types import MIXES
from quantcore.errors import ConfigError
from quantcore.export.gguf.converted import ConvertedNames
from quantcore.export.gguf.tensor_names import Place
from quantcore.plan.gguf_mixes import Traits, types_in_mix
from quantcore.plan.gguf_types import with_gguf_types
from quantcore.plan.mix_schemes import MixConfig, resolve

LLAMA_8B = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_7B = {**LLAMA_8B, "num_key_value_heads": 32}
LLAMA_70B = {**LLAMA_8B, "num_hidden_layers": 80, "num_attention_heads": 64}
MIXTRAL = {**LLAMA_8B, "model_type": "mixtral", "num_local_experts": 8}
ROLES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
MORE_BITS_OF_32 = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]


def traits_of(config, architecture="llama"):
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    return Traits(architecture, config["num_hidden_layers"], heads // shared, config.get("num_local_experts", 0))


def types_of(mix, config=LLAMA_8B, *, is_tied=False, width=4096, more=(), architecture="llama"):
    names = [f"blk.{index}.{role}.weight" for index in range(config["num_hidden_layers"]) for role in ROLES]
    names += ["token_embd.weight", *([] if is_tied else ["output.weight"]), *more]
    return types_in_mix(mix, dict.fromkeys(names, (8, width)), traits_of(config, architecture))


def layers_with(kind, mix, role, config=LLAMA_8B):
    types = types_of(mix, config)
    layers = range(config["num_hidden_layers"])
    return [index for index in layers if types[f"blk.{index}.{role}.weight"] == kind]


def test_half_of_values_and_of_down_projections_have_6_bits():
    for mix, usual in (("Q4_K_M", "Q4_K"), ("Q5_K_M", "Q5_K")):
        for role in ("attn_v", "ffn_down"):
            assert layers_with("Q6_K", mix, role) == MORE_BITS_OF_32
            assert len(layers_with(usual, mix, role)) == 16
        for role in ("attn_q", "attn_k", "attn_output", "ffn_up", "ffn_gate"):
            assert len(layers_with(usual, mix, role)) == 32


def test_the_first_layers_of_the_small_mixes_have_more_bits():
    assert layers_with("Q5_K", "Q4_K_S", "attn_v") == [0, 1, 2, 3] == layers_with("Q5_K", "Q4_K_S", "ffn_down")
    assert layers_with("Q5_K", "Q3_K_M", "attn_v") == [0, 1] == layers_with("Q5_K", "Q3_K_M", "ffn_down")
    assert layers_with("Q5_K", "IQ4_XS", "ffn_down") == [0, 1, 2, 3] == layers_with("Q4_K", "IQ3_M", "ffn_down")
    assert layers_with("Q2_K", "IQ2_XS", "ffn_down") == [0, 1, 2, 3] == layers_with("IQ3_S", "IQ2_M", "ffn_down")
    assert layers_with("IQ3_S", "IQ3_XS", "ffn_gate") == [0, 1, 2, 3, 28, 29, 30, 31]


@pytest.mark.parametrize(("mix", "role", "config", "kind"), [
    ("Q2_K", "attn_v", LLAMA_8B, "Q4_K"), ("Q2_K", "attn_v", LLAMA_7B, "Q3_K"), ("Q2_K", "ffn_down", LLAMA_8B, "Q3_K"),
    ("Q2_K", "ffn_up", LLAMA_8B, "Q2_K"), ("Q3_K_L", "attn_output", LLAMA_8B, "Q5_K"),
    ("Q3_K_M", "attn_output", LLAMA_8B, "Q4_K"), ("Q3_K_S", "attn_v", LLAMA_8B, "Q3_K"),
    ("Q3_K_S", "attn_v", LLAMA_70B, "Q5_K"), ("IQ4_XS", "attn_v", LLAMA_8B, "Q5_K"),
    ("IQ4_XS", "attn_v", LLAMA_7B, "IQ4_XS"), ("Q4_K_S", "attn_v", MIXTRAL, "Q8_0"),
    ("Q4_K_M", "attn_k", MIXTRAL, "Q8_0"), ("IQ3_XS", "attn_k", LLAMA_8B, "IQ3_XXS"),
    ("IQ3_XS", "ffn_up", LLAMA_8B, "IQ3_XXS"), ("IQ3_XS", "ffn_down", LLAMA_8B, "IQ3_S"),
    ("IQ3_XXS", "attn_q", LLAMA_8B, "IQ2_S"), ("IQ3_XXS", "attn_v", LLAMA_7B, "IQ3_XXS"),
    ("IQ3_XXS", "attn_output", LLAMA_8B, "IQ3_S"), ("IQ3_M", "attn_v", LLAMA_7B, "Q4_K"),
    ("IQ3_M", "attn_output", LLAMA_7B, "Q4_K"), ("IQ3_S", "attn_v", LLAMA_7B, "IQ3_S"),
    ("IQ1_S", "attn_v", LLAMA_7B, "Q2_K"), ("IQ1_M", "attn_output", LLAMA_8B, "IQ2_XXS"),
    ("IQ1_M", "attn_output", MIXTRAL, "Q5_K"), ("IQ1_S", "ffn_up", LLAMA_8B, "IQ1_S"),
    ("IQ2_XXS", "attn_v", LLAMA_8B, "Q4_K"), ("IQ2_XS", "attn_v", LLAMA_7B, "Q2_K"),
    ("IQ2_S", "attn_v", LLAMA_7B, "IQ3_S"), ("IQ2_S", "ffn_up", LLAMA_8B, "IQ2_XS"),
    ("IQ2_M", "attn_output", LLAMA_8B, "IQ3_S"), ("IQ2_M", "attn_output", MIXTRAL, "Q5_K"),
    ("IQ2_XXS", "attn_k", MIXTRAL, "Q4_K"),
    ("Q4_K_M", "attn_output", MIXTRAL, "Q5_K"), ("Q5_K_M", "attn_output", MIXTRAL, "Q5_K"),
])  # fmt: skip
def test_the_last_layer_but_one_in_the_middle(mix, role, config, kind):
    assert 14 in layers_with(kind, mix, role, config)


def test_the_output_projection_has_6_bits_and_so_has_an_embedding_that_is_one():
    for mix in MIXES:
        has_8_bits, has_5_bits = mix in ("Q8_0", "MXFP4_MOE"), mix.startswith(("IQ1", "IQ2")) or mix == "IQ3_XXS"
        expected = "Q8_0" if has_8_bits else "Q5_K" if has_5_bits else "Q6_K"
        usual = {"IQ2_XXS": "Q2_K", "IQ2_XS": "Q2_K", "IQ2_S": "IQ3_S", "IQ2_M": "IQ3_S", "IQ3_XXS": "IQ3_S"}
        usual |= {"IQ1_S": "Q2_K", "IQ1_M": "Q2_K", "TQ1_0": "Q4_K", "TQ2_0": "Q4_K", "MXFP4_MOE": "Q8_0"}
        assert types_of(mix)["output.weight"] == expected
        assert types_of(mix, is_tied=True)["token_embd.weight"] == expected
        assert types_of(mix)["token_embd.weight"] == usual.get(mix, MIXES[mix])
    assert types_of("Q4_K_M", width=576)["output.weight"] == "Q8_0"  # rows too short for Q4_K
    assert types_of("Q4_0", width=576)["output.weight"] == "Q6_K"


def test_only_stacks_of_experts_are_mxfp4_in_its_mix():
    stacks = {f"blk.0.ffn_{part}_exps.weight": (8, 64, 256) for part in ("gate", "up", "down")}
    others = {"blk.0.attn_q.weight": (64, 256), "blk.0.attn_k_b.weight": (4, 64, 256), "output.weight": (512, 256)}
    types = types_in_mix("MXFP4_MOE", {**stacks, **others}, Traits("other", 1, 1, 8))
    assert {types[name] for name in (*stacks, "blk.0.attn_k_b.weight")} == {"MXFP4"}
    assert types["blk.0.attn_q.weight"] == types["output.weight"] == "Q8_0"
    types = types_in_mix("MXFP4_MOE", {**stacks, **others}, Traits("bailingmoe3", 1, 1, 8))
    assert types["blk.0.attn_k_b.weight"] == "Q8_0" and types["blk.0.ffn_up_exps.weight"] == "MXFP4"


def test_what_llama_cpp_keeps_in_floats():
    more = ("blk.0.attn_norm.weight", "blk.0.ffn_gate_inp.weight", "position_embd.weight", "blk.0.attn_q.bias")
    types = types_of("Q4_K_M", more=(*more, "blk.0.ssm_out.weight"))
    assert [types[name] for name in more] == [None] * 4 and types["blk.0.ssm_out.weight"] == "Q4_K"
    one_row = types_in_mix("Q4_K_M", {"blk.0.ffn_gate_inp_shexp.weight": (1, 256)}, traits_of(LLAMA_8B))
    assert one_row["blk.0.ffn_gate_inp_shexp.weight"] is None


def test_layers_without_attention_are_not_counted():
    """The rules of the values go by how many values came before, those of an expert's matrix by its layer."""
    names = [f"blk.{index}.attn_v.weight" for index in (1, 3, 5, 7)]
    shapes = dict.fromkeys((*names, "blk.5.ffn_down_exps.weight"), (8, 256))
    types = types_in_mix("Q4_K_M", shapes, Traits("other", 8, 1, 4))
    assert [types[name] for name in names] == ["Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    assert types["blk.5.ffn_down_exps.weight"] == "Q4_K" and "output.weight" not in types


def test_falcon_has_rules_of_its_own():
    types = types_of("Q4_K_M", LLAMA_7B, architecture="falcon")
    assert types["output.weight"] == "Q8_0"
    assert [types[f"blk.{index}.ffn_down.weight"] for index in (0, 2, 4)] == ["Q6_K", "Q5_K", "Q4_K"]


def tensors_of(*names):
    return {f"{name}.weight": TensorHeader("BF16", (256, 256), "", 0, 2 * 256 * 256) for name in names}


def test_what_the_config_names_comes_before_the_mix():
    """A type of the embedding comes first, then the layers of the config, then the mix."""
    names = ("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.up_proj")
    tensors = tensors_of("model.embed_tokens", *names)
    config = presets.resolve("q4_k_m", token_embedding_type="q8_0")
    own = {"*.v_proj": presets.resolve("gguf_q4_0").global_quant_config}
    config = type(config)(**{**config.to_dict(), "layer_quant_config": own})
    layers = with_gguf_types(config, LLAMA_8B, tensors)
    assert [layers.choose(name, "Linear")[0].weight.dtype for name in names] == ["int6", "int4", "uint4"]
    assert layers.choose("model.embed_tokens", "Embedding")[0].weight.dtype == "int8"


def test_names_are_found_in_any_case_and_are_no_schemes_of_layers():
    assert presets.resolve("q4_k_m") == presets.resolve("Q4_K_M") and presets.spelled("iq4_xs") == "IQ4_XS"
    with pytest.raises(ConfigError, match="Unknown preset 'q4_k_x'"):
        presets.resolve("q4_k_x")
    with pytest.raises(ConfigError, match="Q4_K_M is a mix of types itself"):
        resolve(MixConfig(schemes=("gguf_q8_0", "Q4_K_M"), max_bits=5))


def test_the_ranges_of_an_embedding_of_few_bits_are_searched():
    tensors = tensors_of("model.embed_tokens", "lm_head")
    chosen = [
        with_gguf_types(presets.resolve(mix), LLAMA_8B, tensors).layer_quant_config["model.embed_tokens"].weight
        for mix in ("Q2_K", "Q5_K_M")
    ]
    assert [spec.observer_method for spec in chosen] == ["mse", "min_max"]


def test_of_models_of_other_architectures_the_converter_names_the_tensors(monkeypatch):
    """A layer named for another type, one that llama.cpp keeps in floats, and one that it divides."""
    names = {"h.0.v": "blk.0.attn_v", "h.0.up": "blk.0.ffn_up", "h.0.mix": "blk.0.altup_proj", "wte": "token_embd"}
    places = {f"{name}.weight": (Place(f"{stored}.weight"),) for name, stored in names.items()}
    fields = {"architecture": "other", "block_count": 1, "attention.head_count": [4, 4], "expert_count": None}
    fields |= {"attention.head_count_kv": [4, 0]}

    def converted(*_):
        shapes = {place.name: (256, 256) for found in places.values() for place in found}
        return ConvertedNames(shapes, places, fields)

    monkeypatch.setattr("quantcore.plan.gguf_types.converted_names", converted)
    config = with_gguf_types(presets.resolve("Q4_K_M"), {"model_type": "other"}, tensors_of(*names))
    chosen = {name: layer.weight.dtype for name, layer in config.layer_quant_config.items()}
    assert chosen == {"h.0.v": "int6", "wte": "int6"} and "h.0.mix" in config.exclude
    places["h.0.v.weight"] += (Place("blk.0.attn_gate.weight"),)
    with pytest.raises(ConfigError, match=r"'h\.0\.v\.weight' lies in tensors of different types") as refusal:
        with_gguf_types(presets.resolve("Q4_K_M"), {"model_type": "other"}, tensors_of(*names))
    assert refusal.value.code == "incompatible_export" and "gguf_q4_k" in refusal.value.hint
    fields["architecture"] = "glm5-next"
    with pytest.raises(ConfigError, match="by rules of its own"):
        with_gguf_types(presets.resolve("Q4_K_M"), {"model_type": "other"}, tensors_of(*names))


def test_experts_that_a_checkpoint_has_one_by_one_are_a_stack_in_the_file() -> None:
    """MXFP4_MOE gave the experts of Mixtral and Qwen3-MoE 8 bits."""
    parts = {"block_sparse_moe.experts.0.w1": 4, "block_sparse_moe.experts.1.w1": 4, "self_attn.q_proj": 8}
    tensors = {f"model.layers.0.{name}.weight": TensorHeader("F32", (64, 64), "f", 0, 1) for name in parts}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_local_experts": 2}
    config = with_gguf_types(presets.resolve("MXFP4_MOE"), {"model_type": "mixtral", **sizes}, tensors)
    own = {name: layer.weight.format.bits for name, layer in config.layer_quant_config.items()}
    usual = config.global_quant_config.weight.format.bits
    assert {name: own.get(f"model.layers.0.{name}", usual) for name in parts} == parts


@pytest.mark.parametrize("short", ["Q3_K", "q4_k", "Q5_K"])
def test_a_short_name_is_that_of_llama_cpp_s_tool(short: str) -> None:
    assert presets.resolve(short) == presets.resolve(f"{short}_M")
