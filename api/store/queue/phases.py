"""The progress of the present attempt, phase by phase: clients see it without reading the events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

Phase = dict[str, Any]  # {name, state, started_at, ended_at, done, total, unit}; times are RFC 3339

RUNNING, DONE, STOPPED = "running", "done", "stopped"


def enter(phases: Sequence[Phase], name: str, now: datetime) -> list[Phase]:
    """Return the phases after ``name`` has begun; the phase that was running is done."""
    begun = {"name": name, "state": RUNNING, "started_at": now.isoformat(), "ended_at": None}
    return [*leave(phases, DONE, now), begun | {"done": None, "total": None, "unit": None}]


def note_progress(phases: Sequence[Phase], progress: Mapping[str, Any]) -> list[Phase]:
    """Return the phases with the running one's progress. Progress of another phase came too late and is ignored."""
    if not phases or phases[-1]["name"] != progress.get("phase"):
        return list(phases)
    unit = progress.get("unit")
    numbers = {name: _number(progress.get(name)) for name in ("done", "total")}
    return [*phases[:-1], phases[-1] | numbers | {"unit": unit if isinstance(unit, str) else None}]


def leave(phases: Sequence[Phase], state: str, now: datetime) -> list[Phase]:
    """Return the phases without a running one: it has ended in ``state``."""
    if not phases or phases[-1]["state"] != RUNNING:
        return list(phases)
    return [*phases[:-1], phases[-1] | {"state": state, "ended_at": now.isoformat()}]


def _number(value: Any) -> float | None:
    """Return a number that an engine printed, None for anything else: that would break every response about the job."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
    return value if is_number else None
