"""Jobs as rows: submit, find, lock. Lists are in ``listing``, the actions of clients in ``control``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import delete as sql_delete
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.store.accounts import projects
from api.store.ids import new_id
from api.store.queue import events, outbox
from api.store.queue.events import NewEvent
from api.store.states import ACTIONS, State, WrongState
from api.store.tables.jobs import Artifact, Job


def submit(session: Session, **asked: Any) -> Job:
    """Store a queued job, its first event and the workers' wake-up: all or none. ``asked``: columns of ``Job``.

    Raises QuotaExceeded.
    """
    projects.check_room(session, asked["project_id"], max_waiting=1, max_stored_bytes=1)
    job = Job(**{"id": new_id("job")} | asked)
    session.add(job)
    session.flush()
    events.announce(session, job, State.QUEUED)
    outbox.wake(session)
    session.flush()
    return job


def find(session: Session, job_id: str) -> Job | None:
    """Return the job of any project: for workers, and for jobs that ``find_own`` has found before."""
    return session.get(Job, job_id)


def find_own(session: Session, project_id: str, job_id: str) -> Job | None:
    """Return the job if it is the project's: all requests of clients go through this or ``lock_own``."""
    job = session.get(Job, job_id)
    return job if job is not None and job.project_id == project_id else None


def find_artifact(session: Session, job: Job) -> Artifact | None:
    return session.get(Artifact, job.artifact_id) if job.artifact_id else None


def find_artifacts(session: Session, jobs: Sequence[Job]) -> dict[str, Artifact]:
    """Return the artifacts of ``jobs`` by job id, with one query."""
    ids = [job.artifact_id for job in jobs if job.artifact_id]
    artifacts = session.scalars(select(Artifact).where(Artifact.id.in_(ids))) if ids else ()
    return {artifact.job_id: artifact for artifact in artifacts}


def owns_artifact(session: Session, project_id: str, folder: Path) -> bool:
    """Return True if the folder is that of an artifact of the project."""
    of_project = select(Artifact.id).join(Job, Job.id == Artifact.job_id).where(Job.project_id == project_id)
    return session.scalar(of_project.where(Artifact.path == str(folder))) is not None


def lock(session: Session, job_id: str) -> Job | None:
    """Return the job, with its row locked until the end of the transaction."""
    wanted = select(Job).where(Job.id == job_id).with_for_update()
    return session.scalar(wanted.execution_options(populate_existing=True))


def lock_own(session: Session, project_id: str, job_id: str) -> Job | None:
    """Return the job as ``lock`` does, if it is the project's. Never waits for a job of another project."""
    return lock(session, job_id) if find_own(session, project_id, job_id) else None


def edit(session: Session, job: Job, changes: Mapping[str, Any]) -> None:
    """Set what a client may change at any time (``name``, ``labels``, ``priority``, ``pinned``) on a locked job."""
    for name, value in changes.items():
        setattr(job, name, value)
    events.add(session, job, NewEvent("job_edited", dict(changes)))
    session.flush()


def delete(session: Session, job: Job) -> None:
    """Delete a locked job that has ended, with all rows that belong to it. Raises WrongState."""
    if job.state not in ACTIONS["delete"]:
        raise WrongState("delete", job.state)
    session.execute(sql_delete(Job).where(Job.id == job.id))
