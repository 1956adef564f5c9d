"""What a process and all that it starts hold in memory, from the kernel's own counts (Linux)."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

LOOK_S = 0.02


@dataclass
class TreePeak:
    """``total_bytes``: the most that all held at one moment, as far as looking every ``LOOK_S`` shows it;
    ``by_pid``: the most that each of them ever held (``VmHWM``)."""

    total_bytes: int = 0
    by_pid: dict[int, int] = field(default_factory=dict)


def watch(process: subprocess.Popen[bytes]) -> TreePeak:
    """Look until ``process`` has ended; its output must go to a file or nowhere. It is not reaped: ``os.wait4`` can."""
    found = TreePeak()
    while not _has_ended(process.pid):
        total = 0
        for pid in _tree(process.pid):
            status = _read(Path(f"/proc/{pid}/status"))
            peak, now = _bytes(status, "VmHWM"), _bytes(status, "VmRSS")
            if peak:
                found.by_pid[pid] = peak
            total += now
        found.total_bytes = max(found.total_bytes, total)
        time.sleep(LOOK_S)
    return found


def _has_ended(pid: int) -> bool:
    state = re.search(r"^State:\s*(\w)", _read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return state is None or state[1] in "ZX"


def _tree(pid: int) -> list[int]:
    """The process and what it started, below and below."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*/children")  # a process is listed below the thread that began it
        for child in _read(task).split()
    ]
    return [pid, *(one for child in children for one in _tree(child))]


def _bytes(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _read(file: Path) -> str:
    """Nothing of a process that has ended."""
    try:
        return file.read_text()
    except OSError:
        return ""
