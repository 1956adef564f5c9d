"""How far the present attempt is, phase by phase: what a client sees of it without reading the events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

Phase = dict[str, Any]  # {name, state, started_at, ended_at, done, total, unit}; times are RFC 3339

RUNNING, DONE, STOPPED = "running", "done", "stopped"


def enter(phases: Sequence[Phase], name: str, now: datetime) -> list[Phase]:
    """The phase that was running is done, and ``name`` has begun."""
    begun = {"name": name, "state": RUNNING, "started_at": now.isoformat(), "ended_at": None}
    return [*leave(phases, DONE, now), begun | {"done": None, "total": None, "unit": None}]


def note_progress(phases: Sequence[Phase], progress: Mapping[str, Any]) -> list[Phase]:
    """The running phase knows how far it is. Progress of another phase came too late and changes nothing."""
    if not phases or phases[-1]["name"] != progress.get("phase"):
        return list(phases)
    unit = progress.get("unit")
    told = {name: _number(progress.get(name)) for name in ("done", "total")}
    return [*phases[:-1], phases[-1] | told | {"unit": unit if isinstance(unit, str) else None}]


def leave(phases: Sequence[Phase], state: str, now: datetime) -> list[Phase]:
    """No phase is running any more: the one that was ended in ``state``."""
    if not phases or phases[-1]["state"] != RUNNING:
        return list(phases)
    return [*phases[:-1], phases[-1] | {"state": state, "ended_at": now.isoformat()}]


def _number(value: Any) -> float | None:
    """An engine's word is checked: what is no number would make every answer about the job a failure."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
    return value if is_number else None
