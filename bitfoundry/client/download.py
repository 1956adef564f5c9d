"""Downloads a file of an artifact: checked against its SHA-256, and continued where it was interrupted."""

import hashlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import httpx2

from bitfoundry.client.answers import ArtifactFile
from bitfoundry.client.transport import NUM_TRIES, Transport
from bitfoundry.errors import BitfoundryError

OnBytes = Callable[[ArtifactFile, int], None]


def download(service: Transport, path: str, file: ArtifactFile, folder: Path, on_bytes: OnBytes | None) -> None:
    """Download the file at `path` of the service into `folder`, unless it is there already.

    Its bytes stay in `.partial` until it is whole; a later call continues after them. Raises ApiError and
    BitfoundryError.
    """
    target = folder / _inside(file.path)
    if target.is_file() and _sha256(target) == file.sha256:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    num_failures = 0
    while True:
        have = partial.stat().st_size if partial.is_file() else 0
        try:
            _fetch_rest(service, path, file, partial, have, on_bytes)
            break
        except httpx2.TransportError as error:
            came = partial.stat().st_size - have if partial.is_file() else 0
            num_failures = 1 if came > 0 else num_failures + 1
            if num_failures >= NUM_TRIES:
                raise service.no_answer(error) from error
            service.pause(0.2 * 2**num_failures)
    if _sha256(partial) != file.sha256:
        partial.unlink()
        raise BitfoundryError(f"{file.path} arrived damaged", hint="download again")
    partial.replace(target)


def _fetch_rest(
    service: Transport, path: str, file: ArtifactFile, partial: Path, have: int, on_bytes: OnBytes | None
) -> None:
    """Download the bytes after the first `have`, or the whole file if the service has another one by now."""
    if have >= file.bytes > 0:
        return
    headers = {"Range": f"bytes={have}-", "If-Range": f'"{file.sha256}"'} if have else {}
    with (
        service.stream(path, headers=headers) as answer,
        partial.open("ab" if answer.status_code == 206 else "wb") as out,
    ):
        for chunk in answer.iter_bytes():
            out.write(chunk)
            if on_bytes is not None:
                on_bytes(file, len(chunk))


def _inside(name: str) -> PurePosixPath:
    """Return the relative path `name`. Raises BitfoundryError for one that leaves its folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\\" in name or "\0" in name:
        raise BitfoundryError(f"the service named an unsafe file: {name!r}")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
