"""Checks stored files: artifacts and datasets against their hashes, parts of uploads, and files that no row names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from api.datasets import service, storage
from api.jobs import retention_task
from api.settings import Settings
from api.store import manifest
from api.store.accounts import datasets
from api.store.engine import Sessions
from api.store.queue import integrity
from api.store.queue.integrity import Finding, Thing
from api.store.tables.jobs import Artifact, Dataset
from quantcore.errors import ProofError

CHUNK_BYTES = 4 << 20

Pace = Callable[[int], None]
"""A callback with the number of bytes that were just read; it may wait, or raise an exception to end the check."""


def check(thing: Thing, settings: Settings, pace: Pace) -> list[Finding]:
    """Return the faults of the files of an artifact or a dataset."""
    problems = _check_artifact(thing, pace) if isinstance(thing, Artifact) else _check_dataset(thing, settings, pace)
    return [Finding(kind, _shown(path, settings), thing.id, detail) for kind, path, detail in problems]


def survey(settings: Settings, sessions: Sessions) -> list[Finding]:
    """Return the files that are a day old and have no row, and the parts of uploads without a file. Reads no file."""
    orphans = [*retention_task.find_orphans(settings, sessions), *service.find_litter(settings, sessions)]
    with sessions.begin() as session:
        parts = [*integrity.find_open_parts(session)]
    paths = {storage.part_path(settings, part.upload_id, part.number, part.sha256): part.upload_id for part in parts}
    missing = {path: upload_id for path, upload_id in paths.items() if not path.is_file()}
    with sessions.begin() as session:  # without parts that have been replaced, or completed, since
        current = {(part.upload_id, part.number, part.sha256) for part in integrity.find_open_parts(session)}
    current_paths = {storage.part_path(settings, *part) for part in current}
    return [
        *(Finding("orphan", _shown(path, settings), None, "the database does not reference it") for path in orphans),
        *(
            Finding("missing", _shown(path, settings), missing[path], "the part of the upload is missing")
            for path in missing.keys() & current_paths
        ),
    ]


def remove_orphans(settings: Settings, sessions: Sessions) -> None:
    """Remove the files that ``survey`` finds of kind ``orphan``, as the service does by itself once an hour."""
    retention_task.remove_orphans(settings, sessions)
    service.remove_litter(settings, sessions)


_Problem = tuple[str, Path, str]


def _check_artifact(artifact: Artifact, pace: Pace) -> Iterator[_Problem]:
    folder = Path(artifact.path)
    if not folder.is_dir():
        yield "missing", folder, "the folder of the artifact is missing"
        return
    try:
        expected = manifest.read(folder)
    except ProofError:
        yield "damaged", folder / manifest.MANIFEST, "the manifest is missing or invalid"
        return
    if expected.sha256 != artifact.manifest_sha256:
        yield "damaged", folder / manifest.MANIFEST, f"its SHA-256 is {expected.sha256}, not the artifact's"
        return
    for file in expected.files.values():
        yield from _check_file(folder / file.path, file.sha256, pace)
    for path in folder.rglob("*"):
        inside = path.relative_to(folder).as_posix()
        if (path.is_symlink() or not path.is_dir()) and inside not in expected.files and inside != manifest.MANIFEST:
            yield "damaged", path, "the manifest does not list it"


def _check_dataset(dataset: Dataset, settings: Settings, pace: Pace) -> Iterator[_Problem]:
    return _check_file(settings.datasets_dir / datasets.file_name(dataset), dataset.sha256, pace)


def _check_file(path: Path, sha256: str, pace: Pace) -> Iterator[_Problem]:
    try:
        if path.is_symlink() or not path.is_file():
            yield "missing", path, "the file is missing"
        elif (actual := _hash(path, pace)) != sha256:
            yield "damaged", path, f"its SHA-256 is {actual}, not {sha256}"
    except OSError as error:
        yield "damaged", path, f"it cannot be read: {error.strerror}"


def _hash(path: Path, pace: Pace) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            pace(len(chunk))
    return digest.hexdigest()


def _shown(path: Path, settings: Settings) -> str:
    """Return the path below the data folder, which other machines may have elsewhere."""
    return str(path.relative_to(settings.data_dir) if path.is_relative_to(settings.data_dir) else path)
