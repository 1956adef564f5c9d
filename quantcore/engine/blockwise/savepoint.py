"""Savepoints, from which a stopped job continues at the last saved block: a folder that outlives the process.

It holds the artifact as far as it is written and, after each block (or every few: saving takes at most a twentieth of
the time), the hidden states of all streams and the notes of the writer. ``state.json`` names the newest of these; it is
replaced last, so a kill at any moment leaves the previous one. A job continues only if its fingerprint is the same
(task, model files and versions) and no file of states has changed since: each ends in the SHA-256 of the rest. The
names of files of states say which windows they hold, so that another number of ranks can read them. The folder also
holds results that are found once (``SavePoint.once``), and the state of what comes in steps (``SavePoint.keep``).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from quantcore.checkpoint.artifact import sync
from quantcore.checkpoint.folder import gguf_parts
from quantcore.config.task import Task
from quantcore.engine.runtime.ranks import Ranks

MIN_WORK_PER_SAVE = 20
"""Minimum time between two saves, as a multiple of the time that the last save took."""
STATE = "state.json"
RESULT_KEY = "found"
CHUNK_BYTES = 1 << 22
WEIGHTS = ("*.safetensors", "*.gguf")
REVISION = 2
"""Raised when the engine computes other states or ranges for the same task: 2 begins windows as texts begin."""

_PLACES: dict[str, Any] = {
    **dict.fromkeys(("output_dir", "resume_dir", "model_dir", "shard_blocks"), True),
    "adapter": {"folder"},
}
"""Fields of a task that say where and how it runs, and do not decide the bytes of its result."""

States = MutableSequence[torch.Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Stream:
    """Hidden states of one rank: the windows from number ``first`` on, or all on every rank (``is_shared``)."""

    states: States
    first: int = 0
    is_shared: bool = False


@dataclass
class SavePoint:
    """The savepoint of a job in ``folder``; if that is None, ``load`` finds nothing and ``save`` does nothing."""

    folder: Path | None
    fingerprint: str
    ranks: Ranks
    _saved_at: float = 0.0
    _took_s: float = 0.0

    @classmethod
    def of(cls, task: Task, ranks: Ranks) -> SavePoint:
        """Make the savepoint of ``task``, in its ``resume_dir``."""
        return cls(task.resume_dir, fingerprint(task) if task.resume_dir else "", ranks)

    @property
    def is_begun(self) -> bool:
        """True if the folder has a state, of this job or of another one."""
        return self.folder is not None and (self.folder / STATE).exists()

    def load(self) -> dict[str, Any] | None:
        """Return the notes of the newest state, with ``next_block``; None if there is none of this job.

        Remains of other jobs are removed.
        """
        if self.folder is None:
            return None
        notes = self._read() if self.ranks.is_first else None
        if self.ranks.is_first and notes is None:
            self._clear()
        return self.ranks.share(notes)

    def once(self, name: str, find: Callable[[], T]) -> T:
        """Return the JSON data of ``find`` on the first rank; in a continued job, the earlier data."""
        result: Any = None
        if self.ranks.is_first:
            path = self.folder and self.folder / f"{name}.json"
            result = self._read_once(path) if path else None
            if result is None:
                result = find()
                if path:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _replace(path, json.dumps({"fingerprint": self.fingerprint, RESULT_KEY: result}))
        shared: T = self.ranks.share(result)
        return shared

    def holds(self, notes: Mapping[str, Any], stream: str) -> bool:
        """Return whether the states of ``stream`` were saved with ``notes``."""
        return self.folder is not None and any((self.folder / notes["states"]).glob(f"{stream}.*"))

    def restore(self, notes: Mapping[str, Any], streams: Mapping[str, Stream]) -> None:
        """Put the saved states into ``streams``, which have states of the same shapes."""
        assert self.folder is not None
        for name, stream in streams.items():
            files = {int(path.suffix[1:]): path for path in (self.folder / notes["states"]).glob(f"{name}.*")}
            for place in range(len(stream.states)):
                window = stream.first + place
                first = max(start for start in files if start <= window)
                stream.states[place] = _read_state(files[first], window - first, stream.states[place])

    def save(self, next_block: int, streams: Mapping[str, Stream], notes: Callable[[], Mapping[str, Any]]) -> bool:
        """Save ``streams`` in front of ``next_block``, with the result of ``notes``, which also syncs the files.

        All ranks call ``notes``; the result on the first rank is saved. Does nothing, and returns False, if saving
        would take too much of the time.
        """
        began = time.monotonic()
        if self.folder is None or not self.ranks.share(self._pays(began)):
            return False
        states = f"states-{next_block}"
        if self.ranks.is_first:
            shutil.rmtree(self.folder / states, ignore_errors=True)
            (self.folder / states).mkdir()
        self.ranks.wait()
        for name, stream in streams.items():
            if len(stream.states) and (self.ranks.is_first or not stream.is_shared):
                dtype = str(stream.states[0].dtype).removeprefix("torch.")
                _write_states(self.folder / states / f"{name}.{dtype}.{stream.first}", stream.states)
        notes_of_job = notes()
        self.ranks.wait()
        if self.ranks.is_first:
            content = {"fingerprint": self.fingerprint, "next_block": next_block, "states": states, **notes_of_job}
            _replace(self.folder / STATE, json.dumps(content))
            for old in self.folder.glob("states-*"):
                if old.name != states:
                    shutil.rmtree(old)
        self._note_save(began)
        return True

    def keep(self, name: str, step: int, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the state of ``name`` after its ``step``, unless that would take too much of the time. For one rank."""
        began = time.monotonic()
        if self.folder is None or not self._pays(began):
            return
        new = self.folder / f"{name}.new"
        _write_states(new, tensors)
        new.replace(self.folder / f"{name}.{step}")
        sync(self.folder)
        for old, path in self._steps(name).items():
            if old != step:
                path.unlink()
        self._note_save(began)

    def kept(self, name: str, tensors: Sequence[torch.Tensor]) -> int:
        """Read what ``keep`` kept of ``name`` into ``tensors``; return its step, 0 if there is nothing undamaged."""
        for step, path in sorted(self._steps(name).items(), reverse=True):
            if _is_whole(path):
                _read_into(tensors, path)
                return step
        return 0

    def _steps(self, name: str) -> dict[int, Path]:
        files = () if self.folder is None else self.folder.glob(f"{name}.*")
        return {int(step): path for path in files if (step := path.suffix[1:]).isdecimal()}

    def _pays(self, now: float) -> bool:
        return now - self._saved_at >= MIN_WORK_PER_SAVE * self._took_s

    def _note_save(self, began: float) -> None:
        self._saved_at = time.monotonic()
        self._took_s = self._saved_at - began

    def _read(self) -> dict[str, Any] | None:
        assert self.folder is not None
        notes = self._read_own(self.folder / STATE)
        if notes is None:
            return None
        return notes if all(map(_is_whole, (self.folder / notes["states"]).iterdir())) else None

    def _read_own(self, path: Path) -> dict[str, Any] | None:
        """Return the content of a file of this job; None for any other file."""
        try:
            notes = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return notes if isinstance(notes, dict) and notes.get("fingerprint") == self.fingerprint else None

    def _read_once(self, path: Path) -> Any:
        return (self._read_own(path) or {}).get(RESULT_KEY)

    def _clear(self) -> None:
        """Remove everything except the results of ``once`` for this job."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif self._read_once(path) is None:
                path.unlink()


def fingerprint(task: Task) -> str:
    """Hash everything that decides the bytes of the result, of the files that it names their sizes and times."""
    model = task.model_folder
    sources = [*(part.source for part in task.calibration.parts), task.evaluation.source, task.evaluation.prompts]
    texts = [Path(source) for source in (*sources, task.config.imatrix) if source is not None]
    weights = [path for pattern in WEIGHTS for path in sorted(model.glob(pattern))]
    files = [*(gguf_parts(model) if model.is_file() else [model / "config.json"]), *weights, *texts]
    parts = {
        "task": task.model_dump(mode="json", exclude=_PLACES),
        "files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.exists()],
        "revision": REVISION,
        "versions": {name: version(name) for name in ("bitfoundry", "torch", "transformers")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _write_states(path: Path, states: Sequence[torch.Tensor]) -> None:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for state in states:
            content = state.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(content)
            file.write(content)
        file.write(digest.digest())
        file.flush()
        os.fsync(file.fileno())


def _is_whole(path: Path) -> bool:
    """Return whether a file of states is undamaged. Damage would otherwise show only in the result's quality."""
    digest = hashlib.sha256()
    left = path.stat().st_size - digest.digest_size
    with path.open("rb") as file:
        while left > 0 and (chunk := file.read(min(left, CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
        return left == 0 and file.read() == digest.digest()


def _read_state(path: Path, number: int, like: torch.Tensor) -> torch.Tensor:
    """Read state ``number`` of a file, with the shape of ``like`` and the dtype in the file's name."""
    dtype: torch.dtype = getattr(torch, path.suffixes[-2][1:])
    content = torch.empty(like.shape, dtype=dtype)
    _read_into([content], path, number * content.nbytes)
    return content.to(like.device)


def _read_into(tensors: Sequence[torch.Tensor], path: Path, start: int = 0) -> None:
    """Read what follows byte ``start`` of a file into ``tensors``, one after the other."""
    with path.open("rb") as file:
        file.seek(start)
        for tensor in tensors:
            content = torch.empty(tensor.shape, dtype=tensor.dtype)
            if file.readinto(content.reshape(-1).view(torch.uint8).numpy().data) != content.nbytes:
                raise OSError(f"{path} ends early")
            tensor.copy_(content)


def _replace(path: Path, text: str) -> None:
    """Replace a file as a whole or not at all; it is on the disk when this returns."""
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync(path.parent)
