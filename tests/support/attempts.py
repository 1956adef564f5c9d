"""Attempts at jobs, as stored in the database."""

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import select

from api.store.engine import Sessions
from api.store.queue import leases
from api.store.queue.leases import Lease
from api.store.queue.logs import NewLine
from api.store.queue.workers import worker_of
from api.store.tables.jobs import Attempt, Job
from tests.support.service import WorkerProcess
from worker.supervisor import Supervisor


def outcomes(sessions: Sessions, job_id: str) -> list[str | None]:
    """Return the outcome of each attempt at a job; None for one that is not over."""
    with sessions.begin() as session:
        statement = select(Attempt.outcome).where(Attempt.job_id == job_id).order_by(Attempt.number)
        return list(session.scalars(statement))


def write(sessions: Sessions, lease: Lease, *lines: str) -> None:
    """Write lines of the form ``"error: text"`` to the job's log."""
    with sessions.begin() as session:
        leases.write_log(session, lease, lines=[NewLine(*line.split(": ", 1)) for line in lines])


StartHere = Callable[..., Supervisor]
AWorker = TypeVar("AWorker", WorkerProcess, Supervisor)


def run_as(sessions: Sessions, job_id: str, two: list[AWorker]) -> dict[str, AWorker]:
    """Return two workers by their role in the job: ``leader`` and ``node``."""
    with sessions.begin() as session:
        leader = worker_of(session.get_one(Job, job_id).worker or "")
    first, second = sorted(two, key=lambda worker: not _is(worker, leader))
    return {"leader": first, "node": second}


def _is(worker: WorkerProcess | Supervisor, name: str) -> bool:
    return worker._id == name if isinstance(worker, Supervisor) else str(worker.process.pid) in name.split(":")
