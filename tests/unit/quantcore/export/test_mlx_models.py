"""What mlx-lm's classes read of config.json: settings under their earlier names, and what they do not know."""

from typing import Any

import pytest

from quantcore.export.mlx_models import MODELS, earlier_names, why_not_loaded

DEFAULT = {"rope_theta": 5e5, "rope_type": "default"}
LLAMA3 = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}
HEAD = ("model.embed_tokens.weight", "lm_head.weight")


def of(model_type: str, **settings: Any) -> dict[str, Any]:
    """Return a config.json with everything that the class needs."""
    required = dict.fromkeys(MODELS[model_type].required, 1)
    return {**required, "model_type": model_type, **settings}


def test_rotary_settings_get_their_earlier_names() -> None:
    assert earlier_names({"model_type": "llama", "rope_parameters": DEFAULT}) == {
        "rope_theta": 5e5,
        "rope_scaling": None,
    }
    assert earlier_names({"model_type": "llama", "rope_parameters": LLAMA3})["rope_scaling"] == LLAMA3
    assert earlier_names({"model_type": "llama", "rope_theta": 1e4, "rope_parameters": DEFAULT}) == {
        "rope_scaling": None
    }
    assert earlier_names({"model_type": "llama", "rope_theta": 1e4}) == {}


def test_gemma_3_has_two_kinds_of_layers() -> None:
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    rope = {"full_attention": LLAMA3, "sliding_attention": {**DEFAULT, "rope_theta": 1e4}}
    config = of("gemma3_text", rope_parameters=rope, layer_types=kinds * 2)
    assert earlier_names(config) == {
        "rope_theta": 5e5,
        "rope_local_base_freq": 1e4,
        "rope_scaling": LLAMA3,
        "sliding_window_pattern": 3,
    }
    assert why_not_loaded(config, HEAD) is None
    inside = {"model_type": "gemma3", "text_config": config}
    assert earlier_names(inside)["text_config"] == {**config, **earlier_names(config)}


def test_a_class_that_reads_the_new_names_gets_no_others() -> None:
    assert earlier_names({"model_type": "gemma4_text", "rope_parameters": {"full_attention": LLAMA3}}) == {}


def test_settings_that_a_class_needs_are_given_or_refused() -> None:
    config = of("exaone4", rope_parameters=DEFAULT)
    del config["rope_scaling"], config["rope_theta"]
    assert earlier_names(config) == {"rope_theta": 5e5, "rope_scaling": None}
    assert why_not_loaded(config, HEAD) is None
    del config["rope_parameters"]
    assert why_not_loaded(config, HEAD) == "mlx-lm's class for exaone4 needs rope_scaling, rope_theta in config.json"


def test_the_number_of_experts_gets_its_earlier_name() -> None:
    assert earlier_names({"model_type": "qwen3_moe", "num_local_experts": 8}) == {"num_experts": 8}
    assert earlier_names({"model_type": "qwen3_moe", "num_local_experts": 8, "num_experts": 4}) == {}
    assert earlier_names({"model_type": "mixtral", "num_local_experts": 8}) == {}


def test_heads_of_another_width_are_refused_where_a_class_computes_it() -> None:
    config = of("mixtral", hidden_size=64, num_attention_heads=4, head_dim=32)
    assert why_not_loaded(config, HEAD) == "mlx-lm's class for mixtral has heads of 16 channels, but head_dim is 32"
    assert why_not_loaded({**config, "head_dim": 16}, HEAD) is None
    assert why_not_loaded(of("qwen3", hidden_size=64, num_attention_heads=4, head_dim=32), HEAD) is None


EXPERTS = ("model.layers.0.mlp.experts.0.up_proj.weight", *HEAD)
REFUSED = [
    ({"model_type": "opt"}, HEAD, "no class for model_type 'opt'"),
    ({}, HEAD, "no class for model_type 'None'"),
    (of("falcon_h1"), HEAD, "multiplies weights"),
    (of("ernie4_5_moe"), EXPERTS, "does not stack the codes of experts"),
    (of("deepseek_v3"), HEAD[:1], "needs an output projection of its own"),
    (of("glm", rope_parameters={**DEFAULT, "partial_rotary_factor": 0.5}), HEAD, "partial_rotary_factor, which is 0.5"),
    (of("glm", partial_rotary_factor=0.5), HEAD, "partial_rotary_factor, which is 0.5"),
    (of("gemma", rope_parameters=LLAMA3), HEAD, "does not know rope_scaling"),
    (of("cohere2", layer_types=["full_attention", "sliding_attention"] * 2), HEAD, "in every n-th layer"),
    (of("cohere2", layer_types=["sliding_attention"] * 3), HEAD, "needs a layer of the kind full_attention"),
]


@pytest.mark.parametrize(("config", "tensors", "reason"), REFUSED)
def test_what_a_class_does_not_load_is_refused(config: dict[str, Any], tensors: tuple[str, ...], reason: str) -> None:
    said = why_not_loaded(config, tensors)
    assert said is not None and reason in said and not said.endswith(".")


def test_usual_models_are_not() -> None:
    for model_type in ("llama", "qwen3", "gemma", "glm", "mixtral", "phi3"):
        assert why_not_loaded(of(model_type, rope_parameters=DEFAULT), HEAD) is None, model_type
    assert why_not_loaded(of("mixtral"), (EXPERTS[0], *HEAD)) is None
    assert why_not_loaded(of("qwen3_moe"), EXPERTS) is None  # in stacks
    assert why_not_loaded(of("glm", partial_rotary_factor=1.0, rope_scaling=None), HEAD) is None
