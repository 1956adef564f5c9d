"""Explains why a job waits, and finds its place in the queue."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Select, func, select
from sqlalchemy.orm import Session

from api.store.queue import placement, workers
from api.store.queue.workers import Ready
from api.store.states import CLAIMABLE, HELD, State
from api.store.tables.jobs import QUEUE_ORDER, Job, Project

LONG_QUEUE = 200
"""Queues up to this length are read anew for every answer. A longer one is read every ``MOMENT_S``: otherwise a
thousand clients that poll would each count thousands of jobs."""

MOMENT_S = 2.0


@dataclass(frozen=True)
class Waiting:
    """Says what keeps a job from running. ``position`` 1 is next; None means that it is not in the queue yet."""

    reason: str
    position: int | None


def explain(session: Session, jobs: Sequence[Job]) -> dict[str, Waiting]:
    """Map the id of each job that waits to the reason. Five queries at most, however many jobs."""
    waiting = [job for job in jobs if job.state in CLAIMABLE]
    return _find_queue(session).explain(waiting) if waiting else {}


@dataclass(frozen=True)
class _Queue:
    """Holds the jobs that are due, in order, and what can keep one of them from running."""

    priorities: Sequence[int]
    times: Sequence[datetime]
    ids: Sequence[str]
    full_projects: dict[str, int]
    """Maps projects that run as many jobs as they may to that limit."""
    ready: Sequence[Ready]
    blocked_reason: str | None
    """The reason why no live worker is ``ready``."""
    num_draining: int
    """The number of workers that accept no jobs because somebody drains them; 0 if another is ``ready``."""
    num_open_seats: int
    read_at: float = field(default_factory=time.monotonic)

    @property
    def is_long(self) -> bool:
        return len(self.ids) > LONG_QUEUE

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self.read_at < MOMENT_S

    def explain(self, waiting: Sequence[Job]) -> dict[str, Waiting]:
        positions = {job.id: self._place(job) for job in waiting}
        return {job.id: Waiting(self._reason(job, positions[job.id]), positions[job.id]) for job in waiting}

    def _reason_of_all(self) -> str:
        """Return why no worker accepts any job."""
        if self.blocked_reason:
            return f"no worker accepts jobs: {self.blocked_reason}"
        if self.num_draining == 1:
            return "the only worker is draining"
        return f"all {self.num_draining} workers are draining" if self.num_draining else "no live worker"

    def _place(self, job: Job) -> int | None:
        """Find the position of a job, even if it is newer than this queue."""
        place = -job.priority, job.run_at, job.id
        index = bisect_left(range(len(self.ids)), place, key=self._key)  # as QUEUE_ORDER sorts them
        is_due = job.state == State.QUEUED or job.id in self.ids[index : index + 1]
        return index + 1 if is_due else None

    def _key(self, index: int) -> tuple[int, datetime, str]:
        return -self.priorities[index], self.times[index], self.ids[index]

    def _reason(self, job: Job, position: int | None) -> str:
        if position is None:
            return f"next attempt at {_second(job.run_at)}"
        if not self.ready:
            return self._reason_of_all()
        able = placement.that_may_take(job, self.ready)
        if not able:
            needed = f"no live worker has {(job.needs_memory_bytes or 0) / 2**30:.1f} GiB of memory"
            if job.avoid_host is None:
                return needed
            others = any(worker.host != job.avoid_host for worker in self.ready)
            return f"{needed if others else 'no live worker'} on another host than {job.avoid_host}"
        together = placement.that_may_join(job, self.ready)
        works_alone = job.nodes == 1 or len(together) < len(able)
        if not works_alone and job.nodes > len(together):
            return f"needs {job.nodes} workers at once: {len(together)} available"
        if (limit := self.full_projects.get(job.project_id)) is not None:
            return f"the project has reached its limit of running jobs ({limit})"
        if position > 1:
            return f"{position - 1} {'job' if position == 2 else 'jobs'} ahead in the queue"
        if not works_alone:
            num_idle = placement.num_idle(together, self.num_open_seats)
            return f"needs {job.nodes} workers at once: {num_idle} of {len(together)} idle"
        return "next in queue"


_queues: WeakKeyDictionary[Engine | Connection, _Queue] = WeakKeyDictionary()
"""The queue of each database as it was read last."""


_reading = threading.Lock()


def _find_queue(session: Session) -> _Queue:
    """Read the queue. While one thread reads a long one, the others get the last one."""
    bind = session.get_bind()
    last = _queues.get(bind)
    if last is None or not last.is_long:
        last = _queues[bind] = _read_queue(session)
    elif not last.is_fresh and _reading.acquire(blocking=False):
        try:
            last = _queues[bind] = _read_queue(session)
        finally:
            _reading.release()
    return last


def _read_queue(session: Session) -> _Queue:
    row = session.execute(_due()).one()
    ready = workers.find_ready(session)
    return _Queue(
        priorities=row.priorities or (),
        times=row.times or (),
        ids=row.ids or (),
        full_projects=row.full_projects or {},
        ready=ready,
        blocked_reason=None if ready else workers.find_blocked_reason(session),
        num_draining=0 if ready else workers.count_draining(session),
        num_open_seats=placement.count_open_seats(session) if row.any_together else 0,
    )


@cache
def _due() -> Select[Any]:
    """Return the query for the queue in one row. Made once: every poll of a job that waits runs it.

    As rows, ten thousand jobs would take ten times as long to read.
    """
    due = Job.state.in_(CLAIMABLE), Job.run_at <= func.clock_timestamp()
    queue = select(Job.priority, Job.run_at, Job.id, Job.nodes).where(*due).order_by(*QUEUE_ORDER).subquery()
    running = select(func.count()).where(Job.project_id == Project.id, Job.state.in_(HELD)).scalar_subquery()
    full = select(func.jsonb_object_agg(Project.id, Project.max_running)).where(running >= Project.max_running)
    return select(
        func.array_agg(queue.c.priority).label("priorities"),
        func.array_agg(queue.c.run_at).label("times"),
        func.array_agg(queue.c.id).label("ids"),
        func.bool_or(queue.c.nodes > 1).label("any_together"),
        full.scalar_subquery().label("full_projects"),
    )


def _second(at: datetime) -> str:
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
