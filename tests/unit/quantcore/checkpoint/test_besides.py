"""What lies beside a model is named: adapters, weights that no index names, code, chat templates."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantcore.checkpoint.headers import read_folder
from quantcore.checkpoint.side_files import copy_side_files, differing_side_files
from quantcore.config.presets import resolve
from quantcore.errors import ModelError
from quantcore.export import json_files
from quantcore.importing.model import read_model
from tests.support.models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("good") / "model", num_hidden_layers=1)


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "sharded", num_hidden_layers=1, max_shard_size="60KB")


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_an_adapter_is_refused_and_named(model: Path) -> None:
    """``from_pretrained`` wants the weights of the adapter, and applies them."""
    (model / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "nowhere"}))
    with pytest.raises(OSError, match="adapter_model"):
        AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(ModelError, match=r"has an adapter \(adapter_config.json\)") as caught:
        read_model(model)
    assert caught.value.code == "adapter_not_merged"


def test_a_folder_with_an_adapter_alone_gets_the_same_error(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="has an adapter"):
        read_folder(tmp_path)


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter_model.safetensors", "old.safetensors"])
def test_weights_beside_the_model_are_named_and_not_read(model: Path, sharded: Path, name: str) -> None:
    for folder in (sharded,) if name == "old.safetensors" else (model, sharded):
        shutil.copy(model / "model.safetensors", folder / name)
        headers = read_model(folder).headers
        assert name not in {tensor.file for tensor in headers.tensors.values()}
        assert [name in warning for warning in headers.warnings] == [True]


def test_two_sets_of_weights_are_refused(model: Path, sharded: Path) -> None:
    """Transformers loads model.safetensors, vLLM what the index names."""
    shutil.copy(model / "model.safetensors", sharded / "model.safetensors")
    with pytest.raises(ModelError, match="two sets of weights") as caught:
        read_model(sharded)
    assert caught.value.code == "two_models"


def test_code_is_named_and_the_result_names_none(model: Path) -> None:
    edit(model / "config.json", auto_map={"AutoConfig": "configuration_own.Own", "AutoModel": "them/x--modeling.Own"})
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.Own", None]})
    headers = read_model(model).headers
    assert "configuration_own.py, tokenization_own.py" in headers.warnings[0]
    config = resolve("int8_weight_only")
    for export in ("compressed_tensors", "fake_quantized"):
        assert "auto_map" not in json_files(export, headers.config, config, (), ())["config.json"]
    own = {**headers.config, "model_type": "of its own"}
    assert "auto_map" in json_files("fake_quantized", own, config, (), ())["config.json"]


def test_other_chat_templates_travel(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    templates = {"default": "{{ messages[0].content }}", "tool_use": "tools: {{ messages[0].content }}"}
    saved = AutoTokenizer.from_pretrained(_saved(tokenizer, tmp_path / "plain"))
    saved.chat_template = templates
    saved.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model/additional_chat_templates/tool_use.jinja").exists()
    (tmp_path / "out").mkdir()
    copy_side_files(tmp_path / "model", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == templates
    assert not differing_side_files(tmp_path / "model", tmp_path / "out")
    (tmp_path / "out/additional_chat_templates/tool_use.jinja").unlink()
    assert differing_side_files(tmp_path / "model", tmp_path / "out") == ["additional_chat_templates/tool_use.jinja"]


def _saved(tokenizer, folder: Path) -> Path:
    tokenizer.save_pretrained(folder)
    return folder
