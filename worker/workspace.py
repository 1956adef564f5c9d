"""The folders of a job: ``work/<job>.<fence>/`` for an attempt, ``artifacts/<job>/<manifest sha256>/`` for its result.

The attempt's folder carries the fence, so two attempts never share one. The artifact's folder carries its content's
hash, so a rename makes it visible whole, and a late worker can at worst add the very same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from api.settings import Settings
from api.store import manifest
from api.store.leases import Lease
from api.store.manifest import Manifest
from quantcore.errors import ProofError


class Workspace:
    """The files of one attempt."""

    def __init__(self, settings: Settings, lease: Lease) -> None:
        self._job_id = lease.job_id
        self._artifacts_dir = settings.artifacts_dir
        self.folder = settings.work_dir / f"{lease.job_id}.{lease.fence}"
        self.task_file = self.folder / "task.json"
        self.output_dir = self.folder / "output"

    def create(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True)
        self._artifacts_dir.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write_task(self, task: dict[str, Any]) -> None:
        self.task_file.write_text(json.dumps(task, indent=1))

    def publish(self) -> tuple[Path, Manifest]:
        """Check the engine's output against its manifest, make it durable, and move it to its final place.

        Raises ProofError ``artifact_corrupt``, or OSError (disk full). Nothing half-written is ever visible there.
        """
        output = manifest.read(self.output_dir)
        manifest.check(self.output_dir, output)
        _sync_tree(self.output_dir)
        final = self._artifacts_dir / self._job_id / output.sha256
        final.parent.mkdir(mode=0o700, exist_ok=True)
        if not _is_whole(final):
            self.output_dir.rename(final)
        _sync(final.parent)
        _sync(self._artifacts_dir)
        return final, output

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def list_attempts(settings: Settings) -> dict[Path, tuple[str, int]]:
    """The attempt folders on this disk: folder -> (job id, fence)."""
    found = {}
    for folder in settings.work_dir.glob("job_*.*"):
        job_id, _, fence = folder.name.rpartition(".")
        if fence.isdecimal():
            found[folder] = (job_id, int(fence))
    return found


def remove_all(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    """True if an earlier attempt already put the very same bytes there (it ended between its rename and its row).

    A damaged folder is moved aside, never deleted: only a row can tell whether somebody relies on it.
    """
    if not folder.exists():
        return False
    try:
        manifest.check(folder, manifest.read(folder))
    except ProofError:
        folder.rename(folder.with_name(f"{folder.name}.damaged.{time.time_ns()}"))
        return False
    return True


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
