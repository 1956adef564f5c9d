"""Builds the artifact folder under a hidden name, seals it with a manifest, and moves it into place as a whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

from quantcore.errors import ConfigError, GateError
from quantcore.sandbox.opening import open_file

MANIFEST = "MANIFEST.json"
STAGED = ".staged"
"""Folder beside a file for what is laid out in the file at the end. A result that is sealed has none."""


@contextmanager
def building(output_dir: Path, resume_dir: Path | None = None) -> Iterator[Path]:
    """Yield a folder to build in, which is renamed to ``output_dir`` at the end, or removed after a failure.

    With a ``resume_dir`` it is a part of that and is kept after a failure; at the end all of ``resume_dir`` is removed.
    After a GateError the folder moves to ``rejected_dir``. Raises as ``check_free`` does.
    """
    check_free(output_dir)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    if resume_dir is None:
        kept = partial = output_dir.with_name(f".{output_dir.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
    else:
        kept, partial = resume_dir, resume_dir / "artifact"
    partial.mkdir(parents=True, exist_ok=True)
    is_done = False
    try:
        yield partial
        if sys.platform == "win32" and output_dir.exists():
            output_dir.rmdir()  # it is empty, and Windows puts no folder in the place of another
        partial.replace(output_dir)
        sync(output_dir.parent)
        is_done = True
    except GateError:
        partial.replace(rejected_dir(output_dir))
        sync(output_dir.parent)
        is_done = True
        raise
    finally:
        if is_done or resume_dir is None:
            shutil.rmtree(kept, ignore_errors=True)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to, which takes its place at the end, or is removed after a failure."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def check_free(output_dir: Path) -> None:
    """Raise ConfigError ``output_exists`` if ``output_dir`` is a file, or a folder that is not empty."""
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ConfigError(
            f"The output folder {output_dir} is not empty.",
            code="output_exists",
            hint="Use a new folder or empty this one: nothing is overwritten.",
            field="/output_dir",
        )


def rejected_dir(output_dir: Path) -> Path:
    """Return the path for an artifact that missed a limit: NAME.rejected, NAME.rejected-2 ... beside ``output_dir``."""
    names = chain([f"{output_dir.name}.rejected"], (f"{output_dir.name}.rejected-{number}" for number in count(2)))
    return next(path for name in names if not (path := output_dir.with_name(name)).exists())


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", "utf-8")


def seal(folder: Path) -> str:
    """Write MANIFEST.json (sorted path, size, sha256 of every other file) and sync all; return its own sha256.

    What was only staged is removed.
    """
    manifest = folder / MANIFEST
    for staged in [*folder.rglob(STAGED)]:
        shutil.rmtree(staged)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != manifest)
    entries = [
        {"path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "sha256": sha256(path)}
        for path in files
    ]
    write_json(manifest, {"format": 1, "files": sorted(entries, key=lambda entry: str(entry["path"]))})
    for path in (*files, manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)
    return sha256(manifest)


def sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Write the content of ``path``, a file or a folder, to the disk before this returns.

    Windows can only sync files, and only writable ones.
    """
    if sys.platform == "win32":
        if path.is_file() and os.access(path, os.W_OK):
            with path.open("r+b") as file:
                os.fsync(file.fileno())
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
