"""The operations of workers on publications, which are taken and given back as jobs are (``leases``).

They have fences of their own. A publisher that was paused or declared lost writes nothing; what it may still send is
harmless, because the Hub's commit names its parent and carries the publication's id.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session, aliased

from api.store.accounts import hub_tokens
from api.store.queue import events, jobs, logs, outbox
from api.store.queue.clock import from_now
from api.store.queue.events import NewEvent
from api.store.queue.leases import MAX_BACKOFF_S, MAX_LOST, Failure, LeaseLost, Order
from api.store.queue.logs import NewLine
from api.store.queue.publications import give_up, move
from api.store.tables.jobs import FENCE, Artifact, Job
from api.store.tables.publications import Publication, PublicationState


@dataclass(frozen=True)
class PublicationLease:
    """The right to publish one artifact, and what is needed for it."""

    job_id: str
    publication_id: str
    fence: int
    attempt: int
    target: dict[str, Any]
    folder: str
    manifest_sha256: str
    project_id: str
    hub_token: str | None
    sealed_hub_token: bytes | None


def claim(session: Session, *, worker: str, lease_s: float) -> PublicationLease | None:
    """Take the publication that has been due longest, or return None. No two go to one folder at a time."""
    busy = aliased(Publication)
    same_folder = select(busy.id).where(
        busy.state == PublicationState.PUBLISHING, busy.target["to"].astext == Publication.target["to"].astext
    )
    due = (
        select(Publication, Job, Artifact)
        .join(Job, Job.id == Publication.job_id)
        .join(Artifact, Artifact.id == Job.artifact_id)
        .where(
            Publication.state == PublicationState.PENDING,
            Publication.run_at <= func.clock_timestamp(),
            ~same_folder.exists(),
        )
        .order_by(Publication.run_at, Publication.id)
        .limit(1)
        .with_for_update(skip_locked=True, of=[Publication, Job])
    )
    row = session.execute(due).one_or_none()
    if row is None:
        return None
    publication, job, artifact = row
    fence = session.execute(FENCE.next_value()).scalar_one()
    publication.attempt += 1
    publication.fence, publication.worker, publication.lease_expires_at = fence, worker, from_now(lease_s)
    publication.progress = publication.error = None
    move(session, job, publication, PublicationState.PUBLISHING)
    name = publication.hub_token
    return PublicationLease(
        job_id=job.id,
        publication_id=publication.id,
        fence=fence,
        attempt=publication.attempt,
        target=publication.target,
        folder=artifact.path,
        manifest_sha256=artifact.manifest_sha256,
        project_id=publication.project_id,
        hub_token=name,
        sealed_hub_token=hub_tokens.find_sealed(session, publication.project_id, name) if name else None,
    )


def renew(session: Session, lease: PublicationLease, *, lease_s: float) -> Order | None:
    """Extend the lease (its heartbeat). Raises LeaseLost, also when the lease has run out."""
    beat = (
        update(Publication)
        .where(
            Publication.id == lease.publication_id,
            Publication.fence == lease.fence,
            Publication.lease_expires_at > func.clock_timestamp(),
        )
        .values(lease_expires_at=from_now(lease_s))
        .returning(Publication.id)
    )
    if session.scalar(beat) is None:
        raise LeaseLost
    return None


def record(session: Session, lease: PublicationLease, *, happened: Sequence[NewEvent]) -> None:
    """Append events to the job's event log, and store the newest progress in the publication."""
    job, publication = _held(session, lease)
    for event in happened:
        if event.kind == "progress":
            publication.progress = event.data
    events.add(session, job, *happened)


def write_log(session: Session, lease: PublicationLease, *, lines: Sequence[NewLine]) -> None:
    """Append the child's output to the job's log."""
    job, _ = _held(session, lease)
    logs.append(session, job, lines)


def succeed(session: Session, lease: PublicationLease, *, revision: str, url: str) -> None:
    """Mark the publication as published, with its revision and URL."""
    job, publication = _held(session, lease)
    publication.revision, publication.url = revision, url
    publication.finished_at = func.clock_timestamp()
    _let_go(publication)
    move(session, job, publication, PublicationState.PUBLISHED, revision=revision, url=url)


def fail(session: Session, lease: PublicationLease, failure: Failure, *, retry_base_s: float) -> None:
    """Schedule another try if that can help and there are tries left; else the publication has failed."""
    job, publication = _held(session, lease)
    publication.failure_count += 1
    backoff_s = min(retry_base_s * 2.0 ** (publication.failure_count - 1), MAX_BACKOFF_S) * random.uniform(1.0, 1.25)
    if failure.retryable and publication.failure_count < failure.max_failures:
        _wait(session, job, publication, failure, backoff_s)
    else:
        _give_up(session, job, publication, failure)


def release(session: Session, lease: PublicationLease) -> None:
    """Give back the publication because the worker stops: another one goes on. It is charged to nobody."""
    job, publication = _held(session, lease)
    _let_go(publication)
    publication.run_at = from_now(0)
    move(session, job, publication, PublicationState.PENDING)
    outbox.wake(session)


def reap(session: Session, *, limit: int = 100) -> int:
    """Take back publications whose lease ran out; they have failed after MAX_LOST losses."""
    expired = (
        select(Publication, Job)
        .join(Job, Job.id == Publication.job_id)
        .where(Publication.state == PublicationState.PUBLISHING, Publication.lease_expires_at < func.clock_timestamp())
        .order_by(Publication.lease_expires_at)
        .limit(limit)
        .with_for_update(skip_locked=True, of=[Publication, Job])
    )
    lost = session.execute(expired).all()
    for publication, job in lost:
        publication.lost_count += 1
        gone = Failure("worker_lost", "The worker was lost while it published.", retryable=True)
        if publication.lost_count > MAX_LOST:
            _give_up(session, job, publication, gone)
        else:
            _wait(session, job, publication, gone, 0)
            outbox.wake(session)
    return len(lost)


def _held(session: Session, lease: PublicationLease) -> tuple[Job, Publication]:
    """Return the job and the leased publication, their rows locked. Raises LeaseLost if another fence took over."""
    job = jobs.lock(session, lease.job_id)
    mine = select(Publication).where(
        Publication.id == lease.publication_id,
        Publication.fence == lease.fence,
        Publication.state == PublicationState.PUBLISHING,
    )
    publication = session.scalar(mine.with_for_update().execution_options(populate_existing=True))
    if job is None or publication is None:
        raise LeaseLost
    return job, publication


def _wait(session: Session, job: Job, publication: Publication, failure: Failure, delay_s: float) -> None:
    _let_go(publication)
    publication.error, publication.run_at = failure.to_dict(), from_now(delay_s)
    move(session, job, publication, PublicationState.PENDING, error=publication.error)


def _give_up(session: Session, job: Job, publication: Publication, failure: Failure) -> None:
    _let_go(publication)
    give_up(session, job, publication, failure.to_dict())


def _let_go(publication: Publication) -> None:
    publication.fence = publication.worker = publication.lease_expires_at = None
