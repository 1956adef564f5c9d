"""Downloads an artifact, file by file or as one tar file. Each file is checked against its SHA-256.

A single file continues where it was interrupted.
"""

import hashlib
import tarfile
from collections.abc import Callable, Sequence
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


def download_tar(service: Transport, path: str, files: Sequence[ArtifactFile], target: Path) -> None:
    """Download the tar file at `path` of the service, which holds `files`, as `target`.

    `target` appears, or is replaced, once it is whole. Raises ApiError and BitfoundryError.
    """
    if target.is_dir():
        raise BitfoundryError(f"{target} is a folder", hint="name a file, such as model.tar")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    try:
        with service.stream(path) as answer, partial.open("wb") as out:
            for chunk in answer.iter_bytes():
                out.write(chunk)
        _check_tar(partial, files)
        partial.replace(target)
    except httpx2.TransportError as error:
        raise BitfoundryError(
            f"the download broke off: {error}",
            hint="download again; if it breaks off at the same place, a download without --tar names the damaged file",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _check_tar(path: Path, files: Sequence[ArtifactFile]) -> None:
    """Raise BitfoundryError unless the tar file holds exactly `files`, in one folder."""
    hashes = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for entry in archive:
                content = archive.extractfile(entry)
                name = entry.name.partition("/")[2]
                hashes[name] = hashlib.file_digest(content, "sha256").hexdigest() if content else ""  # type: ignore[arg-type]
    except tarfile.TarError as error:
        raise BitfoundryError(f"the tar file arrived damaged: {error}", hint="download again") from error
    if hashes != {file.path: file.sha256 for file in files}:
        raise BitfoundryError("the tar file does not hold the files of the artifact", hint="download again")


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
