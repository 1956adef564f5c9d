"""Config and tokenizer files with values that a library trips over: each is a named error of the model, never ours."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantcore.checkpoint.headers import read_local
from quantcore.engine.data.tokenizer import load_tokenizer, tokenize_with
from quantcore.engine.model.skeleton import build_skeleton
from quantcore.errors import ModelError
from tests.support.models import tiny_model, tiny_tokenizer

REFUSED = "config_implausible"
NOT_BUILT = "unsupported_architecture"

# name -> (what config.json says, the code)
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown activation": ({"hidden_act": "nope"}, NOT_BUILT),
    "an activation that is a number": ({"hidden_act": 3}, REFUSED),
    "an unknown rope type": ({"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, NOT_BUILT),
    "rope parameters that are a list": ({"rope_scaling": [1]}, REFUSED),
    "a rope type without its factor": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, REFUSED),
    "a rope base that is a text": ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "unsafe_setting"),
    "an unknown dtype": ({"dtype": "float7"}, REFUSED),
    "an unknown model type": ({"model_type": "nope"}, NOT_BUILT),
    "a model type that is a list": ({"model_type": ["llama"]}, NOT_BUILT),
    "a padding token beyond the vocabulary": ({"pad_token_id": 10**9}, NOT_BUILT),
    "an end token that is a text": ({"eos_token_id": "x"}, "unsafe_setting"),
    "layer types that nobody knows": ({"layer_types": ["x", "y", "z"]}, REFUSED),
    "layer types that are a number": ({"layer_types": 4}, REFUSED),
    "heads of an odd width": ({"head_dim": 7}, REFUSED),
    "labels that are a number": ({"id2label": 3}, REFUSED),
    "a text config that is a number": ({"text_config": 3}, REFUSED),
    "a quantization config that is a list": ({"quantization_config": [1]}, REFUSED),
    "half a surrogate pair": ({"name_or_path": "\ud800"}, "invalid_json"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_no_model_can_have(model: Path, tmp_path: Path, case: str) -> None:
    changes, code = CONFIGS[case]
    folder = _beside(model, tmp_path, lambda name: name != "config.json")
    (folder / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | changes))
    with pytest.raises(ModelError) as caught:
        build_skeleton(read_local(folder).config, torch.float32)
    assert caught.value.code == code
    assert not caught.value.retryable and str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("key", ["return_dict", "torchscript", "use_cache"])
def test_the_form_of_outputs_is_ours_to_choose(model: Path, key: str) -> None:
    config = json.loads((model / "config.json").read_text())
    skeleton = build_skeleton(config | {key: key != "return_dict"}, torch.float32)
    assert skeleton.config.return_dict and not skeleton.config.use_cache


def _settings(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: _edit(folder / "tokenizer_config.json", lambda data: data | changes)


def _tokenizer(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: _edit(folder / "tokenizer.json", lambda data: data | changes)


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _edit(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


FOREIGN_CODE = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "tokenizer_class": "Evil"}

TOKENIZERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "Custom tokenizer code": (_settings(**FOREIGN_CODE), "no_tokenizer"),
    "a class that is a number": (_settings(tokenizer_class=3), "no_tokenizer"),
    "the class of another kind": (_settings(tokenizer_class="BertTokenizer"), "bad_tokenizer"),
    "a length that is a text": (_settings(model_max_length="x"), "bad_tokenizer"),
    "an end token that is a number": (_settings(eos_token=3), "no_tokenizer"),
    "settings that are a list": (_write("tokenizer_config.json", b"[]"), "no_tokenizer"),
    "settings that are no text": (_write("tokenizer_config.json", b"\xff\xfe{"), "no_tokenizer"),
    "a regular expression that is none": (_tokenizer(pre_tokenizer=_split("([")), "no_tokenizer"),
    "an unknown model": (_tokenizer(model={"type": "Nope"}), "no_tokenizer"),
    "an unknown decoder": (_tokenizer(decoder={"type": "Nope"}), "no_tokenizer"),
    "no vocabulary": (_tokenizer(model={"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}), "no_tokenizer"),
    "a list": (_write("tokenizer.json", b"[]"), "no_tokenizer"),
    "nothing": (_write("tokenizer.json", b""), "no_tokenizer"),
    "special tokens that are a list": (_write("special_tokens_map.json", b"[1]"), "no_tokenizer"),
    "a template that is no text": (_write("chat_template.jinja", b"\xff\xfe"), "no_tokenizer"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_that_nothing_can_load(model: Path, tmp_path: Path, case: str) -> None:
    change, code = TOKENIZERS[case]
    folder = _beside(model, tmp_path, lambda name: "token" not in name)
    tiny_tokenizer().save_pretrained(folder)
    load_tokenizer(folder)
    change(folder)
    with pytest.raises(ModelError) as caught:
        tokenize_with(load_tokenizer(folder))("a text")
    assert caught.value.code == code
    assert not caught.value.retryable and str(tmp_path) not in str(caught.value)


class PanicException(BaseException):
    """What a library in Rust raises when it panics. It is no Exception."""


def test_a_panic_and_an_interrupt_are_two_things() -> None:
    def fail(error: BaseException) -> Callable[..., Any]:
        def tokenize(text: str, **given: Any) -> Any:
            raise error

        return tokenize

    with pytest.raises(ModelError, match="byte index 3"):
        tokenize_with(fail(PanicException("byte index 3 is out of bounds")))("a text")  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        tokenize_with(fail(KeyboardInterrupt()))("a text")  # type: ignore[arg-type]


def _beside(model: Path, tmp_path: Path, keep: Callable[[str], bool]) -> Path:
    """A folder with copies of those files of ``model`` whose names ``keep`` lets through."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        if keep(file.name):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder
