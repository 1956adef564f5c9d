"""The end of an allocation that nobody follows any more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from worker import allocation
from worker.launchers import Launcher
from worker.shared_files import STATE


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("reads", ["before", "between"])
def test_a_run_may_tidy_up_at_the_same_time(reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder goes between two reads: the allocation has ended, and nothing is cancelled."""
    folder = tmp_path / "job.1.launch"
    folder.mkdir()
    (folder / STATE).write_text(json.dumps({"id": None}))
    read: Callable[..., str] = Path.read_text

    def read_late(path: Path, *arguments: Any) -> str:
        if reads == "before" or path.name != STATE:
            remove(folder)  # as the run does when it ends
        return read(path, *arguments)

    monkeypatch.setattr(Path, "read_text", read_late)
    assert allocation.end(cast(Launcher, SimpleNamespace(find=None)), folder)
