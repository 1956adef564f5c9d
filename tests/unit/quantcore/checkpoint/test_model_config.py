"""Every config class of the installed Transformers: its sizes are found under the names that the class gives them."""

import re

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quantcore.checkpoint.model_config import ModelConfig

COUNTS = re.compile(r"(num|n|moe_num)_(local_|routed_)?experts|(num|n)_experts_(local|routed)")
PER_TOKEN = re.compile(r"num_experts_per_tok(en)?|moe_top_?k|top_k_experts|moe_k|router_top_k|num_selected_experts")
OF_A_LAYER_KIND = {"dots3_note", "dots3_note_text"}


def configs():
    """Yield (model_type, config.json of its default config) of the classes that need no argument."""
    for model_type in CONFIG_MAPPING:
        try:
            yield model_type, CONFIG_MAPPING[model_type]().to_dict()
        except Exception:
            continue


def parts(config):
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from parts(value)


def numbers(config, pattern):
    return {
        value for part in parts(config) for key, value in part.items()
        if isinstance(key, str) and pattern.fullmatch(key) and type(value) is int and value > 1
    }  # fmt: skip


@pytest.fixture(scope="module")
def every():
    found = dict(configs())
    assert len(found) > 300
    return found


def test_experts_are_found_in_every_class_that_has_them(every):
    missed = {
        name: wanted for name, config in every.items()
        if (wanted := numbers(config, COUNTS)) and ModelConfig(config).num_experts not in wanted
    }  # fmt: skip
    assert missed == {}


def test_experts_per_token_are_found_beside_them(every):
    missed = {
        name: wanted for name, config in every.items()
        if numbers(config, COUNTS) and (wanted := numbers(config, PER_TOKEN))
        and ModelConfig(config).num_experts_per_token not in wanted
    }  # fmt: skip
    assert missed == {}


def test_the_language_part_is_the_one_that_counts():
    text = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    sizes = ModelConfig({"vision_config": {"hidden_size": 32}, "text_config": text, "hidden_size": 16})
    assert (sizes.hidden_size, sizes.head_dim, sizes.num_key_value_heads, sizes.num_layers) == (64, 16, 4, 2)
    assert ModelConfig({"n_embd": 64, "n_head": 8, "head_dim": None}).head_dim == 8
    assert ModelConfig({"vocab_size": 7}).vocab_size == 7 and ModelConfig({}).head_dim is None


def test_a_single_expert_is_no_mixture():
    assert ModelConfig({"num_experts": 1, "num_experts_per_tok": 1}).num_experts is None
    nested = {"ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}}
    assert (ModelConfig(nested).num_experts, ModelConfig(nested).num_experts_per_token) == (16, 4)


@pytest.mark.parametrize(
    ("declared", "predicts"),
    [("LlamaForCausalLM", True), ("GPT2LMHeadModel", True), ("BertModel", False), ("BertForMaskedLM", True),
     ("XLMRobertaForSequenceClassification", False), (None, True)],
)  # fmt: skip
def test_the_declared_class_says_whether_tokens_are_predicted(declared, predicts):
    assert ModelConfig({"architectures": declared and [declared]}).predicts_tokens is predicts
