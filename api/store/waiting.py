"""Why a job waits, and its place in the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.store.states import CLAIMABLE, State
from api.store.tables import QUEUE_ORDER, Job, Worker


@dataclass(frozen=True)
class Waiting:
    """What keeps a job from running; ``position`` 1 is next, None is not in the queue yet."""

    reason: str
    position: int | None


def explain(session: Session, jobs: Sequence[Job]) -> dict[str, Waiting]:
    """Job id -> why it waits, for those of ``jobs`` that do. Three queries at most, however many jobs."""
    waiting = [job for job in jobs if job.state in CLAIMABLE]
    if not waiting:
        return {}
    places = _places(session, [job.id for job in waiting])
    live = Worker.live_until > func.clock_timestamp()
    most_memory_bytes = session.scalar(select(func.max(Worker.memory_bytes)).where(live))
    return {job.id: Waiting(_reason(job, places.get(job.id), most_memory_bytes), places.get(job.id)) for job in waiting}


def _places(session: Session, ids: Sequence[str]) -> dict[str, int]:
    due = Job.state.in_(CLAIMABLE), Job.run_at <= func.clock_timestamp()
    queue = select(Job.id, func.row_number().over(order_by=QUEUE_ORDER).label("place")).where(*due).subquery()
    found = session.execute(select(queue.c.id, queue.c.place).where(queue.c.id.in_(ids)))
    return {row.id: row.place for row in found}


def _reason(job: Job, position: int | None, most_memory_bytes: int | None) -> str:
    if position is None:
        return f"the next try is at {_second(job.run_at)}" if job.state == State.RETRY_WAIT else "not due yet"
    if most_memory_bytes is None:
        return "no live worker"
    if (job.needs_memory_bytes or 0) > most_memory_bytes:
        return f"no live worker with {(job.needs_memory_bytes or 0) / 2**30:.1f} GiB"
    if position > 1:
        return "1 job before it" if position == 2 else f"{position - 1} jobs before it"
    return "next in line: the first worker that is free takes it"


def _second(at: datetime) -> str:
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
