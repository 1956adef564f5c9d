"""Turns the engine's lines into event rows. Progress is thinned out to two events a second."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any

from api.store.queue import leases
from api.store.queue.events import NewEvent
from api.store.queue.leases import Failure
from worker.lease import HeldLease
from worker.redaction import Redactor

PROGRESS_INTERVAL_S = 0.5
MAX_TEXT = 4000
MAX_CRASHES = 2  # the first may be bad luck (or memory that another job held); the second is the job's own
CRASHED = "engine_crashed"


class Journal:
    """The events of an attempt, fed with ``note``. The final report is in ``summary`` (completed) or ``failure``."""

    def __init__(self, held: HeldLease, redactor: Redactor) -> None:
        self.summary: dict[str, Any] | None = None
        self.failure: Failure | None = None
        self._held = held
        self._redactor = redactor
        self._waiting: NewEvent | None = None
        self._last_progress_at = float("-inf")

    def note(self, line: dict[str, Any]) -> None:
        """Write one line of the engine as an event. Raises LeaseLost."""
        line = self._redactor.clean_all(line)
        event = NewEvent(line["kind"][:64], {name: value for name, value in line.items() if name != "kind"})
        if event.kind == "progress":
            self._note_progress(event)
            return
        columns = {}
        if event.kind == "phase_started":
            columns = {"phase": _text(event.data.get("phase")), "progress": None}
        elif event.kind == "completed":
            self.summary = event.data.get("summary") or {}
        elif event.kind == "failed":
            if self.failure is not None:  # the first rank to fail names the cause; the others fail as a result
                return
            self.failure = failure_of(event.data)
        self._write(event, **columns)

    def close(self) -> None:
        """Write the progress event that still waits."""
        if self._waiting:
            self._write()

    def _note_progress(self, event: NewEvent) -> None:
        now = time.monotonic()
        if now - self._last_progress_at < PROGRESS_INTERVAL_S:
            self._waiting = event
        else:
            self._waiting = None
            self._last_progress_at = now
            self._write(event, progress=event.data)

    def _write(self, *happened: NewEvent, **columns: Any) -> None:
        if self._waiting:
            columns = {"progress": self._waiting.data} | columns
            happened = (self._waiting, *happened)
            self._waiting = None
        self._held.write(leases.record, happened=list(happened), columns=columns)


def failure_of(data: dict[str, Any]) -> Failure:
    """Return the failure that an engine's ``failed`` event describes."""
    return Failure(
        code=_text(data.get("code")) or "engine_failed",
        message=_text(data.get("message")) or "The engine failed without reporting an error.",
        hint=_text(data.get("hint")),
        retryable=data.get("retryable") is True,
        rank=_number(data.get("rank")),
        block=_number(data.get("block")),
    )


def crash(status: int, tail: str) -> Failure:
    """Return the failure of an engine that ended with ``status`` and no report; ``tail`` is the end of its output."""
    if status > 128:
        how = f"was killed by {signal.Signals(status - 128).name}" if status - 128 in set(signal.Signals) else "died"
    else:
        how = f"ended with status {status}"
    killed = status == 128 + signal.SIGKILL
    return Failure(
        CRASHED,
        f"The engine {how} without reporting an error.",
        hint="The kernel does this when memory runs out. Compare peak_memory_bytes of the plan." if killed else "",
        retryable=True,
        detail="\n".join(_without_frames(tail.splitlines())),
        max_failures=MAX_CRASHES,
    )


def _without_frames(lines: Iterable[str]) -> Iterator[str]:
    """Yield ``lines`` without the frames of Python tracebacks; the last line, which names the error, remains."""
    in_frames = False
    for line in lines:
        in_frames = line.startswith("Traceback (") or (in_frames and line[:1].isspace())
        if not in_frames:
            yield line


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    return value[:MAX_TEXT] if isinstance(value, str) else ""
