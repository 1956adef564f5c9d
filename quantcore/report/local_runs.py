"""The runs of this user's command line: an index of their results, so that each has an id and a name. No torch.

``runs.jsonl`` in the data folder has one run per line, the newest last. It is replaced as a whole, under a lock, so
that commands may end at the same time. Runs whose folder was removed are never shown, and dropped when the next one is
recorded.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from quantcore.checkpoint.artifact import MANIFEST
from quantcore.report.quality import Record
from quantcore.report.values import Report

MIN_PREFIX = 3
"""Characters of an id's start that name a run."""


class LocalRun(Record):
    """A result on this machine: its ``folder``, the model and the config that made it, its size and its verdict.

    ``command`` are the words of the command line that made it, given in the folder ``working_dir``.
    """

    id: str
    created_at: str
    folder: str
    model: str
    config: str
    size_bytes: int
    verdict: str | None
    command: tuple[str, ...] = ()
    working_dir: str = ""

    @property
    def name(self) -> str:
        return Path(self.folder).name

    def is_called(self, name: str) -> bool:
        """Return True for its id, the start of its id, and its name."""
        start = name.removeprefix("run_")
        is_start = len(start) >= MIN_PREFIX and self.id.removeprefix("run_").startswith(start)
        return is_start or name == self.name


def data_dir() -> Path:
    """Return the user's data folder: $BITFOUNDRY_HOME, else bitfoundry below $XDG_DATA_HOME or ~/.local/share."""
    if home := os.environ.get("BITFOUNDRY_HOME"):
        return Path(home).expanduser().absolute()
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser().absolute() / "bitfoundry"


def record(folder: Path, report: Report, config: str, command: Sequence[str] = ()) -> LocalRun:
    """Add the result in ``folder`` to the index. Raises OSError if that cannot be written."""
    verdict = report.summary.verdict
    run = LocalRun(
        id=f"run_{uuid.uuid4().hex}",
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        folder=str(folder.absolute()),
        model=report.model.path or str(report.model.id),
        config=config,
        size_bytes=report.summary.size_after_bytes,
        verdict=None if verdict is None else verdict.level,
        command=tuple(command),
        working_dir=str(Path.cwd()),
    )
    path = _index()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        kept = [other for other in _read() if other.folder != run.folder]
        new = path.with_suffix(".new")
        new.write_text("".join(json.dumps(each.to_dict()) + "\n" for each in (*kept, run)), "utf-8")
        new.replace(path)
    return run


def runs() -> list[LocalRun]:
    """Return the runs whose results are still there, the newest first."""
    return _read()[::-1]


def find(name: str) -> list[LocalRun]:
    """Return the runs with this id, start of an id, or name, the newest first; of `last` the newest one."""
    if name == "last":
        return runs()[:1]
    return [run for run in runs() if run.is_called(name)]


def of_folder(folder: Path) -> LocalRun | None:
    """Return the run whose result lies in ``folder``; None if it was not made by a command here."""
    return next((run for run in _read() if run.folder == str(folder.absolute())), None)


def _index() -> Path:
    return data_dir() / "runs.jsonl"


def _read() -> list[LocalRun]:
    """Return the runs of the index whose folders hold a sealed result, the newest last."""
    try:
        lines = _index().read_text("utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValidationError):  # of another version, or damaged
            found.append(LocalRun.model_validate_json(line))
    return [run for run in found if (Path(run.folder) / MANIFEST).is_file()]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        with suppress(ImportError):  # Windows, where two commands that end at once may lose a line
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
