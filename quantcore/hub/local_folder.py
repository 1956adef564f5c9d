"""A folder on this machine that an artifact is published to: reached from the root by descriptors that follow no link.

Who checked the folder's address has resolved its links. Whoever replaces a folder or a file of it by a link afterwards
is refused, and what a link or a hard link leads to is never written.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from quantcore.errors import PublishError
from quantcore.hub.target_folder import TargetFolder

_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class LocalFolder(TargetFolder):
    """The folder at an absolute path."""

    def __init__(self, root: str) -> None:
        self._root = root

    def present(self) -> dict[str, int]:
        try:
            return dict(self._present(self._root, ""))
        except FileNotFoundError:
            return {}

    def _present(self, folder: str, prefix: str) -> Iterator[tuple[str, int]]:
        with self._folder(folder) as descriptor:
            names = os.listdir(descriptor)  # noqa: PTH208  it is open
            status = {name: os.stat(name, dir_fd=descriptor, follow_symlinks=False) for name in names}
        for name, each in status.items():
            if stat.S_ISDIR(each.st_mode):
                yield from self._present(f"{folder}/{name}", f"{prefix}{name}/")
            else:  # a link, too, is not followed
                yield f"{prefix}{name}", each.st_size

    def read(self, path: str) -> bytes:
        with self._parent(path) as (descriptor, name):
            opened = self._open(path, name, descriptor, os.O_RDONLY)
        with os.fdopen(opened, "rb") as file:
            return file.read()

    def write(self, path: str, parts: Iterable[bytes]) -> None:
        """See ``TargetFolder``. The old file is removed, not overwritten: under its other names it stays as it is."""
        with self._folder(f"{self._root}/{path}".rpartition("/")[0], make=True):
            pass
        with self._parent(path) as (descriptor, name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
            opened = self._open(path, name, descriptor, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(opened, "wb") as file:
            for part in parts:
                file.write(part)

    def remove(self, path: str) -> None:
        with self._parent(path) as (descriptor, name):
            os.unlink(name, dir_fd=descriptor)

    def size(self, path: str) -> int:
        with self._parent(path) as (descriptor, name):
            return os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_size

    def _open(self, path: str, name: str, descriptor: int, flags: int) -> int:
        try:
            opened = os.open(name, flags | _FILE, 0o666, dir_fd=descriptor)
        except OSError as error:
            if _is_link(name, descriptor):
                raise _not_allowed(path) from error
            raise
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise _not_allowed(path)
        return opened

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        folder, _, name = f"{self._root}/{path}".rpartition("/")
        with self._folder(folder) as descriptor:
            yield descriptor, name

    @contextmanager
    def _folder(self, path: str, *, make: bool = False) -> Iterator[int]:
        """Yield a descriptor of the folder. Raises PublishError ``target_not_allowed`` for a link on the way."""
        descriptor = os.open("/", _FOLDER)
        try:
            for name in path.strip("/").split("/"):
                inner = self._enter(path, name, descriptor, make=make)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def _enter(self, path: str, name: str, descriptor: int, *, make: bool) -> int:
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=descriptor)
        try:
            return os.open(name, _FOLDER, dir_fd=descriptor)
        except OSError as error:
            if _is_link(name, descriptor):
                raise _not_allowed(path) from error
            raise


def _is_link(name: str, descriptor: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _not_allowed(path: str) -> PublishError:
    return PublishError(
        f"{path} is, or lies behind, a link or another special file.",
        code="target_not_allowed",
        hint="Publishing does not follow links: use the folder's real path, and remove links from it.",
    )
