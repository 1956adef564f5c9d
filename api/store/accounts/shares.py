"""Read-only links as rows. A row holds the token's hash only: whoever reads the table cannot open a link with it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from api.store.ids import new_id
from api.store.tables.jobs import Artifact, Job
from api.store.tables.shares import Share


def add(session: Session, job_id: str, key_id: str | None, token_sha256: bytes, lasts_s: float) -> Share:
    """Store a link that lasts ``lasts_s`` seconds. Links that are over are deleted at this occasion."""
    now = func.clock_timestamp()
    session.execute(delete(Share).where(Share.expires_at <= now))
    share = Share(
        id=new_id("shr"),
        job_id=job_id,
        key_id=key_id,
        token_sha256=token_sha256,
        expires_at=now + timedelta(seconds=lasts_s),
    )
    session.add(share)
    session.flush()
    session.refresh(share)
    return share


def find_all(session: Session, job_id: str) -> Sequence[Share]:
    """Return the job's links that are not over, the oldest first."""
    wanted = select(Share).where(Share.job_id == job_id, Share.expires_at > func.clock_timestamp())
    return session.scalars(wanted.order_by(Share.id)).all()


def find(session: Session, job_id: str, share_id: str) -> Share | None:
    return session.scalar(select(Share).where(Share.id == share_id, Share.job_id == job_id))


def find_open(session: Session, token_sha256: bytes) -> tuple[Share, Artifact, str | None] | None:
    """Return (the link, the artifact of its job, the job's name) if the link is not over."""
    wanted = (
        select(Share, Artifact, Job.name)
        .join(Job, Job.id == Share.job_id)
        .join(Artifact, Artifact.id == Job.artifact_id)
        .where(Share.token_sha256 == token_sha256, Share.expires_at > func.clock_timestamp())
    )
    row = session.execute(wanted).one_or_none()
    return None if row is None else (row[0], row[1], row[2])
