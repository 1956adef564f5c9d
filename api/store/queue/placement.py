"""Checks that enough workers can do a job's nodes at once, and opens the seats when one claims it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from api.store.queue import outbox, workers
from api.store.queue.workers import Ready
from api.store.tables.jobs import Job
from api.store.tables.node_slots import NodeSlot, NodeSlotState


def has_enough_workers() -> ColumnElement[bool]:
    """Return the condition for jobs that need no more workers than are ready."""
    return Job.nodes <= func.greatest(1, workers.count_ready())


def are_enough_ready(session: Session, job: Job) -> bool:
    """Return True if as many workers may take ``job`` as it has nodes. They may be busy."""
    return job.nodes == 1 or job.nodes <= len(that_may_join(job, workers.find_ready(session)))


def are_enough_idle(session: Session, job: Job) -> bool:
    """Return True if that many are idle, apart from those that other jobs' open seats wait for.

    A lock lets one claim at a time count: two claims that counted the same workers would wait for each other.
    """
    if job.nodes == 1:
        return True
    # workers of other versions use this name of the lock
    session.execute(select(func.pg_advisory_xact_lock(func.hashtext("bitfoundry.gathering"))))
    able = that_may_join(job, workers.find_ready(session))
    return job.nodes <= num_idle(able, count_open_seats(session))


def that_may_take(job: Job, ready: Sequence[Ready]) -> list[Ready]:
    """Return the workers that have the memory which ``job`` needs, and are not on the host that it avoids."""
    needed = job.needs_memory_bytes or 0
    return [worker for worker in ready if worker.memory_bytes >= needed and worker.host != job.avoid_host]


def that_may_join(job: Job, ready: Sequence[Ready]) -> list[Ready]:
    """Return those of them that do a job together with other workers."""
    return [worker for worker in that_may_take(job, ready) if not worker.brings_nodes]


def may_run_on(host: str) -> ColumnElement[bool]:
    """Return the condition for jobs that do not avoid ``host``."""
    return Job.avoid_host.is_distinct_from(host)


def count_open_seats(session: Session) -> int:
    """Count the nodes of claimed jobs that no worker has taken yet."""
    return session.scalar(select(func.count()).select_from(NodeSlot).where(NodeSlot.state == NodeSlotState.OPEN)) or 0


def num_idle(ready: Sequence[Ready], num_open_seats: int) -> int:
    """Count the idle workers that remain when all open seats are taken."""
    return max(0, sum(worker.is_idle for worker in ready) - num_open_seats)


def open_seats(session: Session, job: Job) -> None:
    """Add a seat for each node of a claimed job but its leader's, and wake the workers."""
    session.add_all(NodeSlot(job_id=job.id, fence=job.fence, node_rank=rank) for rank in range(1, job.nodes))
    if job.nodes > 1:
        outbox.wake(session)
