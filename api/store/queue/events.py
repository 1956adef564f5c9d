"""A job's event log: rows that are numbered 1, 2, 3 per job. SSE and metrics read the same rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.store.accounts import webhooks
from api.store.states import State
from api.store.tables.jobs import Event, Job


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


def announce(session: Session, job: Job, state: State, **more: Any) -> None:
    """Add the event ``state_changed`` and queue the webhooks' messages: the job moves to ``state`` in this transaction.

    Only the service itself announces a state: an event of that kind that an engine prints is only a line in the event
    log.
    """
    data = {"state": state, **more}
    add(session, job, NewEvent("state_changed", data))
    webhooks.queue_about(session, job, f"job.{state}", data)


def read(session: Session, job_id: str, *, after: int, limit: int, kinds: Collection[str] = ()) -> Sequence[Event]:
    """Return at most ``limit`` events with ``seq`` above ``after``, in order; of ``kinds`` only, if there are any."""
    wanted = select(Event).where(Event.job_id == job_id, Event.seq > after).order_by(Event.seq).limit(limit)
    if kinds:
        wanted = wanted.where(Event.kind.in_(kinds))
    return session.scalars(wanted).all()


def find_heads(session: Session, job_ids: Sequence[str]) -> dict[str, int]:
    """Return by job id a number that grows with every event and every line of its log, for the jobs that exist."""
    head = (Job.num_events + Job.num_log_lines).label("head")
    return {row.id: row.head for row in session.execute(select(Job.id, head).where(Job.id.in_(job_ids)))}
