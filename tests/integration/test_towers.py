"""Encoders of images are quantized on request, and Transformers answers about an image nearly as before."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText

from quantcore.config import presets
from quantcore.config.task import Task
from quantcore.engine.pipeline import job
from quantcore.errors import ConfigError
from tests.support.params import with_rare
from tests.support.proofs import proving_here
from tests.sweep.classes import build, find_class, save


def ask_llava(model):
    size, patch = model.config.vision_config.image_size, model.config.vision_config.patch_size
    pixels = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    return {"pixel_values": pixels.to(model.dtype)}, (size // patch) ** 2


def ask_qwen(model):
    """An image of 8 x 8 patches, of which each 2 x 2 become one token."""
    width = 3 * model.config.vision_config.temporal_patch_size * model.config.vision_config.patch_size**2
    pixels = torch.randn(64, width, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    return {"pixel_values": pixels.to(model.dtype), "image_grid_thw": torch.tensor([[1, 8, 8]])}, 16


FAMILIES = {"LlavaForConditionalGeneration": ask_llava, "Qwen2_5_VLForConditionalGeneration": ask_qwen}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a tiny model of a class on the first request; return its folder."""
    folder = tmp_path_factory.mktemp("models")

    def save_once(name):
        if not (folder / name).exists():
            save(build(find_class(name)), folder / name)
        return folder / name

    return save_once


def quantize(model, output, towers=None, algorithms=()):
    config = presets.resolve("int8_dynamic", towers=towers)
    settings = {
        "export": ["compressed_tensors"],
        "gate": "off",
        "evaluation": {"num_windows": 2, "seq_len": 32, "num_prompts": 0},
    }
    config = config.to_dict() | {"algo_config": algorithms}
    task = {"model_dir": str(model), "output_dir": str(output), "config": config}
    calibration = {"num_samples": 2, "seq_len": 32}
    with proving_here():
        job.run(Task.model_validate(task | settings | {"calibration": calibration}), lambda event: None)
    return json.loads((output / "report.json").read_text())


def answer(folder, ask):
    """Return the logits of the last token of a question about an image, and the states that the tower gives."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    image, num_tokens = ask(model)
    ids = torch.tensor([[5, *[model.config.image_token_id] * num_tokens, 7, 8, 9]])
    with torch.no_grad():
        logits = model(input_ids=ids, **image).logits[0, -1]  # first: with it compressed-tensors unpacks all layers
        return logits, torch.cat(list(model.model.get_image_features(**image).pooler_output))


def difference(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("towers", with_rare(presets.TOWER_PRESETS, ["fp8"]))
@pytest.mark.parametrize("name", with_rare(FAMILIES, ["Qwen2_5_VLForConditionalGeneration"]))
def test_transformers_sees_an_image_through_the_quantized_tower(name, towers, saved, tmp_path):
    report = quantize(saved(name), tmp_path / "out", towers=towers)
    (logits, states), (expected, expected_states) = (
        answer(folder, FAMILIES[name]) for folder in (tmp_path / "out", saved(name))
    )
    assert 0 < difference(states, expected_states) < 0.1
    assert 0 < difference(logits, expected) < 0.1
    schemes = {
        layer["name"]: layer["scheme"]
        for layer in report["layers"]
        if "visi" in layer["name"] or "visual" in layer["name"]
    }
    assert schemes and all(scheme.startswith(towers) for scheme in schemes.values())
    assert "layers of towers are rounded without calibration" in " ".join(report["warnings"])
    projectors = [
        entry["name"] for entry in report["kept"] if entry["reason"] == "projector between parts of the model"
    ]
    assert projectors and not any(name in schemes for name in projectors)


@pytest.mark.parametrize("name", with_rare(FAMILIES, ["Qwen2_5_VLForConditionalGeneration"]))
def test_a_tower_stays_as_it_is_unless_asked_for(name, saved, tmp_path):
    report = quantize(saved(name), tmp_path / "out")
    assert f"model = {name}.from_pretrained('.')" in report["summary"]["exports"]["compressed_tensors"]["load"]
    states = [answer(folder, FAMILIES[name])[1] for folder in (tmp_path / "out", saved(name))]
    assert torch.equal(*states)


REFUSED = {"no_towers": "LlamaForCausalLM", "unsupported_config": "WhisperForConditionalGeneration"}


@pytest.mark.parametrize("code", REFUSED)
def test_a_tower_that_cannot_be_quantized_is_refused(code, saved, tmp_path):
    with pytest.raises(ConfigError) as caught:
        quantize(saved(REFUSED[code]), tmp_path / "out", towers="int8")
    assert caught.value.code == code and caught.value.field.endswith("/tower_quant_config")


def test_the_stream_that_a_tower_adds_to_is_not_rotated(saved, tmp_path):
    with pytest.raises(ConfigError, match="towers of this model add to") as caught:
        quantize(saved("LlavaForConditionalGeneration"), tmp_path / "out", algorithms=[{"name": "rotation"}])
    assert caught.value.code == "cannot_rotate"


def test_a_scheme_of_towers_that_needs_data_is_refused():
    needs_data = presets.resolve("int8").global_quant_config
    with pytest.raises(ConfigError, match="calibration does not run towers"):
        replace(presets.resolve("w4a16"), tower_quant_config=needs_data)
    with pytest.raises(ConfigError, match="int8, fp8") as caught:
        presets.resolve("w4a16", towers="int4")
    assert caught.value.code == "unknown_tower_scheme"
