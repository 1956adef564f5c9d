"""Events of the engine: small frozen values, each printed as one JSON line.

A child process prints them on stdout; the worker stores them as rows; the CLI draws a progress bar from them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TextIO

PHASES = (
    "resolve",
    "download",
    "plan",
    "sensitivity",
    "trial",
    "gradients",
    "quantize",
    "export",
    "verify",
    "selftest",
)


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
    """The progress of a phase: ``done`` of ``total`` units, and the seconds left in ``eta_s``, None while unknown.

    ``memory_bytes``: the memory of this process now, on the host and its accelerator; None if it was not measured.
    """

    kind: ClassVar[str] = "progress"
    phase: str
    done: int
    total: int
    unit: str
    eta_s: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Saved(Event):
    """The progress was saved: on this disk, a job that is stopped continues at block ``next_block`` (from 0)."""

    kind: ClassVar[str] = "saved"
    next_block: int
    num_blocks: int


@dataclass(frozen=True)
class LayerQuantized(Event):
    """A weight was quantized. ``relative_error`` is ||W - Q|| / ||W|| (Frobenius), ``sqnr_db`` the same in dB.

    ``output_error`` is ||(W - Q) X|| / ||W X|| on the calibration text, None if no algorithm used that text.
    ``rounding_error`` is the same for the weight plainly rounded, ``num_tokens`` the number of tokens in X.
    ``weight_spread`` and ``input_range`` are those of the report (``WeightSpread``, ``InputRange``).
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
    weight_spread: dict[str, Any] | None = None
    input_range: dict[str, Any] | None = None


@dataclass(frozen=True)
class Warned(Event):
    """Something the user should know; it is also a row of the report."""

    kind: ClassVar[str] = "warning"
    code: str
    message: str


@dataclass(frozen=True)
class GatesJudged(Event):
    """The result was checked against its limits (see ``quantcore.engine.verification.gates``).

    ``results`` has a row per limit. For a result that they reject, ``verdict`` and ``samples`` are those of its report,
    which has no job that shows it; None otherwise.
    """

    kind: ClassVar[str] = "gates"
    gate: str
    results: list[dict[str, Any]]
    verdict: dict[str, Any] | None = None
    samples: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class CandidateMeasured(Event):
    """A search for a goal has measured a candidate; ``trial`` is its row of the report (``GoalTrial``)."""

    kind: ClassVar[str] = "candidate"
    trial: dict[str, Any]


@dataclass(frozen=True)
class Completed(Event):
    """The artifact is whole and proven; ``summary`` is the report's summary."""

    kind: ClassVar[str] = "completed"
    summary: dict[str, Any]


@dataclass(frozen=True)
class Published(Event):
    """The artifact was published. ``revision``: the commit on the Hub; elsewhere the SHA-256 of MANIFEST.json.

    ``is_new`` is False if all of it was published before; ``num_bytes`` were sent.
    """

    kind: ClassVar[str] = "published"
    revision: str
    url: str
    is_new: bool
    num_bytes: int


@dataclass(frozen=True)
class Failed(Event):
    """A known failure (see ``quantcore.errors``): of process ``rank`` among several, at decoder ``block``, if any."""

    kind: ClassVar[str] = "failed"
    code: str
    message: str
    hint: str
    retryable: bool
    rank: int | None = None
    block: int | None = None


_BY_KIND: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        PhaseStarted,
        Progress,
        Saved,
        LayerQuantized,
        Warned,
        GatesJudged,
        CandidateMeasured,
        Completed,
        Published,
        Failed,
    )
}


def parse(data: dict[str, Any]) -> Event:
    """Return the event of ``to_dict`` data. Raises ValueError if it is unknown or incomplete."""
    fields = {key: value for key, value in data.items() if key != "kind"}
    try:
        return _BY_KIND[data["kind"]](**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an event: {data}") from error


Emit = Callable[[Event], None]


def silence(event: Event) -> None:
    """Ignore the event: an ``Emit`` for processes that report nothing."""


def print_json_lines(stream: TextIO | None = None) -> Emit:
    """Return an ``Emit`` that writes one flushed JSON line per event."""
    out = stream or sys.stdout

    def emit(event: Event) -> None:
        print(json.dumps(event.to_dict(), separators=(",", ":")), file=out, flush=True)

    return emit


INTERVAL_S = 10.0
"""Seconds between two lines of progress without a terminal."""


class Pace:
    """Decides when to print progress without a terminal: at each change of stage, else every INTERVAL_S."""

    def __init__(self) -> None:
        self._stage: str | None = None
        self._printed = time.monotonic()

    def is_due(self, stage: str | None = None) -> bool:
        """Return whether to print a line now; ``stage`` is the current stage of the work."""
        now = time.monotonic()
        if stage == self._stage and now - self._printed < INTERVAL_S:
            return False
        self._stage, self._printed = stage, now
        return True


class PhaseClock:
    """An ``emit`` that also measures the seconds of each phase."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._seconds: dict[str, float] = {}
        self._phase = ""
        self._since = time.monotonic()

    def __call__(self, event: Event) -> None:
        if isinstance(event, PhaseStarted):
            self._seconds, self._phase, self._since = self._so_far(), event.phase, time.monotonic()
        self._emit(event)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase, in the order of their first starts; the last one has not ended."""
        return {phase: round(seconds, 2) for phase, seconds in self._so_far().items()}

    def _so_far(self) -> dict[str, float]:
        if not self._phase:
            return self._seconds
        return self._seconds | {self._phase: self._seconds.get(self._phase, 0.0) + time.monotonic() - self._since}


class Eta:
    """Estimator of the seconds left of ``total`` equal steps, from the mean of those done."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def after(self, done: int) -> float | None:
        """Return the seconds left after ``done`` steps, None before the first."""
        return round(self.elapsed_s / done * (self._total - done), 1) if done else None
