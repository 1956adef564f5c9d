"""What clients do with jobs: submit, look, cancel."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, select, tuple_
from sqlalchemy.orm import Session

from api.store import events, outbox
from api.store.events import NewEvent
from api.store.ids import new_id
from api.store.states import FINAL, State
from api.store.tables import Artifact, Job


class AlreadyFinal(Exception):
    """The job has ended and cannot be changed any more."""


def submit(session: Session, **asked: Any) -> Job:
    """A queued job, its first event and the workers' wake-up: all three or none."""
    job = Job(id=new_id("job"), **asked)
    session.add(job)
    session.flush()
    events.add(session, job, NewEvent("state_changed", {"state": State.QUEUED}))
    outbox.wake(session)
    session.flush()
    return job


def find(session: Session, job_id: str) -> Job | None:
    return session.get(Job, job_id)


def find_artifact(session: Session, job: Job) -> Artifact | None:
    return session.get(Artifact, job.artifact_id) if job.artifact_id else None


def find_artifacts(session: Session, jobs: Sequence[Job]) -> dict[str, Artifact]:
    """The artifacts of ``jobs`` by job id, in one query."""
    ids = [job.artifact_id for job in jobs if job.artifact_id]
    found = session.scalars(select(Artifact).where(Artifact.id.in_(ids))) if ids else ()
    return {artifact.job_id: artifact for artifact in found}


def page(
    session: Session, *, limit: int, states: Collection[State] = (), after: tuple[datetime, str] | None = None
) -> Sequence[Job]:
    """Newest first. ``after`` is (created_at, id) of the last job seen: a keyset, so pages never shift."""
    wanted = select(Job).order_by(Job.created_at.desc(), Job.id.desc()).limit(limit)
    if states:
        wanted = wanted.where(Job.state.in_(states))
    if after:
        wanted = wanted.where(tuple_(Job.created_at, Job.id) < after)
    return session.scalars(wanted).all()


def request_cancel(session: Session, job_id: str) -> Job | None:
    """Cancel a waiting job at once; ask the worker of a running one, which learns of it with its next heartbeat.

    Raises AlreadyFinal. Asking twice is the same as asking once. None if there is no such job.
    """
    job = lock(session, job_id)
    if job is None or job.state == State.CANCELLING:
        return job
    if job.state in FINAL:
        raise AlreadyFinal
    job.cancel_requested_at = func.clock_timestamp()
    if job.state == State.RUNNING:
        job.state = State.CANCELLING
    else:
        job.state = State.CANCELLED
        job.finished_at = func.clock_timestamp()
    events.add(session, job, NewEvent("state_changed", {"state": job.state}))
    session.flush()
    session.refresh(job)
    return job


def lock(session: Session, job_id: str) -> Job | None:
    """The job, with its row locked until the end of the transaction."""
    wanted = select(Job).where(Job.id == job_id).with_for_update()
    return session.scalar(wanted.execution_options(populate_existing=True))
