"""A job's story: rows that are numbered 1, 2, 3 per job. SSE, webhooks and metrics will read the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.store.tables import Event, Job


@dataclass(frozen=True)
class NewEvent:
    """An event that has no number yet."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)


def add(session: Session, job: Job, *events: NewEvent) -> None:
    """Number ``events`` and insert them.

    The caller holds the row lock of ``job``: so numbers have no gaps, and whoever has read up to n never misses n+1.
    """
    for event in events:
        job.num_events += 1
        session.add(Event(job_id=job.id, seq=job.num_events, kind=event.kind, data=event.data))


def read(session: Session, job_id: str, *, after: int, limit: int) -> Sequence[Event]:
    """At most ``limit`` events with ``seq`` above ``after``, in order."""
    wanted = select(Event).where(Event.job_id == job_id, Event.seq > after).order_by(Event.seq).limit(limit)
    return session.scalars(wanted).all()
