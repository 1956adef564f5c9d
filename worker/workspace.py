"""The folders of a job: ``work/<job>.<fence>/`` for an attempt, ``artifacts/<job>/<manifest sha256>/`` for its result.

The attempt's folder carries the fence, so two attempts never share one. The artifact's folder carries its content's
hash, so a rename makes it visible whole, and a late worker can at worst add the very same bytes.

What the engine needs to go on after a stop is in ``resume`` in the attempt's folder. Between two attempts it is
``work/<job>.resume``; the next attempt on this disk takes it with a rename, so that an engine of the one before, should
it still run, loses its way to it.
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from api.settings import Settings
from api.store import manifest
from api.store.manifest import Manifest
from api.store.queue.leases import Lease
from api.store.queue.seats import SeatLease
from quantcore.checkpoint.artifact import sync
from quantcore.errors import ProofError

RESUME = "resume"


class Workspace:
    """The files of one attempt, for its leader and its other nodes."""

    def __init__(self, settings: Settings, lease: Lease | SeatLease) -> None:
        self._job_id = lease.job_id
        self._artifacts_dir = settings.artifacts_dir
        self.folder = settings.work_dir / f"{lease.job_id}.{lease.fence}"
        self.task_file = self.folder / "task.json"
        self.output_dir = self.folder / "output"
        self.resume_dir = self.folder / RESUME
        self._between = settings.work_dir / f"{lease.job_id}.{RESUME}"

    def create(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True)
        self._artifacts_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        earlier = self._between.parent.glob(f"{self._job_id}.*/{RESUME}")  # of attempts that were killed
        for found in (self._between, *sorted(earlier, key=_fence_of, reverse=True)):
            with suppress(OSError):  # not there, or gone in this moment
                found.rename(self.resume_dir)
                return

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
        sync(final.parent)
        sync(self._artifacts_dir)
        return final, output

    def keep_rejected(self) -> Path | None:
        """Move an artifact that missed a limit beside the job's artifacts: nobody is handed it, and it goes with the
        job. None if there is none that is whole."""
        rejected = self.output_dir.with_name(f"{self.output_dir.name}.rejected")
        try:
            found = manifest.read(rejected)
            manifest.check(rejected, found)
        except ProofError:
            return None
        final = self._artifacts_dir / self._job_id / f"rejected-{found.sha256}"
        final.parent.mkdir(mode=0o700, exist_ok=True)
        if not final.exists():
            rejected.rename(final)
        sync(final.parent)
        return final

    def remove(self, *, may_go_on: bool = False) -> None:
        """Also what the engine needs to go on, unless another attempt may."""
        if may_go_on:
            _keep(self.resume_dir, self._between)
        shutil.rmtree(self.folder, ignore_errors=True)


def list_attempts(settings: Settings) -> dict[Path, tuple[str, int]]:
    """The attempt folders on this disk: folder -> (job id, fence)."""
    found = {}
    for folder in settings.work_dir.glob("job_*.*"):
        job_id, _, fence = folder.name.rpartition(".")
        if fence.isdecimal():
            found[folder] = (job_id, int(fence))
    return found


def list_between_attempts(settings: Settings) -> dict[Path, str]:
    """What waits for a next attempt: folder -> job id."""
    return {folder: folder.name.removesuffix(f".{RESUME}") for folder in settings.work_dir.glob(f"job_*.{RESUME}")}


def remove_attempt(folder: Path, *, may_go_on: bool) -> None:
    """As ``Workspace.remove``, for one whose worker was killed. What the engine needs to go on stays in the folder:
    the next attempt looks for it there, perhaps in this moment."""
    if not may_go_on:
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(OSError):  # gone, or not empty because of what stays
        for path in folder.iterdir():
            if path.name == RESUME:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        folder.rmdir()


def _keep(resume_dir: Path, between: Path) -> None:
    with suppress(OSError):  # nothing there, or a later attempt's is
        resume_dir.rename(between)


def _fence_of(resume_dir: Path) -> int:
    fence = resume_dir.parent.name.rpartition(".")[2]
    return int(fence) if fence.isdecimal() else -1


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
        sync(path)
    sync(folder)
