"""The memory of a process and its descendants, from the kernel's own counts (Linux)."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

LOOK_S = 0.02


@dataclass
class TreePeak:
    """The peak memory of a process tree.

    ``total_bytes``: the largest sum at one moment, sampled every ``LOOK_S``; ``by_pid``: the peak of each process
    (``VmHWM``).
    """

    total_bytes: int = 0
    by_pid: dict[int, int] = field(default_factory=dict)


def watch(process: subprocess.Popen[bytes]) -> TreePeak:
    """Sample the memory until ``process`` has ended and return the peak. ``os.wait4`` must still reap the process.

    Its output must go to a file or nowhere."""
    tree_peak = TreePeak()
    while not _has_ended(process.pid):
        total = 0
        for pid in _tree(process.pid):
            status = _read(Path(f"/proc/{pid}/status"))
            peak, now = _bytes(status, "VmHWM"), _bytes(status, "VmRSS")
            if peak:
                tree_peak.by_pid[pid] = peak
            total += now
        tree_peak.total_bytes = max(tree_peak.total_bytes, total)
        time.sleep(LOOK_S)
    return tree_peak


def _has_ended(pid: int) -> bool:
    state = re.search(r"^State:\s*(\w)", _read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return state is None or state[1] in "ZX"


def _tree(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*/children")  # a process is listed below the thread that began it
        for child in _read(task).split()
    ]
    return [pid, *(descendant for child in children for descendant in _tree(child))]


def _bytes(status: str, name: str) -> int:
    match = re.search(rf"^{name}:\s*(\d+) kB$", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _read(file: Path) -> str:
    """Return the text of a file of /proc; '' for a process that has ended."""
    try:
        return file.read_text()
    except OSError:
        return ""
