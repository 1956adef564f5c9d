"""Publishes an artifact as a folder at a URL: on this machine (file://) or in an object store (s3://, gs://, az://).

Such stores rename nothing, so MANIFEST.json is written last: a folder that has it is complete. While files are being
written, a note (``NOTE``) lies in its place that marks the folder as ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from quantcore.errors import ProofError, PublishError
from quantcore.events import Emit, PhaseStarted, Published
from quantcore.hub.local_folder import LocalFolder
from quantcore.hub.push_errors import storage_explained
from quantcore.hub.push_progress import ByteProgress
from quantcore.hub.push_task import MANIFEST, ManifestFile, PublishTask, digest, listed
from quantcore.hub.target_folder import TargetFolder
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
        folder = _open(url)
        present = folder.present()
        before = folder.read(MANIFEST) if MANIFEST in present else b""
        if before == manifest and all(present.get(file.path) == file.size for file in task.files):
            return Published(digest(manifest), url, is_new=False, num_bytes=0)
        if present and not listed(before) and NOTE not in present:
            raise PublishError(
                f"{url} is not empty and does not contain an artifact.",
                code="target_occupied",
                hint="Use a new or empty folder, or one that an artifact was published to.",
            )
        is_own_try = NOTE in present and folder.read(NOTE) == manifest
        if present and not is_own_try and not task.target.replace:
            raise PublishError(
                f"{url} contains another artifact.",
                code="target_occupied",
                hint="Use another folder, or replace its contents with --replace (replace: true).",
            )
        folder.write(NOTE, [manifest])
        if before:
            folder.remove(MANIFEST)
        progress = ByteProgress(sum(file.size for file in task.files) + len(manifest), emit)
        for file in task.files:
            _copy(folder, file, task, progress)
        for path in listed(before).keys() & present.keys() - {file.path for file in task.files}:
            folder.remove(path)
        folder.write(MANIFEST, [manifest])
        folder.remove(NOTE)
        progress.finish({MANIFEST: len(manifest)})
    return Published(digest(manifest), url, is_new=True, num_bytes=progress.total)


def _open(url: str) -> TargetFolder:
    """Return the folder at the URL. A folder on this machine is entered by no link."""
    if url.startswith("file://"):
        return LocalFolder(url.removeprefix("file://").rstrip("/"))

    from quantcore.hub.store_folder import StoreFolder

    return StoreFolder(url)


def _copy(folder: TargetFolder, file: ManifestFile, task: PublishTask, progress: ByteProgress) -> None:
    """Copy one file and check the hash of the copied bytes."""
    hashed = hashlib.sha256()

    def parts() -> Iterator[bytes]:
        with open_file(task.folder / file.path, root=task.folder) as source:
            while part := source.read(CHUNK_BYTES):
                yield part
                hashed.update(part)
                progress.reach(file.path, source.tell())

    folder.write(file.path, parts())
    if hashed.hexdigest() != file.sha256:
        raise ProofError(
            f"The artifact is damaged: '{file.path}' has changed since it was written.",
            code="artifact_corrupt",
            hint="Do not use it; run the job again.",
        )
    if folder.size(file.path) != file.size:
        raise PublishError(
            f"{task.target.to}/{file.path} did not arrive completely.", code="target_unreachable", retryable=True
        )
