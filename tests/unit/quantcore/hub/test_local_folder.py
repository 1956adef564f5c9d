"""A folder that an artifact is published to: no link is followed, wherever it is put and whenever."""

import os
from pathlib import Path
from typing import Any

import pytest

from quantcore.errors import PublishError
from quantcore.hub import storage
from quantcore.hub.push_task import PublishTask
from quantcore.hub.storage import store
from quantcore.hub.target import Target
from tests.support.publishing import make_task, silence

PRECIOUS = b"not to be written"


def to(folder: Path, task: PublishTask) -> PublishTask:
    return task.model_copy(update={"target": Target(to=f"file://{folder}", replace=True)})


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that nothing may be written to, with a file that must stay as it is."""
    folder = tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    for name in ("model.safetensors", "config.json", "MANIFEST.json", "sub/report.json"):
        (folder / name).write_bytes(PRECIOUS)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("place", ["out", "out/sub", "out/MANIFEST.json", "."])
def test_a_link_is_refused(place: str, outside: Path, tmp_path: Path) -> None:
    """The folder itself, one in it, a file in it, and one on the way to it."""
    task = make_task(tmp_path / "a")
    published = tmp_path / "published"
    link = published / place if place != "." else published
    if place == ".":
        published.symlink_to(outside, target_is_directory=True)
    else:
        link.parent.mkdir(parents=True)
        link.symlink_to(outside / Path(place).relative_to("out"), target_is_directory=place != "out/MANIFEST.json")
    before = contents(outside)
    with pytest.raises(PublishError) as refused:
        store(to(published / "out", task), silence)
    assert refused.value.code in ("target_not_allowed", "target_occupied")
    assert contents(outside) == before


@pytest.mark.parametrize("make", [os.link, os.symlink])
def test_what_a_link_to_a_file_leads_to_is_not_written(make: Any, outside: Path, tmp_path: Path) -> None:
    """A file that shall be replaced has another name elsewhere: it is removed here, and a new one is made."""
    task, out = make_task(tmp_path / "a"), tmp_path / "out"
    store(to(out, task), silence)
    (out / "config.json").unlink()
    make(outside / "config.json", out / "config.json")
    store(to(out, task), silence)
    assert (outside / "config.json").read_bytes() == PRECIOUS
    assert not (out / "config.json").is_symlink() and (out / "config.json").read_bytes() == b'{"a": 1}'


def test_a_folder_that_becomes_a_link_meanwhile(outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two files: the rest goes nowhere."""
    task, out = make_task(tmp_path / "a"), tmp_path / "out"
    copy: Any = storage._copy

    def swap(*given: Any) -> None:
        copy(*given)
        if not out.is_symlink():
            out.rename(tmp_path / "moved")
            out.symlink_to(outside, target_is_directory=True)

    monkeypatch.setattr(storage, "_copy", swap)
    before = contents(outside)
    with pytest.raises(PublishError) as refused:
        store(to(out, task), silence)
    assert refused.value.code == "target_not_allowed"
    assert contents(outside) == before
