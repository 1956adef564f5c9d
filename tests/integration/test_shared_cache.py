"""Gemma 3n and 4: blocks with the keys and values of an earlier one, and blocks whose values are their keys."""

import json
from dataclasses import replace

import pytest
import torch
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quantcore.checkpoint.blocks import Blocks
from quantcore.checkpoint.shared_cache import find_unused
from quantcore.config.presets import resolve
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.modules.loading import load
from quantcore.engine.pipeline.job import run
from quantcore.errors import ModelError
from quantcore.importing.model import read_model
from tests.support.jobs import task
from tests.support.models import SHAPE, tiny_tokenizer

GEMMA = {
    **SHAPE, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16, "global_head_dim": 32,
}  # fmt: skip
MODELS = {
    "values are keys": ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "shared": ("gemma4_text", {"num_kv_shared_layers": 2}),
    "3n": (
        "gemma3n_text",
        {"num_kv_shared_layers": 2, "intermediate_size": [128] * 4, "activation_sparsity_pattern": [0.0] * 4,
         "laurel_rank": 8},
    ),
}  # fmt: skip
UNUSED = [f"model.layers.{index}.self_attn.{part}" for index in (2, 3) for part in ("k_proj", "v_proj")]
IDS = torch.arange(5, 29)[None]


def made(folder, name):
    """Save a tiny model as such models are published: with keys and values for the blocks that share their cache."""
    model_type, extra = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**GEMMA, **extra}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    if name != "values are keys":
        tensors = load_file(folder / "model.safetensors")
        for place in UNUSED:
            tensors[f"{place}.weight"] = torch.full((32, 64), 3.0, dtype=torch.bfloat16)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def group_of(name, quantization_config):
    """Return the group of a layer as compressed-tensors matches names; None if it is ignored."""
    if any(match_name(name, pattern) for pattern in quantization_config["ignore"]):
        return None
    groups = quantization_config["config_groups"].items()
    return next(key for key, group in groups if any(t == "Linear" or match_name(name, t) for t in group["targets"]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["all", "attention kept", "two schemes"])
def test_fused_layers_have_one_scheme(name, way, tmp_path, proof_in_this_process):
    """vLLM fuses q, k and v of every block, and refuses two schemes for one layer."""
    config = resolve("int8_weight_only", exclude=("*self_attn*",) if way == "attention kept" else None)
    if way == "two schemes":
        layer = resolve("w4a16_sym", group_size=32).global_quant_config
        config = replace(config, layer_quant_config=dict.fromkeys(("*q_proj", "*k_proj", "*v_proj"), layer))
    model_dir = made(tmp_path / "model", name)
    report = run(task(model_dir, tmp_path / "out", config=config, export=["compressed_tensors"]), lambda event: None)
    found = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    for index in range(4):
        groups = [group_of(f"model.layers.{index}.self_attn.{part}_proj", found) for part in "qkv"]
        assert len(set(groups)) == 1 and (groups[0] is None) == (way == "attention kept")
    stored = load_file(tmp_path / "out/model.safetensors")
    if name != "values are keys":
        assert all((stored[f"{place}.weight"] == 3).all() for place in UNUSED)
        assert any("are unused" in warning for warning in report.to_dict()["warnings"])
    theirs, ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").train(False), load(tmp_path / "out").model
    with torch.no_grad(), open_model(read_model(tmp_path / "out")).whole() as whole:
        expected = theirs(IDS).logits.float()
        for model in (ours, whole):
            assert (model(IDS).logits.float() - expected).norm() < 0.02 * expected.norm()


def test_other_layers_without_a_place_are_excluded_by_their_name(tmp_path):
    """A pattern such as '*.k_proj' would exclude all keys."""
    folder = made(tmp_path / "model", "values are keys")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.extra.weight"] = torch.zeros(64, 64, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        run(task(folder, tmp_path / "out", "int8_weight_only"), lambda event: None)
    assert "'model.layers.1.self_attn.extra'" in caught.value.hint and "*" not in caught.value.hint


def test_only_the_last_blocks_share():
    names = [f"model.layers.{index}.self_attn.{part}" for index in range(4) for part in ("q_proj", "k_proj", "v_proj")]
    blocks = Blocks((("model.layers.", 4),))
    assert find_unused(names, {"text_config": {"num_kv_shared_layers": 2}}, blocks) == set(UNUSED)
    assert not find_unused(names, {"num_kv_shared_layers": 0}, blocks) and not find_unused(names, {}, blocks)
