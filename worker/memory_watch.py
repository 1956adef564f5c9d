"""Limits the memory of an engine and all that it starts: one job must not take the machine from the others.

The limit comes from the job's plan. Where the worker may make control groups (``cgroup``), the kernel enforces it for
all processes together. Elsewhere a thread adds up what they hold, five times a second, and says so when it is too
much; on CPUs the kernel also refuses single allocations far beyond the limit (RLIMIT_DATA, see ``parent_watch``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from api.settings import Settings
from api.store.queue.leases import Failure
from worker import cgroup
from worker.watch import Watch

LOOK_S = 0.2
EXTRA_BYTES = 1 << 30
"""Memory that no plan counts: the libraries of each process, the allocator's reserves, and the tokenizer."""
GPUS = (Path("/dev/nvidia0"), Path("/dev/kfd"))
DATA_FACTOR, DATA_EXTRA_BYTES = 2, 4 << 30
"""RLIMIT_DATA counts memory that was asked for and never used as well, such as the stacks of many threads."""


def limit_of(settings: Settings, planned_bytes: int | None) -> int:
    """Return the limit of an attempt whose plan needs ``planned_bytes``; at most the memory of this worker.

    Plan and memory are those of one process; several take at most as many times that.
    """
    of_one = settings.memory_bytes
    if planned_bytes is not None:
        of_one = min(of_one, int(settings.memory_margin * planned_bytes) + EXTRA_BYTES)
    return settings.engine_ranks * of_one


def data_limit_of(limit_bytes: int) -> int | None:
    """Return RLIMIT_DATA for processes with this limit; None on GPUs, whose drivers reserve what they never use."""
    return None if any(gpu.exists() for gpu in GPUS) else DATA_FACTOR * limit_bytes + DATA_EXTRA_BYTES


class MemoryLimit:
    """The limit of one process and all that it starts. ``is_exceeded`` and ``reached_bytes`` are what was seen."""

    def __init__(self, settings: Settings, planned_bytes: int | None, name: str) -> None:
        """Set the limit for a plan of ``planned_bytes``. ``name`` is that of the process, unique on this machine."""
        self.num_bytes = limit_of(settings, planned_bytes)
        self.is_exceeded = False
        self.reached_bytes = 0
        self._planned_bytes = planned_bytes
        self._group = cgroup.make(name, self.num_bytes)

    def for_parent_watch(self) -> tuple[str, str]:
        """Return the arguments of ``parent_watch``: RLIMIT_DATA, 0 for none, and the file of a group to join, or -."""
        if self._group is not None:
            return "0", str(self._group.procs)
        return str(data_limit_of(self.num_bytes) or 0), "-"

    def look(self, pid: int) -> bool:
        """Return whether the process and all that it started have exceeded the limit."""
        if self._group is not None:
            held = self._group.reached_bytes()
            self.is_exceeded = self._group.was_exceeded()
        else:
            held = sum(map(_held_bytes, _tree(pid)))
            if held > self.num_bytes:  # pages that forks share were counted several times
                held = sum(map(_own_bytes, _tree(pid)))
            self.is_exceeded = held > self.num_bytes
        self.reached_bytes = max(self.reached_bytes, held)
        return self.is_exceeded

    def close(self, pid: int) -> None:
        """Take a last look at a process that has ended: the kernel may have ended it between two others."""
        if self._group is not None:
            self.look(pid)
            self._group.remove()

    def failure(self) -> Failure:
        """Return the failure of a process that took more than its limit."""
        planned = "" if self._planned_bytes is None else f" (planned: {self._planned_bytes >> 20} MiB)"
        return Failure(
            "memory_limit",
            f"It was stopped because it reached {self.reached_bytes >> 20} MiB of memory{planned}; the limit is"
            f" {self.num_bytes >> 20} MiB.",
            "Use fewer or shorter windows, or smaller images. If the model and data are trusted, the operator can"
            " raise the limit (BITFOUNDRY_MEMORY_MARGIN).",
        )


class MemoryWatch(Watch):
    """A watch in a ``with`` block for the moment when a process and all that it started exceed the limit."""

    def __init__(self, pid: int, limit: MemoryLimit, on_fault: Callable[[], None]) -> None:
        super().__init__("memory-watch", LOOK_S, on_fault)
        self._pid, self._limit = pid, limit

    def is_fault(self) -> bool:
        return self._limit.look(self._pid)


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and all that it has started."""
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        yield pid
        for thread in _listed(Path(f"/proc/{pid}/task")):
            waiting += map(int, _text(thread / "children").split())


def _held_bytes(pid: int) -> int:
    """Return the memory of a process that no file backs."""
    return _sum(_text(Path(f"/proc/{pid}/status")), ("RssAnon", "RssShmem"))


def _own_bytes(pid: int) -> int:
    """Return the same with shared pages divided among the processes that share them, which takes longer to find out."""
    return _sum(_text(Path(f"/proc/{pid}/smaps_rollup")), ("Pss_Anon", "Pss_Shmem"))


def _sum(text: str, names: tuple[str, ...]) -> int:
    lines = (line.split() for line in text.splitlines())
    return sum(int(words[1]) << 10 for words in lines if words and words[0].removesuffix(":") in names)


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # the process has ended
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text("ascii")
    except OSError:
        return ""
