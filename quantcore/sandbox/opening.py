"""Opens files of folders that are not trusted: a model, a data file, an artifact. No torch.

Only a plain file at the path that was checked is opened: the real path is resolved first, compared with the allowed
folders, and then walked from folder to folder by descriptors that follow no link. So links, pipes, devices and hard
links to other files are refused, even if they replace the file during the check.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType

from quantcore.errors import ModelError

MAX_SIDE_FILE_BYTES = 256 << 20
"""Size limit of a tokenizer's file, a template or a license. The largest tokenizers have some 30 MB."""

VARIABLE = "BITFOUNDRY_READS"
"""Environment variable of a confined process: the files and folders that its job may read, as JSON.

Path -> its ``Identity`` when the job began; null for a folder of the process's own, which may be made later.
"""

_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_FILE = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)

Identity = tuple[int, int]
"""Device and inode of a file or a folder: what replaces it under its name has another."""
Stamp = tuple[int, ...]
"""Device, inode, size and time of a file. They differ for another file, and change when a file is written."""


def resolved(path: Path | str) -> Path:
    """Return the real path, with links followed; it need not exist.

    Raises ModelError ``path_not_allowed`` for a path that cannot be followed: links in a loop, names too long, NUL.
    """
    try:
        real = Path(path).resolve()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # reported when it is opened
            real.stat()
    except (OSError, RuntimeError, ValueError) as error:
        raise _not_a_path(path) from error
    return real


def open_file(path: Path, *, root: Path | None = None, max_bytes: int | None = None) -> BufferedReader:
    """Open the file ``path`` of the folder ``root`` (its own folder by default) for reading.

    A link may stay in the folder, or lead from a snapshot in the Hub's cache to that cache's blobs. Raises
    FileNotFoundError, and ModelError: ``unsafe_path`` for anything but a plain file of this folder, ``file_too_large``
    beyond ``max_bytes``, ``model_changed`` (see ``unchanging``).
    """
    folder = resolved(root or path.parent)
    try:
        real = Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        raise _not_a_path(path) from error
    if not any(real.is_relative_to(allowed) for allowed in (folder, *folders_beside(folder))):
        raise _unsafe(path, "is a link that leaves its folder", "Replace it with the file itself.")
    return _open(real, path, max_bytes, may_be_linked=False)


def open_named(path: Path, *, max_bytes: int | None = None) -> BufferedReader:
    """Open a file named by a person or the service, as ``open_file`` does. The name may be a link to anywhere.

    In a process whose files are given by ``VARIABLE`` it is no hard link either: a stranger may have made it.
    """
    return _open(resolved(path), path, max_bytes, may_be_linked=VARIABLE not in os.environ)


def identify(path: Path) -> Identity:
    """Return the identity of the file or folder at ``path``, which is no link and lies below none.

    Raises FileNotFoundError, and ModelError ``unsafe_path`` for links in the path.
    """
    try:
        at = _walk_folders(path.parent)
        try:
            status = os.stat(path.name, dir_fd=at, follow_symlinks=False)
        finally:
            os.close(at)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise _unsafe(path, "is reached through a link") from error
    if stat.S_ISLNK(status.st_mode):
        raise _unsafe(path, "is a link")
    return status.st_dev, status.st_ino


def read_bytes(path: Path, max_bytes: int = MAX_SIDE_FILE_BYTES, *, root: Path | None = None) -> bytes:
    """Return the whole content of the file that ``open_file`` opens."""
    with open_file(path, root=root, max_bytes=max_bytes) as file:
        return file.read()


def path_for_libraries(file: BufferedReader, path: Path) -> str:
    """Return a path by which another library can open ``file`` again, as long as ``file`` is open.

    On Linux it is the same file, even if ``path`` has been replaced meanwhile.
    """
    opened = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    return opened if os.path.exists(opened) else os.path.realpath(path)  # noqa: PTH110


class Seen:
    """The files that were opened in one folder, by name, with their stamps."""

    def __init__(self, folder: Path, stamps: Mapping[str, Stamp]) -> None:
        self.folder = resolved(folder)
        self.stamps = {name: tuple(stamps[name]) for name in stamps}

    def note(self, path: Path, status: os.stat_result) -> None:
        """Note the stamp of a file. Raises ModelError ``model_changed`` if it has changed."""
        stamp = _stamp(status)
        if self.stamps.setdefault(path.name, stamp) != stamp:
            raise _changed(path, "is no longer the same file as when the job began")

    def holds(self, path: Path) -> bool:
        return path.parent == self.folder or path.parent.resolve() == self.folder

    def take(self, stamps: Mapping[str, Stamp]) -> None:
        """Take over the stamps of another process. Raises as ``note``."""
        for name, stamp in stamps.items():
            if self.stamps.setdefault(name, tuple(stamp)) != tuple(stamp):
                raise _changed(self.folder / name, "is no longer the same file as when the job began")

    def check(self) -> None:
        """Check all files again. Raises ModelError ``model_changed``."""
        for name in sorted(self.stamps):
            path = self.folder / name
            try:
                self.note(path, path.stat())
            except OSError as error:
                raise _changed(path, "is gone") from error


_seen: Seen | None = None


@contextmanager
def unchanging(model: Path, stamps: Mapping[str, Stamp] | None = None) -> Iterator[Seen]:
    """Make ``open_file`` raise ModelError ``model_changed`` for a changed file of ``model``, while this lasts.

    ``model`` is a folder or a file. A file has changed if it differs from when it was first opened, or from ``stamps``.
    An error inside is replaced by ``model_changed`` if a file has changed.
    """
    global _seen
    before, _seen = _seen, Seen(model if model.is_dir() else model.parent, stamps or {})
    try:
        yield _seen
    except Exception:
        _seen.check()
        raise
    finally:
        _seen = before


def seen_so_far() -> dict[str, Stamp]:
    """Return the stamps of the innermost ``unchanging``, for another process."""
    return {} if _seen is None else dict(_seen.stamps)


def _open(real: Path, named: Path, max_bytes: int | None, *, may_be_linked: bool) -> BufferedReader:
    """Open ``real``, a path without links; errors show the path that was ``named``."""
    readable, known = os.environ.get(VARIABLE), {}
    if readable is not None:
        known = {path: who for path, who in _parse_readable(readable).items() if real.is_relative_to(path)}
        if not known:
            raise _unsafe(named, "is not one of the files that this job may read")
    seen = _seen if _seen is not None and _seen.holds(named) else None
    try:
        descriptor = _walk(real, known, may_be_linked=may_be_linked)
    except _HardLink as error:
        raise _unsafe(
            named,
            "is a hard link: the file has another name elsewhere",
            "Copy the file (cp --reflink=auto) so that it is the folder's own.",
        ) from error
    except FileNotFoundError as error:
        if seen is not None and named.name in seen.stamps:
            raise _changed(named, "is gone") from error
        raise
    except PermissionError:
        raise
    except ValueError as error:
        raise _not_a_path(named) from error
    except OSError as error:
        raise _unsafe(named, "is not a plain file") from error
    file = os.fdopen(descriptor, "rb")
    try:
        status = os.fstat(descriptor)
        if max_bytes is not None and status.st_size > max_bytes:
            raise ModelError(
                f"{named.name} has {status.st_size >> 20} MiB; the limit is {max_bytes >> 20} MiB.",
                code="file_too_large",
                hint="It is damaged, or not of the type that its name suggests.",
            )
        if seen is not None:
            seen.note(named, status)
    except BaseException:
        file.close()
        raise
    return file


@lru_cache(maxsize=1)  # called for every tensor, as each read opens the file
def _parse_readable(readable: str) -> dict[Path, Identity | None]:
    return {Path(path): who and (who[0], who[1]) for path, who in json.loads(readable).items()}


class _HardLink(OSError):
    """The file has a second name."""


def _walk(real: Path, known: Mapping[Path, Identity | None], *, may_be_linked: bool) -> int:
    """Open the plain file ``real`` and return its descriptor. Raises OSError for a link in it, or not a plain file.

    It is what is known under its path, or lies in one of the folders that are ``known``, unless another has their name.
    """
    if os.open not in os.supports_dir_fd:  # Windows, where no untrusted user shares the machine
        if not real.is_file():
            raise FileNotFoundError(real) if not real.exists() else OSError("not a plain file")
        return os.open(real, _FILE)
    at = _walk_folders(real.parent, known)
    try:
        # checked first, because opening a device may have an effect
        _check_plain(os.stat(real.name, dir_fd=at, follow_symlinks=False), may_be_linked)
        descriptor = os.open(real.name, _FILE, dir_fd=at)
    finally:
        os.close(at)
    try:
        _check_plain(os.fstat(descriptor), may_be_linked)
        _check_same(descriptor, known.get(real))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _walk_folders(folder: Path, known: Mapping[Path, Identity | None] = MappingProxyType({})) -> int:
    """Open ``folder`` without following a link, and return its descriptor. Raises OSError."""
    at, path = os.open(folder.anchor, _FOLDER), Path(folder.anchor)
    try:
        for name in folder.parts[1:]:
            above, at = at, os.open(name, _FOLDER, dir_fd=at)
            os.close(above)
            path /= name
            _check_same(at, known.get(path))
    except OSError:
        os.close(at)
        raise
    return at


def _check_plain(status: os.stat_result, may_be_linked: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a plain file")
    if status.st_nlink > 1 and not may_be_linked:
        raise _HardLink


def _check_same(descriptor: int, who: Identity | None) -> None:
    status = os.fstat(descriptor)
    if who is not None and who != (status.st_dev, status.st_ino):
        raise OSError("another file or folder has taken its place")


def folders_beside(folder: Path) -> tuple[Path, ...]:
    """Return the folders that links of a snapshot in the Hub's cache may lead to.

    <cache>/models--x--y/snapshots/<sha>/file -> ../../blobs/<hash>, which may be a link to <cache>/blobs. These folders
    are no links themselves, unlike ``blobs`` of a folder that only looks like a snapshot.
    """
    for snapshots in folder.parents:
        if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
            blobs = (snapshots.parent / "blobs", snapshots.parent.parent / "blobs")
            return tuple(each for each in blobs if Path(os.path.realpath(each)) == each)
    return ()


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _changed(path: Path, how: str) -> ModelError:
    return ModelError(
        f"The model changed while the job read it: {path.name} {how}.",
        code="model_changed",
        hint="No output was kept. Do not change the folder while a job runs, and submit the job again.",
    )


def _unsafe(path: Path, why: str, hint: str = "Use the complete folder, with plain files.") -> ModelError:
    return ModelError(f"'{path.name}' {why}.", code="unsafe_path", hint=hint)


def _not_a_path(path: Path | str) -> ModelError:
    shown = str(path).encode("utf-8", "replace").decode().replace("\0", "\\0")
    shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
    return ModelError(
        f"'{shown}' is a path that cannot be followed.",
        code="path_not_allowed",
        hint="A name in it is too long for the system, its links form a loop, or it contains a NUL.",
    )
