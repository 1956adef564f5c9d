"""Shapes from config.json alone are those of the models that Transformers builds and saves."""

import json

import pytest

from quantcore.checkpoint.headers import read_local
from quantcore.errors import ModelError
from quantcore.plan.shapes_of_config import FAMILIES, tensors_of
from tests.support.models import MIXTURES, tiny_model

MORE = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "qwen3_moe": {**MIXTURES["qwen3_moe"], "mlp_only_layers": [1]},
    "deepseek_v3": {**MIXTURES["deepseek_v3"], "num_nextn_predict_layers": 0},
    "deepseek_v2": {**MIXTURES["deepseek_v3"], "q_lora_rank": None, "n_shared_experts": 2},
}


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name != "kimi_k2"])
def test_a_family_is_as_transformers_saves_it(tmp_path, model_type):
    more = MORE.get(model_type, MIXTURES.get(model_type, {}))
    folder = tiny_model(tmp_path / "model", model_type=model_type, **more)
    found = tensors_of(json.loads((folder / "config.json").read_text()))
    saved = read_local(folder).tensors
    assert {name: (one.dtype, one.shape, one.num_bytes) for name, one in found.items()} == {
        name: (one.dtype, one.shape, one.num_bytes) for name, one in saved.items()
    }


ODD = {
    "unsupported_architecture": {"model_type": "nobody_knows"},
    "config_implausible": {"model_type": "llama", "hidden_size": 64},
    "config_implausible ": {"model_type": "llama", "hidden_size": -1},
}


@pytest.mark.parametrize("code", ODD)
def test_what_is_not_known_is_said(code):
    with pytest.raises(ModelError) as caught:
        tensors_of(ODD[code])
    assert caught.value.code == code.strip() and caught.value.hint
