"""Restarts parts of the local stack that end by themselves, after a pause that grows while they keep ending."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from bitfoundry.errors import StackError

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
STEADY_S = 30.0  # a part that has run for so long has recovered: its next restart has no pause again

Say = Callable[[str], None]


class Part(Protocol):
    """A child process that can be started again."""

    @property
    def name(self) -> str: ...

    @property
    def log(self) -> Path: ...

    def poll(self) -> int | None:
        """Return None while it runs, else its exit status."""

    def start_again(self) -> None:
        """Start it again at the same address, without waiting until it is ready. Raises StackError or OSError."""


class Supervised:
    """A part and the plan of its next start. `look` returns at once."""

    def __init__(self, part: Part, say: Say) -> None:
        self._part = part
        self._say = say
        self._pause_s = 0.0  # before the next start
        self._started_at = time.monotonic()
        self._start_at: float | None = None  # None while it runs
        self._is_failing = False
        self._last_message = ""

    def look(self) -> None:
        """Start the part again if it has ended and its pause is over."""
        now = time.monotonic()
        status = self._part.poll()
        if status is None:
            self._note_recovery(now)
            return
        if self._start_at is None:
            self._note_end(f"status {status}", now)
        if self._start_at is not None and now >= self._start_at:
            self._started_at, self._start_at = now, None
            try:
                self._part.start_again()
            except (StackError, OSError) as error:
                self._note_end(str(error).partition("\n")[0], now)

    def _note_end(self, why: str, now: float) -> None:
        """Plan the next start, and report it unless the same message was the last one."""
        self._start_at = now + self._pause_s
        self._is_failing = self._pause_s > 0
        then = f"next try in {self._pause_s:.0f} s, see {self._part.log}" if self._pause_s else "restarting it"
        message = f"{self._part.name} ended ({why}): {then}"
        if message != self._last_message:
            self._say(message)
            self._last_message = message
        self._pause_s = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))

    def _note_recovery(self, now: float) -> None:
        if self._pause_s and now - self._started_at >= STEADY_S:
            if self._is_failing:
                self._say(f"{self._part.name} is running again")
            self._pause_s, self._is_failing, self._last_message = 0.0, False, ""
