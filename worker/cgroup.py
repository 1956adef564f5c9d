"""Control groups (cgroup v2) that limit the memory of an engine and all that it starts; the kernel enforces the limit.

A group can be made where this process's own group is its service's to divide: in a container whose cgroup2 is
writable, and in a systemd unit with ``Delegate=memory``. A group with groups below it may hold no processes itself, so
those of the service move into a group of their own, ``LEAF``, first (the kernel's cgroup-v2.rst).
"""

from __future__ import annotations

import errno
import logging
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
LEAF = "bitfoundry"
PREFIX = "bitfoundry-"
REMOVAL_S = 10.0
YOUNG_S = 60.0


class MemoryGroup:
    """A group below ``parent`` whose processes may hold ``limit_bytes`` together; the kernel ends all of them beyond.

    A process that writes its id to ``procs`` joins. Files of its memory are counted, too, but are dropped before that.
    """

    def __init__(self, parent: Path, name: str, limit_bytes: int) -> None:
        """Make the group. Raises OSError."""
        self._folder = parent / f"{PREFIX}{name}"
        self._folder.mkdir(exist_ok=True)
        self.procs = self._folder / "cgroup.procs"
        (self._folder / "memory.max").write_text(str(limit_bytes))
        with suppress(OSError):  # a kernel without swap has no such file
            (self._folder / "memory.swap.max").write_text("0")
        (self._folder / "memory.oom.group").write_text("1")

    def was_exceeded(self) -> bool:
        """Return whether the kernel has ended processes of the group for their memory."""
        return any(name == "oom_kill" and int(number) > 0 for name, number in _pairs(self._folder / "memory.events"))

    def reached_bytes(self) -> int:
        """Return the most memory that the group has held; 0 where the kernel does not say (before Linux 5.19)."""
        with suppress(OSError, ValueError):
            return int((self._folder / "memory.peak").read_text("ascii"))
        return 0

    def remove(self) -> None:
        """End what is left in the group, and remove it: a process that has been killed is in it until it is gone."""
        with suppress(OSError):  # before Linux 5.14
            (self._folder / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + REMOVAL_S
        while not _is_removed(self._folder):
            if time.monotonic() > deadline:
                logger.warning(
                    "the control group %s still has processes: a worker that starts later removes it", self._folder
                )
                return
            time.sleep(0.02)


def make(name: str, limit_bytes: int) -> MemoryGroup | None:
    """Return a new group; None where none can be made."""
    parent = prepare()
    if parent is not None:
        try:
            return MemoryGroup(parent, name, limit_bytes)
        except OSError as error:
            logger.warning("no control group for %s (%s): its memory is watched instead", name, error)
    return None


@cache
def prepare() -> Path | None:
    """Return the group in which this worker may make others, ready for that; None if it has none."""
    own = _own()
    if own is None:
        return None
    parent = own.parent if own.name == LEAF else own
    try:
        if "memory" not in (parent / "cgroup.controllers").read_text("ascii").split():
            return None
        if "memory" not in (parent / "cgroup.subtree_control").read_text("ascii").split():
            _move_into_leaf(parent)
            (parent / "cgroup.subtree_control").write_text("+memory")
    except OSError:
        return None
    _remove_left_over(parent)
    return parent


def describe() -> str:
    """Return what limits the memory of this worker's engines, for operators."""
    return "watched" if prepare() is None else "cgroup"


def _own() -> Path | None:
    """Return the folder of this process's own group, if it is its service's to divide.

    That is the root of a container, or a unit that systemd has marked as delegated.
    """
    with suppress(OSError):
        paths = [path for number, _, path in _groups() if number == "0"]
        if paths and paths[0] == "/" and not (MOUNT / "cgroup.type").exists():
            return None  # the root of the machine
        folder = MOUNT / paths[0].lstrip("/") if paths else MOUNT
        if paths and (paths[0] == "/" or folder.name == LEAF or os.getxattr(folder, "user.delegate") == b"1"):
            return folder
    return None


def _groups() -> list[tuple[str, str, str]]:
    lines = (line.split(":", 2) for line in OWN.read_text("ascii").splitlines())
    return [(parts[0], parts[1], parts[2]) for parts in lines]


def _move_into_leaf(parent: Path) -> None:
    leaf = parent / LEAF
    leaf.mkdir(exist_ok=True)
    for pid in (parent / "cgroup.procs").read_text("ascii").split():
        with suppress(ProcessLookupError):
            (leaf / "cgroup.procs").write_text(pid)


def _remove_left_over(parent: Path) -> None:
    """Remove the empty groups of workers that were killed. A young one may be about to get its first process."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > YOUNG_S:
                folder.rmdir()


def _is_removed(folder: Path) -> bool:
    """Try to remove a group; return False while it has processes."""
    try:
        folder.rmdir()
    except OSError as error:
        return error.errno != errno.EBUSY
    return True


def _pairs(file: Path) -> list[list[str]]:
    with suppress(OSError):
        return [line.split() for line in file.read_text("ascii").splitlines()]
    return []
