"""The manifest of an artifact folder: every file with its size and SHA-256. The engine writes it last.

{"format": 1, "files": [{"path": "model.safetensors", "size": 123, "sha256": "..."}]}
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantcore.errors import ProofError

MANIFEST = "MANIFEST.json"
MAX_MANIFEST_BYTES = 16 << 20


class _File(BaseModel):
    model_config = ConfigDict(frozen=True)

    path: str = Field(min_length=1, max_length=1024)
    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class _Manifest(BaseModel):
    format: int = Field(ge=1, le=1)
    files: list[_File]


@dataclass(frozen=True)
class ManifestFile:
    """A file of an artifact: its path below the artifact folder, with forward slashes; its size; its hash in hex."""

    path: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of an artifact. ``sha256`` is the hash of the manifest file itself: the artifact's identity."""

    sha256: str
    num_bytes: int
    files: dict[str, ManifestFile]


def read(folder: Path) -> Manifest:
    """Return the manifest in ``folder``. Raises ProofError ``artifact_corrupt`` for a bad one or an unsafe path."""
    try:
        path = folder / MANIFEST
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise corrupt(f"{MANIFEST} is larger than {MAX_MANIFEST_BYTES >> 20} MiB")
        data = path.read_bytes()
        parsed = _Manifest.model_validate_json(data)
    except (OSError, ValidationError) as error:
        raise corrupt(f"{MANIFEST} is missing or not valid") from error
    files = {file.path: ManifestFile(file.path, file.size, file.sha256) for file in parsed.files}
    unsafe = [name for name in files if not _is_safe(name)]
    if unsafe or len(files) != len(parsed.files):
        raise corrupt(f"{MANIFEST} names an unsafe path or one file twice")
    num_bytes = len(data) + sum(file.num_bytes for file in files.values())
    return Manifest(hashlib.sha256(data).hexdigest(), num_bytes, files)


def check(folder: Path, manifest: Manifest) -> None:
    """Hash every file. Raises ProofError ``artifact_corrupt`` if one differs, is absent, or is not in the manifest."""
    present = {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()
    }
    extra = present - manifest.files.keys() - {MANIFEST}
    if extra:
        raise corrupt(f"'{min(extra)}' is not in the manifest")
    for file in manifest.files.values():
        check_file(folder, file)


def check_file(folder: Path, file: ManifestFile) -> None:
    """Hash one file. Raises ProofError ``artifact_corrupt``."""
    path = folder / file.path
    if path.is_symlink() or not path.is_file() or path.stat().st_size != file.num_bytes:
        raise corrupt(f"'{file.path}' is missing or has the wrong size")
    with path.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
            raise corrupt(f"'{file.path}' has changed since it was written")


def _is_safe(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        bool(path.parts)
        and not path.is_absolute()
        and ".." not in path.parts
        and str(path) == name
        and not set(name) & {"\\", "\0"}
    )


def corrupt(what: str) -> ProofError:
    """Return the only error of this module; ``what`` says what is wrong."""
    return ProofError(
        f"The artifact is damaged: {what}.", code="artifact_corrupt", hint="Do not use it; run the job again."
    )
