"""Model folders that want harm, or cannot be meant: each is refused from its headers, before any library opens it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantcore.checkpoint.config_checks import LARGEST
from quantcore.checkpoint.headers import read_folder, read_local
from quantcore.errors import ModelError
from quantcore.importing.model import read_model
from quantcore.sandbox.opening import VARIABLE
from tests.support.models import tiny_model


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("good"))


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "model")


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def with_header(model: Path, change: Callable[[dict[str, Any]], Any], *, more: bytes = b"") -> None:
    path = model / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :] + more)


NORM = "model.norm.weight"


def changed(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda header: {**header, NORM: {**header[NORM], **changes}}


def overlapping(header: dict[str, Any]) -> dict[str, Any]:
    return {**header, "twin": header[NORM]}


def without_norm(header: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in header.items() if name != NORM}


def split_index(model: Path) -> None:
    """The index says of a tensor that it is in the other one of two files."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (model / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    weight_map = {"x": "model.safetensors", NORM: "b.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HOSTILE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a header that is a list": ("corrupt_weights", lambda m: with_header(m, lambda _: [1])),
    "an entry that is a number": ("corrupt_weights", lambda m: with_header(m, lambda h: {**h, NORM: 3})),
    "a dtype that is a list": ("corrupt_weights", lambda m: with_header(m, changed(dtype=["BF16"]))),
    "sides that are real numbers": ("corrupt_weights", lambda m: with_header(m, changed(shape=[64.0]))),
    "sides that are true": ("corrupt_weights", lambda m: with_header(m, changed(shape=[64, True]))),
    "sides below zero": ("corrupt_weights", lambda m: with_header(m, changed(shape=[-64, -1]))),
    "sides that overflow": ("corrupt_weights", lambda m: with_header(m, changed(shape=[1 << 62, 4]))),
    "nine dimensions": ("corrupt_weights", lambda m: with_header(m, changed(shape=[64, *[1] * 8]))),
    "offsets that are real numbers": ("corrupt_weights", lambda m: with_header(m, changed(data_offsets=[0.0, 128.0]))),
    "two tensors in one place": ("corrupt_weights", lambda m: with_header(m, overlapping)),
    "bytes between tensors": ("corrupt_weights", lambda m: with_header(m, without_norm)),
    "bytes after the tensors": ("corrupt_weights", lambda m: with_header(m, lambda h: h, more=b"\0" * 8)),
    "a tensor in two files": ("corrupt_weights", lambda m: shutil.copy(m / "model.safetensors", m / "b.safetensors")),
    "an index with the wrong file": ("missing_tensors", split_index),
    "weights that are a pipe": ("unsafe_path", lambda m: pipe(m / "model.safetensors")),
    "a config that is a pipe": ("unsafe_path", lambda m: pipe(m / "config.json")),
    "weights that are a folder": ("unsafe_path", lambda m: ((m / "model.safetensors").unlink(),
                                                            (m / "model.safetensors").mkdir())),
    "weights with another name elsewhere": ("unsafe_path", lambda m: os.link(m / "model.safetensors", m / "stolen")),
    "no heads": ("config_implausible", lambda m: edit(m / "config.json", num_attention_heads=0)),
    "heads that do not divide": ("config_implausible", lambda m: edit(m / "config.json", head_dim=None,
                                                                       num_attention_heads=7, num_key_value_heads=7)),
    "groups that do not divide": ("config_implausible", lambda m: edit(m / "config.json", num_key_value_heads=3)),
    "a width that no weight has": ("config_implausible", lambda m: edit(m / "config.json", hidden_size=68)),
    "more words than rows": ("config_implausible", lambda m: edit(m / "config.json", vocab_size=100_000)),
    "a number that is a text": ("config_implausible", lambda m: edit(m / "config.json", hidden_size="64")),
    "a number that is true": ("config_implausible", lambda m: edit(m / "config.json", num_key_value_heads=True)),
    "inside a text_config": ("config_implausible", lambda m: edit(m / "config.json", text_config={"hidden_size": -1})),
}  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", HOSTILE)
def test_it_is_refused(model: Path, case: str) -> None:
    code, harm = HOSTILE[case]
    read_local(model)
    harm(model)
    with pytest.raises(ModelError) as caught:
        read_local(model)
    assert caught.value.code == code


@pytest.mark.parametrize("field", LARGEST)
def test_every_number_has_a_limit(model: Path, field: str) -> None:
    for value in (LARGEST[field] + 1, 0, 1.5):
        edit(model / "config.json", **{field: value})
        with pytest.raises(ModelError, match=f"{field} is") as caught:
            read_folder(model)
        assert caught.value.code == "config_implausible"


def test_a_number_of_positions_may_have_a_decimal_point(model: Path) -> None:
    edit(model / "config.json", max_position_embeddings=1200.0)
    read_folder(model)
    for other in (1200.5, 1e10):
        edit(model / "config.json", max_position_embeddings=other)
        with pytest.raises(ModelError, match="max_position_embeddings is"):
            read_folder(model)


def test_a_list_with_one_value_a_layer_is_let_through(model: Path) -> None:
    edit(model / "config.json", intermediate_size=[128, 64, 128], num_key_value_heads=None)
    read_folder(model)


def test_a_confined_process_says_that_a_model_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may open no file that is not among those of its job, and a folder that is gone is not."""
    monkeypatch.setenv(VARIABLE, "{}")
    with pytest.raises(ModelError) as caught:
        read_model(tmp_path / "gone")
    assert caught.value.code == "model_not_found"
