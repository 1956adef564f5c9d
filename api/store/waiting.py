"""Why a job waits, and its place in the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Select, bindparam, func, select
from sqlalchemy.orm import Session

from api.store import gathering, workers
from api.store.states import CLAIMABLE, HELD, State
from api.store.tables import QUEUE_ORDER, Job, Project
from api.store.workers import Ready


@dataclass(frozen=True)
class Waiting:
    """What keeps a job from running; ``position`` 1 is next, None is not in the queue yet."""

    reason: str
    position: int | None


def explain(session: Session, jobs: Sequence[Job]) -> dict[str, Waiting]:
    """Job id -> why it waits, for those of ``jobs`` that do. Four queries at most, however many jobs."""
    waiting = [job for job in jobs if job.state in CLAIMABLE]
    if not waiting:
        return {}
    queue = session.execute(_queue(), {"ids": [job.id for job in waiting]}).all()
    places = {row.id: row.place for row in queue}
    ready = workers.find_ready(session)
    expected = gathering.count_expected(session) if any(job.nodes > 1 for job in waiting) else 0
    full = _full_projects(session, {row.project_id: row.max_running for row in queue if row.max_running is not None})
    return {
        job.id: Waiting(_reason(job, places.get(job.id), ready, expected, full.get(job.project_id)), places.get(job.id))
        for job in waiting
    }


@cache
def _queue() -> Select[Any]:
    """The places of jobs that are due, and how many their project may run. Made once: every poll of a job that waits
    asks this."""
    due = Job.state.in_(CLAIMABLE), Job.run_at <= func.clock_timestamp()
    place = func.row_number().over(order_by=QUEUE_ORDER).label("place")
    queue = select(Job.id, Job.project_id, place).where(*due).subquery()
    columns = queue.c.id, queue.c.place, queue.c.project_id, Project.max_running
    theirs = queue.c.id.in_(bindparam("ids", expanding=True))
    return select(*columns).join(Project, Project.id == queue.c.project_id).where(theirs)


def _full_projects(session: Session, limits: dict[str, int]) -> dict[str, int]:
    """Those of the projects with a limit (id -> how many jobs it may run) that have reached it."""
    if not limits:
        return {}
    held = select(Job.project_id, func.count().label("number")).where(Job.project_id.in_(limits), Job.state.in_(HELD))
    running = {row.project_id: row.number for row in session.execute(held.group_by(Job.project_id))}
    return {name: limit for name, limit in limits.items() if running.get(name, 0) >= limit}


def _reason(job: Job, position: int | None, ready: Sequence[Ready], expected: int, running_limit: int | None) -> str:
    if position is None:
        return f"the next try is at {_second(job.run_at)}" if job.state == State.RETRY_WAIT else "not due yet"
    if not ready:
        return "no live worker"
    able = gathering.able(ready, job)
    if not able:
        return f"no live worker with {(job.needs_memory_bytes or 0) / 2**30:.1f} GiB"
    if job.nodes > len(able):
        return f"needs {job.nodes} workers at once: {len(able)} {'is' if len(able) == 1 else 'are'} there"
    if running_limit is not None:
        return f"the project runs as many jobs as it may ({running_limit})"
    if position > 1:
        return "1 job before it" if position == 2 else f"{position - 1} jobs before it"
    if job.nodes > 1:
        return f"needs {job.nodes} workers at once: {gathering.num_idle(able, expected)} of {len(able)} idle"
    return "next in line: the first worker that is free takes it"


def _second(at: datetime) -> str:
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
