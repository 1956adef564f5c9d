"""Whether the workers are there that a job needs at once, and the seats that a claim opens for them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from api.store.queue import outbox, workers
from api.store.queue.workers import Ready
from api.store.tables.jobs import Job
from api.store.tables.seats import Seat, SeatState


def may_come() -> ColumnElement[bool]:
    """For a query: jobs for no more workers than there are."""
    return Job.nodes <= func.greatest(1, workers.count_ready())


def are_there(session: Session, job: Job) -> bool:
    """Whether there are as many workers with enough memory as ``job`` needs, idle or not."""
    return job.nodes == 1 or job.nodes <= len(able(workers.find_ready(session), job))


def are_idle(session: Session, job: Job) -> bool:
    """Whether so many of them are idle, beside those that other jobs wait for.

    One claim at a time may ask: two that counted the same workers would wait for one another.
    """
    if job.nodes == 1:
        return True
    session.execute(select(func.pg_advisory_xact_lock(func.hashtext("bitfoundry.gathering"))))
    return job.nodes <= num_idle(able(workers.find_ready(session), job), count_expected(session))


def able(ready: Sequence[Ready], job: Job) -> list[Ready]:
    """Those that have the memory which ``job`` needs."""
    return [worker for worker in ready if worker.memory_bytes >= (job.needs_memory_bytes or 0)]


def count_expected(session: Session) -> int:
    """How many workers claimed jobs wait for."""
    return session.scalar(select(func.count()).select_from(Seat).where(Seat.state == SeatState.OPEN)) or 0


def num_idle(among: Sequence[Ready], expected: int) -> int:
    """How many have nothing to do, but for those that are ``expected`` elsewhere."""
    return max(0, sum(worker.is_idle for worker in among) - expected)


def open_seats(session: Session, job: Job) -> None:
    """A seat for each node of a claimed job but its leader's, and word to the workers that there is one."""
    session.add_all(Seat(job_id=job.id, fence=job.fence, node_rank=rank) for rank in range(1, job.nodes))
    if job.nodes > 1:
        outbox.wake(session)
