"""What is forgotten after its time: jobs that have ended, or only what they said."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta

from sqlalchemy import ColumnElement, delete, exists, func, or_, select
from sqlalchemy.orm import Session

from api.store import audit
from api.store.audit import Caller
from api.store.states import FINAL
from api.store.tables import Event, Job, LogLine

BATCH = 100


def purge_stories(session: Session, *, keep_days: float) -> int:
    """Forget events and log lines of jobs that ended so long ago; of how many jobs."""
    has_any = or_(exists().where(Event.job_id == Job.id), exists().where(LogLine.job_id == Job.id))
    old = select(Job.id).where(*_ended_before(keep_days), has_any).limit(BATCH)
    ids = session.scalars(old.with_for_update(skip_locked=True)).all()
    for table in (Event, LogLine):
        session.execute(delete(table).where(table.job_id.in_(ids)))
    return len(ids)


def purge_jobs(session: Session, *, keep_days: float) -> Sequence[str]:
    """Delete jobs that ended so long ago, with all rows that belong to them; their ids."""
    old = select(Job).where(*_ended_before(keep_days)).limit(BATCH).with_for_update(skip_locked=True)
    found = session.scalars(old).all()
    for job in found:
        audit.note(session, Caller(job.project_id, None, frozenset()), "job.purge", job.id)
        session.execute(delete(Job).where(Job.id == job.id))
    return [job.id for job in found]


def find_known(session: Session, job_ids: Collection[str]) -> set[str]:
    """Those of ``job_ids`` that there are."""
    return set(session.scalars(select(Job.id).where(Job.id.in_(job_ids)))) if job_ids else set()


def _ended_before(days: float) -> tuple[ColumnElement[bool], ...]:
    return Job.state.in_(FINAL), Job.finished_at < func.clock_timestamp() - timedelta(days=days)
