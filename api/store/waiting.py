"""Why a job waits, and its place in the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.store.states import CLAIMABLE, HELD, State
from api.store.tables import QUEUE_ORDER, Job, Project, Worker


@dataclass(frozen=True)
class Waiting:
    """What keeps a job from running; ``position`` 1 is next, None is not in the queue yet."""

    reason: str
    position: int | None


def explain(session: Session, jobs: Sequence[Job]) -> dict[str, Waiting]:
    """Job id -> why it waits, for those of ``jobs`` that do. Five queries at most, however many jobs."""
    waiting = [job for job in jobs if job.state in CLAIMABLE]
    if not waiting:
        return {}
    places = _places(session, [job.id for job in waiting])
    ready = Worker.live_until > func.clock_timestamp(), Worker.drain_requested_at.is_(None)
    most_memory_bytes = session.scalar(select(func.max(Worker.memory_bytes)).where(*ready))
    full = _full_projects(session, {job.project_id for job in waiting})
    return {
        job.id: Waiting(
            _reason(job, places.get(job.id), most_memory_bytes, full.get(job.project_id)), places.get(job.id)
        )
        for job in waiting
    }


def _places(session: Session, ids: Sequence[str]) -> dict[str, int]:
    due = Job.state.in_(CLAIMABLE), Job.run_at <= func.clock_timestamp()
    queue = select(Job.id, func.row_number().over(order_by=QUEUE_ORDER).label("place")).where(*due).subquery()
    found = session.execute(select(queue.c.id, queue.c.place).where(queue.c.id.in_(ids)))
    return {row.id: row.place for row in found}


def _full_projects(session: Session, ids: set[str]) -> dict[str, int]:
    """The projects that run as many jobs as they may: id -> how many."""
    wanted = select(Project.id, Project.max_running).where(Project.id.in_(ids), Project.max_running.is_not(None))
    limits = {row.id: row.max_running for row in session.execute(wanted)}
    if not limits:
        return {}
    held = select(Job.project_id, func.count().label("number")).where(Job.project_id.in_(limits), Job.state.in_(HELD))
    running = {row.project_id: row.number for row in session.execute(held.group_by(Job.project_id))}
    return {name: limit for name, limit in limits.items() if limit is not None and running.get(name, 0) >= limit}


def _reason(job: Job, position: int | None, most_memory_bytes: int | None, running_limit: int | None) -> str:
    if position is None:
        return f"the next try is at {_second(job.run_at)}" if job.state == State.RETRY_WAIT else "not due yet"
    if most_memory_bytes is None:
        return "no live worker"
    if (job.needs_memory_bytes or 0) > most_memory_bytes:
        return f"no live worker with {(job.needs_memory_bytes or 0) / 2**30:.1f} GiB"
    if running_limit is not None:
        return f"the project runs as many jobs as it may ({running_limit})"
    if position > 1:
        return "1 job before it" if position == 2 else f"{position - 1} jobs before it"
    return "next in line: the first worker that is free takes it"


def _second(at: datetime) -> str:
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
