"""Why a job waits, and its place in the queue."""

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

from api.store.queue import gathering, workers
from api.store.queue.workers import Ready
from api.store.states import CLAIMABLE, HELD, State
from api.store.tables.jobs import QUEUE_ORDER, Job, Project

LONG_QUEUE = 200
"""So many jobs are counted anew for every answer. Of a longer queue an answer may tell how it was a moment ago: else
a thousand clients that poll would each count thousands of jobs."""

MOMENT_S = 2.0


@dataclass(frozen=True)
class Waiting:
    """What keeps a job from running; ``position`` 1 is next, None is not in the queue yet."""

    reason: str
    position: int | None


def explain(session: Session, jobs: Sequence[Job]) -> dict[str, Waiting]:
    """Job id -> why it waits, for those of ``jobs`` that do. Five queries at most, however many jobs."""
    waiting = [job for job in jobs if job.state in CLAIMABLE]
    return _find_queue(session).explain(waiting) if waiting else {}


@dataclass(frozen=True)
class _Queue:
    """The jobs that are due, in their order, and all that can keep one of them from running."""

    priorities: Sequence[int]
    times: Sequence[datetime]
    ids: Sequence[str]
    full_projects: dict[str, int]
    """Those that run as many jobs as they may -> how many."""
    ready: Sequence[Ready]
    blocked_reason: str | None
    """Why there is none ``ready`` where some are there."""
    expected: int
    read_at: float = field(default_factory=time.monotonic)

    @property
    def is_long(self) -> bool:
        return len(self.ids) > LONG_QUEUE

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self.read_at < MOMENT_S

    def explain(self, waiting: Sequence[Job]) -> dict[str, Waiting]:
        found = {job.id: self._place(job) for job in waiting}
        return {job.id: Waiting(self._reason(job, found[job.id]), found[job.id]) for job in waiting}

    def _place(self, job: Job) -> int | None:
        """Also of a job that is newer than this queue."""
        place = -job.priority, job.run_at, job.id
        index = bisect_left(range(len(self.ids)), place, key=self._key)  # as QUEUE_ORDER sorts them
        is_due = job.state == State.QUEUED or job.id in self.ids[index : index + 1]
        return index + 1 if is_due else None

    def _key(self, index: int) -> tuple[int, datetime, str]:
        return -self.priorities[index], self.times[index], self.ids[index]

    def _reason(self, job: Job, position: int | None) -> str:
        if position is None:
            return f"the next try is at {_second(job.run_at)}"
        if not self.ready:
            return f"no worker can take jobs: {self.blocked_reason}" if self.blocked_reason else "no live worker"
        able = gathering.able(self.ready, job)
        if not able:
            return f"no live worker with {(job.needs_memory_bytes or 0) / 2**30:.1f} GiB"
        if job.nodes > len(able):
            return f"needs {job.nodes} workers at once: {len(able)} {'is' if len(able) == 1 else 'are'} there"
        if (limit := self.full_projects.get(job.project_id)) is not None:
            return f"the project runs as many jobs as it may ({limit})"
        if position > 1:
            return "1 job before it" if position == 2 else f"{position - 1} jobs before it"
        if job.nodes > 1:
            return f"needs {job.nodes} workers at once: {gathering.num_idle(able, self.expected)} of {len(able)} idle"
        return "next in line: the first worker that is free takes it"


_queues: WeakKeyDictionary[Engine | Connection, _Queue] = WeakKeyDictionary()
"""The last that was read of each database."""


_reading = threading.Lock()


def _find_queue(session: Session) -> _Queue:
    """One reads a long queue; who asks meanwhile is answered from the last one."""
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
    found = session.execute(_due()).one()
    ready = workers.find_ready(session)
    return _Queue(
        priorities=found.priorities or (),
        times=found.times or (),
        ids=found.ids or (),
        full_projects=found.full_projects or {},
        ready=ready,
        blocked_reason=None if ready else workers.find_blocked_reason(session),
        expected=gathering.count_expected(session) if found.any_together else 0,
    )


@cache
def _due() -> Select[Any]:
    """The queue in one row: as rows, ten thousand jobs would take ten times as long to read. Made once: every poll of
    a job that waits asks this."""
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
