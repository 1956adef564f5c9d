"""The rules of llama.cpp's named mixes. ``tests/consumers/test_llamacpp_mixes.py`` compares with its own tool."""

import pytest

from quantcore.checkpoint.layout import TensorHeader
from quantcore.config import presets
from quantcore.config.gguf_types import MIXES
from quantcore.errors import ConfigError
from quantcore.plan.gguf_mixes import type_in_mix
from quantcore.plan.gguf_types import with_gguf_types
from quantcore.plan.mix_schemes import MixConfig, resolve

LLAMA_8B = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_7B = {**LLAMA_8B, "num_key_value_heads": 32}
LLAMA_70B = {**LLAMA_8B, "num_hidden_layers": 80, "num_attention_heads": 64}
MIXTRAL = {**LLAMA_8B, "model_type": "mixtral", "num_local_experts": 8}
MORE_BITS_OF_32 = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]


def layers_with(kind, mix, role, config=LLAMA_8B):
    names = [f"blk.{index}.{role}.weight" for index in range(config["num_hidden_layers"])]
    types = [type_in_mix(mix, name, 4096, config, is_tied=False) for name in names]
    return [index for index, found in enumerate(types) if found == kind]


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
    assert layers_with("Q5_K", "IQ4_XS", "ffn_down") == [0, 1, 2, 3]


@pytest.mark.parametrize(("mix", "role", "config", "kind"), [
    ("Q2_K", "attn_v", LLAMA_8B, "Q4_K"), ("Q2_K", "attn_v", LLAMA_7B, "Q3_K"), ("Q2_K", "ffn_down", LLAMA_8B, "Q3_K"),
    ("Q2_K", "ffn_up", LLAMA_8B, "Q2_K"), ("Q3_K_L", "attn_output", LLAMA_8B, "Q5_K"),
    ("Q3_K_M", "attn_output", LLAMA_8B, "Q4_K"), ("Q3_K_S", "attn_v", LLAMA_8B, "Q3_K"),
    ("Q3_K_S", "attn_v", LLAMA_70B, "Q5_K"), ("IQ4_XS", "attn_v", LLAMA_8B, "Q5_K"),
    ("IQ4_XS", "attn_v", LLAMA_7B, "IQ4_XS"), ("Q4_K_S", "attn_v", MIXTRAL, "Q8_0"),
    ("Q4_K_M", "attn_k", MIXTRAL, "Q8_0"),
    ("Q4_K_M", "attn_output", MIXTRAL, "Q5_K"), ("Q5_K_M", "attn_output", MIXTRAL, "Q5_K"),
])  # fmt: skip
def test_the_last_layer_but_one_in_the_middle(mix, role, config, kind):
    assert 14 in layers_with(kind, mix, role, config)


def test_the_output_projection_has_6_bits_and_so_has_an_embedding_that_is_one():
    for mix in MIXES:
        expected = "Q8_0" if mix == "Q8_0" else "Q6_K"
        assert type_in_mix(mix, "output.weight", 4096, LLAMA_8B, is_tied=False) == expected
        assert type_in_mix(mix, "token_embd.weight", 4096, LLAMA_8B, is_tied=True) == expected
        assert type_in_mix(mix, "token_embd.weight", 4096, LLAMA_8B, is_tied=False) == MIXES[mix]
    assert type_in_mix("Q4_K_M", "output.weight", 576, LLAMA_8B, is_tied=False) == "Q8_0"  # rows too short for Q4_K
    assert type_in_mix("Q4_0", "output.weight", 576, LLAMA_8B, is_tied=False) == "Q6_K"


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
    with pytest.raises(ConfigError, match="but not for 'olmo2'"):
        with_gguf_types(presets.resolve("Q4_K_M"), {"model_type": "olmo2"}, {})


def test_the_ranges_of_an_embedding_of_few_bits_are_searched():
    tensors = tensors_of("model.embed_tokens", "lm_head")
    chosen = [
        with_gguf_types(presets.resolve(mix), LLAMA_8B, tensors).layer_quant_config["model.embed_tokens"].weight
        for mix in ("Q2_K", "Q5_K_M")
    ]
    assert [spec.observer_method for spec in chosen] == ["mse", "min_max"]
