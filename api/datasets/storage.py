"""Stores uploaded files: ``datasets/<sha256>.<format>`` for good, ``uploads/`` while they arrive.

A file's name is made of its hash and one of our formats: no name that a client gives ever becomes a path.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from api.settings import Settings

CHUNK_BYTES = 1 << 20
LITTER_AGE_S = 24 * 3600.0


@dataclass(frozen=True)
class Received:
    """A file that has arrived, and is not yet in its final place."""

    path: Path
    sha256: str
    num_bytes: int


@contextmanager
def receiving(settings: Settings, format: str) -> Iterator[Path]:
    """Yield a path for a file that arrives, and remove the file at the end if it is still there."""
    settings.uploads_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = settings.uploads_dir / f"{secrets.token_hex(16)}.{format}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


async def write(path: Path, chunks: AsyncIterator[bytes]) -> Received:
    """Write the chunks as they arrive, and make them durable. Collected chunks are written in a thread."""
    digest = hashlib.sha256()
    num_bytes = 0
    with path.open("xb") as file:

        def put(data: bytes) -> None:
            digest.update(data)
            file.write(data)

        waiting = bytearray()
        async for chunk in chunks:
            waiting += chunk
            num_bytes += len(chunk)
            if len(waiting) >= CHUNK_BYTES:
                await run_in_threadpool(put, bytes(waiting))
                waiting.clear()
        await run_in_threadpool(put, bytes(waiting))
        file.flush()
        await run_in_threadpool(os.fsync, file.fileno())
    return Received(path, digest.hexdigest(), num_bytes)


async def chunks_of(paths: Iterable[Path]) -> AsyncIterator[bytes]:
    """Yield the bytes of the files, one after the other. A missing file has none."""
    for path in paths:
        with suppress(FileNotFoundError), path.open("rb") as file:
            while chunk := await run_in_threadpool(file.read, CHUNK_BYTES):
                yield chunk


def keep(settings: Settings, received: Received, name: str) -> Path:
    """Move a file to its final place, whole or not at all."""
    settings.datasets_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    final = settings.datasets_dir / name
    received.path.replace(final)
    descriptor = os.open(settings.datasets_dir, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return final


def parts_dir(settings: Settings, upload_id: str) -> Path:
    return settings.uploads_dir / upload_id


def part_path(settings: Settings, upload_id: str, number: int, sha256: str) -> Path:
    return parts_dir(settings, upload_id) / f"{number}.{sha256}"


def remove_parts(settings: Settings, upload_id: str) -> None:
    shutil.rmtree(parts_dir(settings, upload_id), ignore_errors=True)


def old_files(settings: Settings) -> Iterator[Path]:
    """Yield files and folders of parts that are a day old: a killed process may have left them behind."""
    before = time.time() - LITTER_AGE_S
    files = (*settings.datasets_dir.glob("*.*"), *settings.uploads_dir.glob("*.*"))
    folders = settings.uploads_dir.glob("upl_*")
    for path in (*filter(Path.is_file, files), *filter(Path.is_dir, folders)):
        with suppress(FileNotFoundError):  # another process was faster
            if path.stat().st_mtime < before:
                yield path
