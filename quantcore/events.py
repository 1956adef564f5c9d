"""What the engine says while it works: small frozen values, one JSON line each.

A child process prints them on stdout; the worker stores them as rows; the CLI draws a progress bar from them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TextIO

PHASES = ("resolve", "download", "plan", "sensitivity", "trial", "quantize", "export", "verify")


@dataclass(frozen=True)
class Event:
    """Base of all events; ``kind`` names the type on the wire."""

    kind: ClassVar[str] = "event"

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class PhaseStarted(Event):
    """The engine entered ``phase`` (one of ``PHASES``)."""

    kind: ClassVar[str] = "phase_started"
    phase: str


@dataclass(frozen=True)
class Progress(Event):
    """``done`` of ``total`` units of the phase; ``eta_s`` is the rest of this phase in seconds, None while unknown.

    ``memory_bytes``: what this process holds now, on the host and on its accelerator; None where nobody looked.
    """

    kind: ClassVar[str] = "progress"
    phase: str
    done: int
    total: int
    unit: str
    eta_s: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class LayerQuantized(Event):
    """One weight has its codes. ``relative_error`` is ||W - Q|| / ||W|| (Frobenius), ``sqnr_db`` the same in dB.

    ``output_error`` is ||(W - Q) X|| / ||W X|| on the calibration text, None where no algorithm looked at that;
    ``rounding_error`` is the same of the weight plainly rounded, ``num_tokens`` how many tokens were looked at.
    """

    kind: ClassVar[str] = "layer_quantized"
    name: str
    block: int
    relative_error: float
    sqnr_db: float
    scheme: str
    output_error: float | None = None
    rounding_error: float | None = None
    num_tokens: int | None = None


@dataclass(frozen=True)
class Warned(Event):
    """Something the user should know; it is also a row of the report."""

    kind: ClassVar[str] = "warning"
    code: str
    message: str


@dataclass(frozen=True)
class GatesJudged(Event):
    """The limits that the result was held against (see ``quantcore.proof.gates``), one row each."""

    kind: ClassVar[str] = "gates"
    gate: str
    results: list[dict[str, Any]]


@dataclass(frozen=True)
class Completed(Event):
    """The artifact is whole and proven; ``summary`` is the report's summary."""

    kind: ClassVar[str] = "completed"
    summary: dict[str, Any]


@dataclass(frozen=True)
class Published(Event):
    """The artifact is where it was to go. ``revision``: the commit on the Hub; elsewhere the SHA-256 of MANIFEST.json.

    ``is_new`` is False if all of it was there already; ``num_bytes`` were sent.
    """

    kind: ClassVar[str] = "published"
    revision: str
    url: str
    is_new: bool
    num_bytes: int


@dataclass(frozen=True)
class Failed(Event):
    """A known failure (see ``quantcore.errors``): of process ``rank`` if there are several, at decoder ``block`` if it
    was at one."""

    kind: ClassVar[str] = "failed"
    code: str
    message: str
    hint: str
    retryable: bool
    rank: int | None = None
    block: int | None = None


_BY_KIND: dict[str, type[Event]] = {
    event.kind: event
    for event in (PhaseStarted, Progress, LayerQuantized, Warned, GatesJudged, Completed, Published, Failed)
}


def parse(data: dict[str, Any]) -> Event:
    """The event that ``to_dict`` gave. Raises ValueError for one that is not known or not whole."""
    fields = {key: value for key, value in data.items() if key != "kind"}
    try:
        return _BY_KIND[data["kind"]](**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an event: {data}") from error


Emit = Callable[[Event], None]


def silence(event: Event) -> None:
    """An ``Emit`` for those who are not to speak."""


def print_json_lines(stream: TextIO | None = None) -> Emit:
    """An ``Emit`` that writes one flushed JSON line per event."""
    out = stream or sys.stdout

    def emit(event: Event) -> None:
        print(json.dumps(event.to_dict(), separators=(",", ":")), file=out, flush=True)

    return emit


INTERVAL_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""


class Pace:
    """Decides when progress is printed where there is no terminal: at each change of stage, else every INTERVAL_S."""

    def __init__(self) -> None:
        self._stage: str | None = None
        self._printed = time.monotonic()

    def is_due(self, stage: str | None = None) -> bool:
        """Return whether to print a line now; ``stage`` is what the work has come to."""
        now = time.monotonic()
        if stage == self._stage and now - self._printed < INTERVAL_S:
            return False
        self._stage, self._printed = stage, now
        return True


class Eta:
    """Seconds left of ``total`` equal steps, from the mean of those done."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def after(self, done: int) -> float | None:
        """Seconds left when ``done`` steps are done, None before the first."""
        return round(self.elapsed_s / done * (self._total - done), 1) if done else None
