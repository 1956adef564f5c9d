"""What a model folder may not do: hand out what lies outside it, stand in the way, or change while it is read."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantcore.checkpoint.side_files import copy_side_files
from quantcore.data.files import read_rows
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.errors import ModelError, QuantError
from quantcore.importing.model import read_model
from quantcore.plan.inspection import inspect
from tests.support.models import tiny_model

SECRET = "the key that seals every secret"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("good"))


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    (tmp_path / "secret.key").write_text(SECRET)
    (tmp_path / "artifact").mkdir()
    (tmp_path / "neighbour").mkdir()
    (tmp_path / "neighbour" / "template.jinja").write_text(SECRET)
    return shutil.copytree(good, tmp_path / "model")


def link(name: str, target: str) -> Callable[[Path], object]:
    def make(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(target.format(model=model))

    return make


def swap_for_pipe(model: Path) -> None:
    (model / "LICENSE").unlink(missing_ok=True)
    os.mkfifo(model / "LICENSE")


def grow(name: str) -> Callable[[Path], object]:
    def make(model: Path) -> None:
        with (model / name).open("wb") as file:
            file.truncate(1 << 40)  # a hole: no disk is taken

    return make


def lead_a_step_outside(model: Path) -> None:
    (model.parent / "neighbour" / "config.json").write_text(SECRET)
    (model / "modules.json").write_text('[{"path": "1_Pooling", "type": "models.Pooling"}]')
    (model / "1_Pooling").symlink_to("../neighbour")


HOSTILE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a licence that is the sealing key": ("unsafe_path", link("LICENSE", "{model}/../secret.key")),
    "a licence that is the environment": ("unsafe_path", link("LICENSE", "/proc/self/environ")),
    "a relative link": ("unsafe_path", link("generation_config.json", "../secret.key")),
    "a template of a neighbour": ("unsafe_path", link("chat.jinja", "../neighbour/template.jinja")),
    "a link to a link": ("unsafe_path", lambda m: (link("inner.txt", "../secret.key")(m),
                                                   link("LICENSE.txt", "inner.txt")(m))),
    "a step of sentence-transformers": ("unsafe_path", lead_a_step_outside),
    "a link to itself": ("unsafe_path", link("LICENSE", "LICENSE")),
    "a device": ("unsafe_path", link("LICENSE", "/dev/zero")),
    "a pipe": ("unsafe_path", swap_for_pipe),
    "another name of the key": ("unsafe_path", lambda m: os.link(m.parent / "secret.key", m / "LICENSE")),
    "a licence of a terabyte": ("file_too_large", grow("LICENSE")),
    "a tokenizer of a terabyte": ("file_too_large", grow("tokenizer.json")),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_outside_travels_with_a_model(model: Path, case: str) -> None:
    code, harm = HOSTILE[case]
    read_model(model)
    harm(model)
    for use in (read_model, lambda folder: copy_side_files(folder, model.parent / "artifact")):
        with pytest.raises(ModelError) as caught:
            use(model)
        assert caught.value.code == code, use
    assert not [path for path in (model.parent / "artifact").rglob("*.*") if SECRET in path.read_text()]


def test_links_that_stay_are_followed(model: Path) -> None:
    (model / "terms").write_text("free")
    (model / "LICENSE").symlink_to("terms")
    read_model(model)
    assert "LICENSE" in copy_side_files(model, model.parent / "artifact")
    assert (model.parent / "artifact" / "LICENSE").read_text() == "free"
    assert not (model.parent / "artifact" / "LICENSE").is_symlink()


def test_a_snapshot_of_the_hub_links_to_its_blobs(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (cache / "blobs" / "step").write_text('{"pooling_mode": "cls"}')
    (snapshot / "1_Pooling").mkdir()
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/step")
    (snapshot / "modules.json").write_text('[{"path": "1_Pooling", "type": "models.Pooling"}]')
    assert read_model(snapshot).headers.tensors
    assert inspect(snapshot).num_blocks == 3
    assert load_tokenizer(snapshot).vocab_size
    assert {"tokenizer.json", "1_Pooling/config.json"} <= set(copy_side_files(snapshot, tmp_path / "artifact"))
    (snapshot / "LICENSE").symlink_to("../../../../secret.key")
    with pytest.raises(ModelError, match="leaves"):
        copy_side_files(snapshot, tmp_path / "artifact")


def test_where_a_person_points_may_be_a_link(model: Path, tmp_path: Path) -> None:
    (tmp_path / "shortcut").symlink_to(model)
    assert read_model(tmp_path / "shortcut").headers.tensors
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "text.jsonl").symlink_to("rows.jsonl")
    assert len(list(read_rows(tmp_path / "text.jsonl"))) == 1


def test_the_tokenizer_reads_what_was_checked(model: Path, tmp_path: Path) -> None:
    """Files that its config names elsewhere are not opened, and a link is refused before the library sees it."""
    shutil.copy(model / "tokenizer.json", tmp_path / "stolen.json")
    config = json.loads((model / "tokenizer_config.json").read_text())
    stolen = {"tokenizer_file": str(tmp_path / "stolen.json"), "vocab_file": str(tmp_path / "secret.key")}
    (model / "tokenizer_config.json").write_text(json.dumps(config | stolen))
    assert load_tokenizer(model).vocab_size
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to(tmp_path / "stolen.json")
    with pytest.raises(ModelError) as caught:
        load_tokenizer(model)
    assert caught.value.code == "unsafe_path"


@pytest.mark.parametrize("harm", ["pipe", "device", "long", "loop", "NUL"])
@pytest.mark.timeout(20)
def test_a_data_file_that_is_none(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "rows.jsonl"
    if harm == "pipe":
        os.mkfifo(path)
    elif harm == "device":
        path.symlink_to("/dev/zero")
    elif harm == "loop":
        path.symlink_to(path)
    elif harm == "long":
        path = tmp_path / f"{'n' * 300}.jsonl"
    else:
        path = tmp_path / "a\0b.jsonl"
    with pytest.raises(QuantError) as caught:
        list(read_rows(path))
    assert caught.value.code in ("unsafe_path", "path_not_allowed")
