"""Moves an engine's stderr to the store: cleaned of secrets, a few times a second, in order."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from api.store.queue import leases
from api.store.queue.leases import LeaseLost
from api.store.queue.logs import NewLine
from worker.lease import HeldLease
from worker.redaction import Redactor

FLUSH_S = 1.0
MAX_WAITING = 5000  # lines, while the database is away
NUM_TAIL_LINES, MAX_TAIL_CHARACTERS = 30, 2000
MAX_LINE_CHARACTERS = 4000

_ERROR = re.compile(r"\b(CRITICAL|FATAL|ERROR)\b|^Traceback |^[\w.]+(Error|Exception)\b")
_WARNING = re.compile(r"\bWARN(ING)?\b|\b\w*Warning: ")
_DEBUG = re.compile(r"\bDEBUG\b")
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")  # colours, and what could forge lines


class JobLog:
    """The log of a job.

    ``follow`` an engine's stderr, ``add`` the worker's own lines, ``close`` when the engine has ended.
    """

    def __init__(
        self, held: HeldLease, redactor: Redactor, *, write: Callable[..., Any] = leases.write_log, prefix: str = ""
    ) -> None:
        """Make a log whose lines all begin with ``prefix``, to tell nodes apart."""
        self._held = held
        self._prefix = prefix
        self._write = write
        self._redactor = redactor
        self._lock = threading.Lock()
        self._waiting: deque[NewLine] = deque()
        self._num_dropped = 0
        self._tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._level = "info"
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def follow(self, lines: Iterable[bytes]) -> None:
        """Read ``lines`` in the background until they end, and write the new ones once a second."""
        for work in (lambda: self._read(lines), self._write_until_closed):
            self._threads.append(threading.Thread(target=work, name="log", daemon=True))
            self._threads[-1].start()

    def add(self, text: str, level: str) -> None:
        with self._lock:
            if len(self._waiting) == MAX_WAITING:
                self._waiting.popleft()
                self._num_dropped += 1
            self._waiting.append(NewLine(level, f"{self._prefix}{text}"))

    def stop(self) -> None:
        """Stop the background writing; ``close`` writes the rest."""
        self._closing.set()

    def close(self) -> None:
        """Write the rest. The followed stream must have ended."""
        self.stop()
        for thread in self._threads:
            thread.join()
        self._flush()

    @property
    def tail(self) -> str:
        """The last lines that the engine printed."""
        return "\n".join(self._tail)[-MAX_TAIL_CHARACTERS:]

    def _read(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            # a progress bar that overwrites itself with carriage returns counts as one line: its last state
            shown = line.decode("utf-8", "replace").rstrip("\r\n").rpartition("\r")[2]
            text = self._redactor.clean(_UNPRINTABLE.sub("", shown))[:MAX_LINE_CHARACTERS]
            if text:
                self._tail.append(text)
                self._level = guess_level(text, self._level)
                self.add(text, self._level)

    def _write_until_closed(self) -> None:
        while not self._closing.wait(FLUSH_S):
            try:
                self._flush()
            except LeaseLost:  # the runner of the engine notices that itself
                return

    def _flush(self) -> None:
        with self._lock:
            lines, num_dropped = list(self._waiting), self._num_dropped
            self._waiting.clear()
            self._num_dropped = 0
        if num_dropped:
            lines.insert(
                0,
                NewLine(
                    "warning", f"{num_dropped} lines were dropped here: they arrived faster than they could be written"
                ),
            )
        if lines:
            self._held.write(self._write, lines=lines)


def guess_level(text: str, previous: str) -> str:
    """Return the level that a line names, or "info"; an indented line has the ``previous`` level (a traceback)."""
    if text[0].isspace():
        return previous
    for level, pattern in (("error", _ERROR), ("warning", _WARNING), ("debug", _DEBUG)):
        if pattern.search(text):
            return level
    return "info"
