"""A model's or a text's files lead elsewhere: by links, hard links, and by what takes their place later (part A)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.confinement import reach_of
from api.settings import Settings
from quantcore.errors import ModelError
from quantcore.sandbox import landlock
from quantcore.sandbox.opening import VARIABLE, folders_beside, identify, open_file, open_named
from tests.support.canary import Canary


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    watched = Canary(tmp_path / "data")
    yield watched
    watched.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    for folder in ("models/m", "models/texts", "data/work/job_1.1", "data/datasets"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    return Settings(
        database_url="postgresql+psycopg:///x", broker_url="memory://", data_dir=tmp_path / "data",
        model_roots=(tmp_path / "models",),
    )  # type: ignore[arg-type]  # fmt: skip


def make_leak(kind: str, model: Path, canary: Canary) -> Path:
    """Make a file of the model that is the canary, in one of the ways that a file can be another one."""
    file, beside = model / "LICENSE", model / "beside"
    if kind == "a hard link":
        os.link(canary.path, file)
    elif kind == "a link":
        file.symlink_to(canary.path)
    elif kind == "a link to a hard link beside it":
        os.link(canary.path, beside)
        file.symlink_to("beside")
    elif kind == "a link to a link":
        beside.symlink_to(canary.path)
        file.symlink_to("beside")
    else:
        blobs = model.parents[1] / "blobs"
        if kind == "a link to a hard link among the blobs":
            blobs.mkdir()
            os.link(canary.path, blobs / "hash")
        else:
            blobs.symlink_to(canary.path.parent)
        file.symlink_to(f"../../blobs/{'hash' if blobs.is_symlink() is False else canary.path.name}")
    return file


@pytest.mark.parametrize("kind", [
    "a hard link", "a link", "a link to a hard link beside it", "a link to a link",
    "a link to a hard link among the blobs", "a link to blobs that are a link",
])  # fmt: skip
def test_a_file_that_is_another_one_is_not_opened(kind: str, tmp_path: Path, canary: Canary) -> None:
    model = tmp_path / "models" / "models--x--y" / "snapshots" / "abc"
    model.mkdir(parents=True)
    with pytest.raises(ModelError) as caught:
        open_file(make_leak(kind, model, canary))
    assert caught.value.code == "unsafe_path" and not canary.was_opened()


def test_the_blobs_of_a_real_cache_are_opened(tmp_path: Path) -> None:
    """The test above refuses more than everything."""
    model = tmp_path / "models--x--y" / "snapshots" / "abc"
    model.mkdir(parents=True)
    (tmp_path / "models--x--y" / "blobs").mkdir()
    (tmp_path / "models--x--y" / "blobs" / "hash").write_text("mine")
    (model / "LICENSE").symlink_to("../../blobs/hash")
    with open_file(model / "LICENSE") as file:
        assert file.read() == b"mine"
    assert folders_beside(model)[0] == tmp_path / "models--x--y" / "blobs"


@pytest.mark.parametrize("swap", ["the file", "its folder", "a hard link"])
def test_a_text_that_is_swapped_after_the_check_is_not_read(
    swap: str, settings: Settings, canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check of its path and the start of the engine, and between that and its opening."""
    folder = settings.model_roots[0] / "texts"
    text = folder / canary.path.name
    text.write_text("mine")
    checked = settings.find_input(str(text), field="/calibration/source")
    task = {"calibration": {"source": str(checked)}}
    before = reach_of(settings, settings.work_dir / "job_1.1", task, with_hub=False)
    text.unlink()
    if swap == "the file":
        text.symlink_to(canary.path)
    elif swap == "a hard link":
        os.link(canary.path, text)
    else:
        folder.rename(folder.with_name("away"))
        folder.symlink_to(canary.path.parent)
    if swap != "a hard link":  # which the engine refuses, below
        with pytest.raises(ModelError) as refused:
            reach_of(settings, settings.work_dir / "job_1.1", task, with_hub=False)
        assert refused.value.code == "unsafe_path"
    monkeypatch.setenv(VARIABLE, before.environment()[VARIABLE])
    with pytest.raises(ModelError) as caught:
        open_named(text)
    assert caught.value.code == "unsafe_path" and not canary.was_opened()


def test_the_kernel_refuses_what_took_a_files_place(settings: Settings, canary: Canary) -> None:
    """The rules of Landlock are for the file that was checked; what has its name later is none of them."""
    if not landlock.abi():
        assert landlock.abi() == 0
        return
    text = settings.model_roots[0] / "texts" / "a.jsonl"
    text.write_text("mine")
    reach = reach_of(settings, settings.work_dir / "job_1.1", {"calibration": {"source": str(text)}}, with_hub=False)
    assert reach.files[text] == identify(text)
    canary.path.replace(text)
    with pytest.raises(OSError, match="no longer the file that was checked"):
        landlock._open_same(str(text), reach.files[text])


@pytest.mark.parametrize("name", ["data/secret.key", "data/work/job_2.1", "data", "elsewhere", "data/datasets", ""])
def test_no_rule_is_made_for_a_file_of_the_service(name: str, settings: Settings, tmp_path: Path) -> None:
    """Whatever a task says: its paths are checked once more where the rules are made; "" is the folder around all."""
    settings = settings.model_copy(update={"model_roots": (tmp_path,)}) if not name else settings
    with pytest.raises(ModelError) as caught:
        reach_of(settings, settings.work_dir / "job_1.1", {"model_dir": str(tmp_path / name)}, with_hub=False)
    assert caught.value.code == "path_not_allowed"
