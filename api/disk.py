"""Checks the free space on the data folder's disk. Part of it is reserved for the database.

The database may lie on the same disk, and stops on a full one. So nothing else begins to write below the reserve: the
API takes in no jobs and no files, workers begin no jobs and end those that run.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from api.settings import Settings

MAX_RESERVED_BYTES = 2 << 30
MAX_RESERVED_FILES = 10_000
RESERVED_SHARE = 0.05  # of a small disk, and of the files that it can hold
DISK_FULL = "disk_full"
DISK_READ_ONLY = "disk_read_only"


@dataclass(frozen=True)
class Disk:
    """The present state of the data folder's disk. ``free_files``: how many more it can hold; None: as many as fit."""

    free_bytes: int
    reserved_bytes: int
    is_read_only: bool
    free_files: int | None = None
    reserved_files: int = 0

    def fault(self, new_bytes: int = 0) -> str | None:
        """Return why ``new_bytes`` may not be written: DISK_FULL or DISK_READ_ONLY. None if they may."""
        if self.is_read_only:
            return DISK_READ_ONLY
        if self.lacks_files:
            return DISK_FULL
        return DISK_FULL if self.free_bytes - new_bytes < self.reserved_bytes else None

    @property
    def lacks_files(self) -> bool:
        """True for a disk that can hold no more files (inodes), however many bytes are free."""
        return self.free_files is not None and self.free_files <= self.reserved_files

    def explain(self) -> str | None:
        """Return the fault as a phrase for people; None if there is none."""
        if self.is_read_only:
            return "the disk is read-only"
        if self.fault() is None:
            return None
        if self.lacks_files:
            return (
                f"the disk has room for {self.free_files} more files (inodes), but {self.reserved_files} are reserved"
            )
        return f"{_gigabytes(self.free_bytes)} are free on the disk, but {_gigabytes(self.reserved_bytes)} are reserved"


def look(settings: Settings) -> Disk:
    """Return the disk's state within the last second: many requests may ask."""
    return _measure(settings.data_dir, settings.reserved_disk_bytes, int(time.monotonic()))


def measure(settings: Settings) -> Disk:
    """Return the disk's state at this moment."""
    return _measure.__wrapped__(settings.data_dir, settings.reserved_disk_bytes, 0)


@lru_cache(maxsize=4)
def _measure(folder: Path, reserved_bytes: int | None, _: int) -> Disk:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    stats = os.statvfs(existing)
    if reserved_bytes is None:
        reserved_bytes = min(MAX_RESERVED_BYTES, int(RESERVED_SHARE * stats.f_blocks * stats.f_frsize))
    reserved_files = min(MAX_RESERVED_FILES, int(RESERVED_SHARE * stats.f_files)) if reserved_bytes else 0
    free_files = stats.f_favail if stats.f_files else None  # btrfs and others have no fixed number
    free_bytes = stats.f_bavail * stats.f_frsize
    return Disk(free_bytes, reserved_bytes, bool(stats.f_flag & os.ST_RDONLY), free_files, reserved_files)


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
