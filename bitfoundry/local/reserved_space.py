"""A file that reserves disk space next to the database, deleted when PostgreSQL lacks space to start.

On a full disk PostgreSQL ends when it cannot write its log, and cannot recover either: recovery begins with a new
log file. With the space of the ballast it starts, so that jobs can be listed and deleted.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

BALLAST_BYTES = 64 << 20  # four files of PostgreSQL's log
MIN_FREE_BYTES = 4 * BALLAST_BYTES  # with less free space, no ballast is made


class ReservedSpace:
    """The ballast file at `path`. Its methods raise nothing: it is a precaution."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def make(self) -> None:
        """Create the file unless it exists, or too little space is free."""
        if self._path.exists():
            return
        partial = self._path.with_name(f"{self._path.name}.partial")
        try:
            if self._free() >= MIN_FREE_BYTES:
                _allocate(partial)
                partial.rename(self._path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def drop_if_needed(self) -> None:
        """Delete the file if PostgreSQL could not start without its space."""
        with suppress(OSError):
            if self._free() < BALLAST_BYTES:
                self._path.unlink(missing_ok=True)

    def _free(self) -> int:
        return shutil.disk_usage(self._path.parent).free


def _allocate(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, BALLAST_BYTES)
        else:  # macOS
            for _ in range(BALLAST_BYTES >> 20):
                os.write(descriptor, bytes(1 << 20))
    finally:
        os.close(descriptor)
