"""Publishes an artifact as a folder behind an fsspec URL: file://, s3://, gs:// and others with a package for them.

Such stores rename nothing, so MANIFEST.json is written last: a folder that has it is complete. While files are being
written, a note (``NOTE``) lies in its place that marks the folder as ours.
"""

from __future__ import annotations

import hashlib
from typing import Any

from quantcore.errors import ProofError, PublishError
from quantcore.events import Emit, PhaseStarted, Published
from quantcore.hub.local_folder import LocalFolder
from quantcore.hub.push_errors import storage_explained
from quantcore.hub.push_progress import ByteProgress
from quantcore.hub.push_task import MANIFEST, ManifestFile, PublishTask, digest, listed
from quantcore.sandbox.opening import open_file

NOTE = "MANIFEST.json.partial"
CHUNK_BYTES = 4 << 20


def store(task: PublishTask, emit: Emit) -> Published:
    """Copy the artifact to the folder ``task.target.to``.

    Raises ProofError ``artifact_corrupt``, and PublishError ``target_*``. A folder with other contents is not touched,
    nor one with another artifact unless ``task.target.replace``.
    """
    url = task.target.to
    assert url is not None
    emit(PhaseStarted("publish"))
    manifest = task.manifest()
    with storage_explained(url):
        files, folder = _open_store(url)
        present = _present(files, folder)
        before = _read(files, f"{folder}/{MANIFEST}") if MANIFEST in present else b""
        if before == manifest and all(present.get(file.path) == file.size for file in task.files):
            return Published(digest(manifest), url, is_new=False, num_bytes=0)
        if present and not listed(before) and NOTE not in present:
            raise PublishError(
                f"{url} is not empty and does not contain an artifact.",
                code="target_occupied",
                hint="Use a new or empty folder, or one that an artifact was published to.",
            )
        is_own_try = NOTE in present and _read(files, f"{folder}/{NOTE}") == manifest
        if present and not is_own_try and not task.target.replace:
            raise PublishError(
                f"{url} contains another artifact.",
                code="target_occupied",
                hint="Use another folder, or replace its contents with --replace (replace: true).",
            )
        _write(files, f"{folder}/{NOTE}", manifest)
        if before:
            files.rm_file(f"{folder}/{MANIFEST}")
        progress = ByteProgress(sum(file.size for file in task.files) + len(manifest), emit)
        for file in task.files:
            _copy(files, folder, file, task, progress)
        for path in listed(before).keys() & present.keys() - {file.path for file in task.files}:
            files.rm_file(f"{folder}/{path}")
        _write(files, f"{folder}/{MANIFEST}", manifest)
        files.rm_file(f"{folder}/{NOTE}")
        progress.finish({MANIFEST: len(manifest)})
    return Published(digest(manifest), url, is_new=True, num_bytes=progress.total)


def _open_store(url: str) -> tuple[Any, str]:
    """Return the store behind the URL, and the folder's path in it. A folder on this machine is entered by no link."""
    if url.startswith("file://"):
        return LocalFolder(), url.removeprefix("file://").rstrip("/")
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    files, folder = url_to_fs(url)
    return files, str(folder).rstrip("/")


def _present(files: Any, folder: str) -> dict[str, int]:
    """Return path below the folder -> size. Bypasses the cache: other processes write there, too."""
    files.invalidate_cache()
    entries = files.find(folder, detail=True) if files.isdir(folder) else {}
    return {path.removeprefix(folder).lstrip("/"): int(entry["size"] or 0) for path, entry in entries.items()}


def _read(files: Any, path: str) -> bytes:
    return bytes(files.cat_file(path))


def _write(files: Any, path: str, data: bytes) -> None:
    files.makedirs(path.rpartition("/")[0], exist_ok=True)
    files.pipe_file(path, data)


def _copy(files: Any, folder: str, file: ManifestFile, task: PublishTask, progress: ByteProgress) -> None:
    """Copy one file and check the hash of the copied bytes."""
    target = f"{folder}/{file.path}"
    files.makedirs(target.rpartition("/")[0], exist_ok=True)
    hashed = hashlib.sha256()
    with open_file(task.folder / file.path, root=task.folder) as source, files.open(target, "wb") as out:
        while part := source.read(CHUNK_BYTES):
            out.write(part)
            hashed.update(part)
            progress.reach(file.path, source.tell())
    if hashed.hexdigest() != file.sha256:
        raise ProofError(
            f"The artifact is damaged: '{file.path}' has changed since it was written.",
            code="artifact_corrupt",
            hint="Do not use it; run the job again.",
        )
    if files.size(target) != file.size:
        raise PublishError(f"{target} did not arrive completely.", code="target_unreachable", retryable=True)
