"""An adapter that cannot be merged whole, or belongs to another model, is refused with the reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, OFTConfig
from safetensors.torch import load_file, save_file

from quantcore.checkpoint.adapter import Adapter, adapter_digest, read_adapter
from quantcore.checkpoint.layout import TensorHeader
from quantcore.errors import ModelError
from quantcore.importing.model import read_model
from tests.support.adapters import save_adapter
from tests.support.models import tiny_model

Tensors = dict[str, torch.Tensor]
LAYER = "base_model.model.model.layers.0.self_attn"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(base, tmp_path_factory.mktemp("saved") / "adapter")


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "adapter")


def edit(folder: Path, **settings: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def refused(base: Path, adapter: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_model(base, adapter)
    return caught.value


@pytest.mark.parametrize("kind", [LoHaConfig, OFTConfig])
def test_other_types_are_refused_by_name(base: Path, tmp_path: Path, kind: Callable[..., Any]) -> None:
    config = kind(target_modules=["q_proj"])
    config.save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    error = refused(base, tmp_path)
    assert error.code == "unsupported_adapter"
    assert f"type is {config.peft_type.value}" in error.message


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "type is PROMPT_TUNING"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters: it changes parameters that hold all"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices: it replaces single rows"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication: it repeats layers"),
        ({"alora_invocation_tokens": [5]}, "aLoRA"),
        ({"use_qalora": True}, "QALoRA"),
        ({"use_tomorrows_trick": True}, "use_tomorrows_trick: this is not known here"),
        ({"init_lora_weights": "pissa"}, "'pissa': training began with other weights"),
    ],
)
def test_settings_that_cannot_be_merged_are_named(
    base: Path, adapter: Path, settings: dict[str, object], reason: str
) -> None:
    edit(adapter, **settings)
    error = refused(base, adapter)
    assert error.code == "unsupported_adapter"
    assert reason in error.message


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"r": 0}, "not valid at r: Input should be greater than or equal to 1"),
        ({"rank_pattern": {"(": 4}}, "pattern that cannot be read"),
        ({"rank_pattern": {"q_proj": -1}}, "rank -1 in rank_pattern"),
        ({"target_modules": ["q_proj"]}, "does not name this module"),
        ({"layers_to_transform": [0, 1]}, "does not name this module"),
        ({"exclude_modules": ["v_proj"]}, "does not name this module"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "names the module 'o_proj', but"),
        ({"modules_to_save": ["norm"]}, "names the module 'norm', but"),
        ({"use_dora": True}, "lora_magnitude_vector of 'model.layers.0.self_attn.q_proj' is missing"),
        ({"lora_bias": True}, "lora_B.bias of 'model.layers.0.self_attn.q_proj' is missing"),
    ],
)
def test_settings_that_contradict_the_tensors_are_refused(
    base: Path, adapter: Path, settings: dict[str, object], reason: str
) -> None:
    edit(adapter, **settings)
    error = refused(base, adapter)
    assert error.code == "invalid_adapter"
    assert reason in error.message


def test_a_target_that_no_model_has_is_no_fault(base: Path, adapter: Path) -> None:
    """Lists for several architectures are usual, and PEFT saves them as they were given."""
    edit(adapter, target_modules=["q_proj", "v_proj", "c_attn"])
    assert read_model(base, adapter).adapter is not None


def _renamed(tensors: Tensors) -> Tensors:
    return {name.replace("self_attn", "attention"): tensor for name, tensor in tensors.items()}


def _longer(tensors: Tensors) -> Tensors:
    name = f"{LAYER}.q_proj.lora_A.weight"
    return {**tensors, name: torch.zeros(4, 65)}


def _of_rank_8(tensors: Tensors) -> Tensors:
    return {**tensors, f"{LAYER}.q_proj.lora_A.weight": torch.zeros(8, 64)}


def _without_b(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != f"{LAYER}.q_proj.lora_B.weight"}


def _unprefixed(tensors: Tensors) -> Tensors:
    return {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}


def _with(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, f"base_model.model.{name}": torch.zeros(shape)}


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        (_renamed, "adapter_of_other_model", "'model.layers.0.attention.q_proj.weight', which the model does not have"),
        (_longer, "adapter_of_other_model", r"has the shape [4, 65], but it must be [4, 64]"),
        (_of_rank_8, "adapter_of_other_model", "must be [4, 64]: the rank 4 in adapter_config.json"),
        (_without_b, "invalid_adapter", "lora_B.weight of 'model.layers.0.self_attn.q_proj' is missing"),
        (_unprefixed, "invalid_adapter", "PEFT's names begin with 'base_model.model.'"),
        (lambda tensors: {}, "invalid_adapter", "holds no tensors"),
        (_with("model.embed_tokens.weight", 520, 64), "unsupported_adapter", "520 rows, and that of the model has 512"),
        (_with("model.embed_tokens.weight", 512, 64), "unsupported_adapter", "output projection of this model as well"),
        (_with("lm_head.weight", 512, 64), "unsupported_adapter", "the embedding itself in this model (tied)"),
        (_with("model.norm.weight", 32), "adapter_of_other_model", "has the shape [32], but 'model.norm.weight'"),
        (
            _with("model.embed_tokens.token_adapter.trainable_tokens_delta", 1, 64),
            "unsupported_adapter",
            "no tensor of a LoRA or DoRA adapter",
        ),
    ],
)  # fmt: skip
def test_tensors_without_a_place_in_the_model_are_refused(
    base: Path, adapter: Path, change: Callable[[Tensors], Tensors], code: str, reason: str
) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    error = refused(base, adapter)
    assert error.code == code
    assert reason in error.message


def test_a_bias_where_there_is_none_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "adapter", lora_bias=True)
    assert (
        "adds a bias to 'model.layers.0.self_attn.q_proj' (lora_bias), which has none" in refused(base, adapter).message
    )


def test_a_folder_without_an_adapter_is_named(base: Path, adapter: Path, tmp_path: Path) -> None:
    assert refused(base, tmp_path / "nowhere").code == "no_adapter"
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    error = refused(base, adapter)
    assert (error.code, "are never read" in error.hint) == ("no_adapter", True)


def test_another_base_model_is_a_warning(base: Path, adapter: Path) -> None:
    """Copies of one model have many names: only names and shapes of tensors can refuse an adapter."""
    assert read_model(base, adapter).headers.warnings == read_model(base).headers.warnings
    edit(adapter, base_model_name_or_path="meta-llama/Model")
    assert read_model(base, adapter).headers.warnings == read_model(base).headers.warnings, "the same name elsewhere"
    edit(adapter, base_model_name_or_path="org/other")
    [warning] = set(read_model(base, adapter).headers.warnings) - set(read_model(base).headers.warnings)
    assert "trained on 'org/other', and is merged into 'model'" in warning
    edit(adapter, base_model_name_or_path=None)
    [warning] = set(read_model(base, adapter).headers.warnings) - set(read_model(base).headers.warnings)
    assert "does not say which model" in warning


def test_a_chat_template_of_its_own_is_a_warning(base: Path, adapter: Path) -> None:
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    [warning] = set(read_model(base, adapter).headers.warnings) - set(read_model(base).headers.warnings)
    assert "keeps that of the model" in warning


def test_the_digest_is_that_of_settings_and_weights(adapter: Path) -> None:
    digest = adapter_digest(adapter)
    (adapter / "README.md").write_text("card")
    assert adapter_digest(adapter) == digest
    edit(adapter, lora_alpha=1)
    assert adapter_digest(adapter) != digest


def _matched(saved: Path, prefix: str, *more: str) -> Adapter:
    names = [f"{prefix}layers.{block}.self_attn.{side}_proj.weight" for block in range(3) for side in "qv"]
    shapes = {name: (32, 64) if "v_proj" in name else (64, 64) for name in (*names, *more)}
    tensors = {name: TensorHeader("F32", shape, "x", 0, 0) for name, shape in shapes.items()}
    return read_adapter(saved, Path("model"), {"vocab_size": 512}, tensors)


@pytest.mark.parametrize("prefix", ["", "transformer.model.", "language_model.model."])
def test_names_that_transformers_moves_are_found(saved: Path, prefix: str) -> None:
    """A VLM's files say language_model.model.layers, its modules are model.language_model.layers."""
    of_tower = "vision_tower.encoder.layers.0.self_attn.q_proj.weight"
    changes = _matched(saved, prefix, of_tower).changes
    assert len(changes) == 6
    assert all(name.startswith(f"{prefix}layers.") for name in changes)


def test_names_that_fit_twice_are_refused(saved: Path) -> None:
    twice = [f"model.text.layers.{block}.self_attn.{side}_proj.weight" for block in range(3) for side in "qv"]
    with pytest.raises(ModelError, match="which the model does not have"):
        _matched(saved, "model.audio.", *twice)
