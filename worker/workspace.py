"""The folders of a job: ``work/<job>.<fence>/`` for an attempt, ``artifacts/<job>/<manifest sha256>/`` for its result.

The attempt's folder carries the fence, so two attempts never share one. The artifact's folder carries its content's
hash, so a rename makes it visible whole, and a late worker can at worst add the very same bytes.

The files from which the engine resumes are in ``resume`` in the attempt's folder. Between two attempts they are in
``work/<job>.resume``. The next attempt on this disk takes them with a rename, so that an engine of the previous
attempt, if it still runs, loses its access.

The copy of a model in an object store is in ``work/<job>.model``, beside the folders of all attempts: it is made by a
process that has the store's keys, and no engine can write there.

An engine on a scheduler's nodes has a second folder, ``work/<job>.<fence>.launch``, in which it cannot write. Such an
engine outlives its worker: the next attempt goes on with both folders as they are.
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
from api.store.queue.node_slots import NodeSlotLease
from quantcore.checkpoint.artifact import sync
from quantcore.errors import ProofError
from worker.shared_files import STATE

RESUME, LAUNCH = "resume", "launch"


class Workspace:
    """The files of one attempt, for its leader and its other nodes."""

    def __init__(self, settings: Settings, lease: Lease | NodeSlotLease) -> None:
        self._job_id = lease.job_id
        self._artifacts_dir = settings.artifacts_dir
        self._use(settings.work_dir / f"{lease.job_id}.{lease.fence}")
        self._between = settings.work_dir / f"{lease.job_id}.{RESUME}"
        self.copy_dir = settings.copy_dir(lease.job_id)

    def _use(self, folder: Path) -> None:
        self.folder = folder
        self.launch_dir = launch_dir(folder)
        self.task_file = self.folder / "task.json"
        self.output_dir = self.folder / "output"
        self.resume_dir = self.folder / RESUME

    def take_over(self) -> bool:
        """Use the folders of an earlier attempt whose engine a scheduler may still run. Returns False if none is there.

        They keep their names: the engine knows them.
        """
        launches = self._between.parent.glob(f"{self._job_id}.*.{LAUNCH}")
        folders = [launch.with_name(launch.name.removesuffix(f".{LAUNCH}")) for launch in launches if _is_begun(launch)]
        if not folders:
            return False
        self._use(max(folders, key=lambda folder: _fence_of(folder / RESUME)))
        return True

    def create(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True)
        self._artifacts_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        earlier = self._between.parent.glob(f"{self._job_id}.*/{RESUME}")  # of attempts that were killed
        for resume_dir in (self._between, *sorted(earlier, key=_fence_of, reverse=True)):
            with suppress(OSError):  # not there, or gone in this moment
                resume_dir.rename(self.resume_dir)
                return

    def write_task(self, task: dict[str, Any]) -> None:
        self.task_file.write_text(json.dumps(task, indent=1))

    def publish(self) -> tuple[Path, Manifest]:
        """Check the engine's output against its manifest, make it durable, and move it to its final place.

        Raises ProofError ``artifact_corrupt``, or OSError (disk full). A partial artifact is never visible there.
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
        """Move an artifact that missed a limit next to the job's artifacts, where it is deleted with the job.

        Clients cannot fetch it. Returns None if there is no complete one.
        """
        rejected = self.output_dir.with_name(f"{self.output_dir.name}.rejected")
        try:
            artifact = manifest.read(rejected)
            manifest.check(rejected, artifact)
        except ProofError:
            return None
        final = self._artifacts_dir / self._job_id / f"rejected-{artifact.sha256}"
        final.parent.mkdir(mode=0o700, exist_ok=True)
        if not final.exists():
            rejected.rename(final)
        sync(final.parent)
        return final

    def remove(self, *, may_go_on: bool = False) -> None:
        """Delete the attempt's folder. Keeps the resume files and the model for another attempt if ``may_go_on``."""
        if may_go_on:
            _keep(self.resume_dir, self._between)
        else:
            shutil.rmtree(self.copy_dir, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.launch_dir, ignore_errors=True)


def launch_dir(folder: Path) -> Path:
    """Return the folder of the launch that belongs to an attempt's folder."""
    return folder.with_name(f"{folder.name}.{LAUNCH}")


def list_launches(settings: Settings) -> dict[Path, str]:
    """Return the folders on this disk of engines that a scheduler runs: folder of the attempt -> job id."""
    names = {path: path.name.removesuffix(f".{LAUNCH}") for path in settings.work_dir.glob(f"job_*.{LAUNCH}")}
    return {path.with_name(name): name.rpartition(".")[0] for path, name in names.items()}


def list_attempts(settings: Settings) -> dict[Path, tuple[str, int]]:
    """Return the attempt folders on this disk: folder -> (job id, fence)."""
    return _fenced(settings, "job_*.*")


def chat_folder(settings: Settings, chat_id: str, fence: int) -> Path:
    """Return the folder for the task and the temporary files of a chat."""
    return settings.work_dir / f"{chat_id}.{fence}"


def list_chats(settings: Settings) -> dict[Path, tuple[str, int]]:
    """Return the folders of chats on this disk: folder -> (chat id, fence)."""
    return _fenced(settings, "chat_*.*")


def _fenced(settings: Settings, pattern: str) -> dict[Path, tuple[str, int]]:
    found = {}
    for folder in settings.work_dir.glob(pattern):
        name, _, fence = folder.name.rpartition(".")
        if fence.isdecimal():
            found[folder] = (name, int(fence))
    return found


def list_between_attempts(settings: Settings) -> dict[Path, str]:
    """Return the resume folders and the models that a next attempt may take: folder -> job id."""
    patterns = (f"job_*.{RESUME}", settings.copy_dir("job_*").name)
    return {folder: folder.stem for pattern in patterns for folder in settings.work_dir.glob(pattern)}


def remove_attempt(folder: Path, *, may_go_on: bool) -> None:
    """Delete an attempt's folder whose worker was killed, as ``Workspace.remove`` does.

    The resume files stay in the folder: the next attempt looks for them there, perhaps at this moment.
    """
    if not may_go_on:
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(OSError):  # gone, or not empty because the resume files stay
        for path in folder.iterdir():
            if path.name == RESUME:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        folder.rmdir()


def _is_begun(launch_dir: Path) -> bool:
    """Return whether all files of a launch were written."""
    return (launch_dir / STATE).exists()


def _keep(resume_dir: Path, between: Path) -> None:
    with suppress(OSError):  # no such folder, or a later attempt's is in its place
        resume_dir.rename(between)


def _fence_of(resume_dir: Path) -> int:
    fence = resume_dir.parent.name.rpartition(".")[2]
    return int(fence) if fence.isdecimal() else -1


def _is_whole(folder: Path) -> bool:
    """Return True if an earlier attempt already put the very same bytes there.

    Such an attempt ended between its rename and its row. A damaged folder is moved aside, never deleted: only a row can
    tell whether it is in use.
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
