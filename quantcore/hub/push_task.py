"""A publication as ``python -m quantcore publish`` reads it from standard input, and its MANIFEST.json."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantcore.checkpoint.artifact import sha256
from quantcore.config.values import config_error
from quantcore.errors import ProofError
from quantcore.hub.target import Target
from quantcore.sandbox.opening import read_bytes

MANIFEST = "MANIFEST.json"


class ManifestFile(BaseModel):
    """A file of the artifact, by its path below the folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class PublishTask(BaseModel):
    """The task to publish the artifact ``folder`` with its ``files`` (without MANIFEST.json) to ``target``.

    ``publication_id`` is written into the commit, so that a later ``attempt`` at the same publication finds the results
    of an earlier one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    publication_id: str
    attempt: Annotated[int, Field(ge=1)]
    folder: Path
    files: tuple[ManifestFile, ...]
    target: Target

    def manifest(self) -> bytes:
        """Return MANIFEST.json: the folder's own, or one made from ``files``. Raises ProofError if the two disagree."""
        entries = sorted((file.model_dump() for file in self.files), key=lambda entry: str(entry["path"]))
        made = {"format": 1, "files": entries}
        path = self.folder / MANIFEST
        if not path.is_file():
            return (json.dumps(made, indent=2, ensure_ascii=False) + "\n").encode()
        data = read_bytes(path)
        if listed(data) != {file.path: (file.size, file.sha256) for file in self.files}:
            raise _corrupt(f"{MANIFEST} does not list the files that were verified")
        return data

    def check_files(self) -> None:
        """Hash every file. Raises ProofError ``artifact_corrupt``, so that damaged files are never published."""
        for file in self.files:
            path = self.folder / file.path
            if path.is_symlink() or not path.is_file() or path.stat().st_size != file.size:
                raise _corrupt(f"'{file.path}' is missing or has the wrong size")
            if sha256(path) != file.sha256:
                raise _corrupt(f"'{file.path}' has changed since it was written")


def listed(manifest: bytes) -> dict[str, tuple[int, str]]:
    """Return path -> (size, sha256) of a MANIFEST.json; an empty dict if the text is not one."""
    try:
        entries: list[dict[str, Any]] = json.loads(manifest)["files"]
        return {str(entry["path"]): (int(entry["size"]), str(entry["sha256"])) for entry in entries}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_publish_task(text: str) -> PublishTask:
    """Return the publication described by the JSON in ``text``. Raises ConfigError ``invalid_task``."""
    try:
        return PublishTask.model_validate_json(text)
    except ValidationError as error:
        raise config_error(error, "The publication", code="invalid_task") from error


def _corrupt(what: str) -> ProofError:
    return ProofError(
        f"The artifact is damaged: {what}.", code="artifact_corrupt", hint="Do not use it; run the job again."
    )
