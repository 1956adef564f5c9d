"""What a device would feel, counted by line of our code: see ``tests.support.accelerator``."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
OUR_CODE = tuple(f"{ROOT / folder}/" for folder in ("quantcore", "tests"))
NOT_COUNTED = tuple(f"{ROOT / 'tests' / 'support' / name}.py" for name in ("accelerator", "device_counts"))


def place() -> str:
    """Return the innermost line of our code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OUR_CODE) and file not in NOT_COUNTED:
            return f"{Path(file).relative_to(ROOT).as_posix().removeprefix('quantcore/')}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@dataclass
class Copies:
    """Copies between host and device: how often at each line, how many bytes in all, and how many of pinned memory."""

    places: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    pinned_bytes: int = 0

    def add(self, num_bytes: int, *, is_pinned: bool) -> None:
        self.places[place()] += 1
        self.num_bytes += num_bytes
        self.pinned_bytes += num_bytes * is_pinned


@dataclass
class Counts:
    """What a device would feel. Lines are those of our innermost code: ``solvers/columns.py:95``."""

    launches: Counter[str] = field(default_factory=Counter)  # by operation
    launch_places: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)  # by line
    to_device: Copies = field(default_factory=Copies)
    to_host: Copies = field(default_factory=Copies)
    held_bytes: int = 0
    peak_bytes: int = 0
