"""Data retention: deletes jobs some time after their end, or only their event logs and log lines.

The operator sets days for all projects; a project may keep less by a policy of its own. Nobody's days apply to a job
that is pinned, that is a version in the model registry, or whose artifact is still to be published.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Row, Text, any_, cast, delete, exists, func, not_, or_, select
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.orm import Session

from api.store.accounts import audit
from api.store.accounts.audit import Caller
from api.store.states import FINAL, State
from api.store.tables.accounts import RetentionPolicy
from api.store.tables.jobs import Artifact, Event, Job, LogLine
from api.store.tables.publications import OPEN, Publication
from api.store.tables.registry import RegistryVersion

BATCH = 100


@dataclass(frozen=True)
class Keep:
    """A retention policy: a job stays as long as one of the two limits keeps it. With neither all jobs stay.

    ``last``: the number of the newest jobs that succeeded, and of the newest that did not; ``days`` after their end.
    Pinned ones and versions of the registry are not counted.
    """

    last: int | None = None
    days: int | None = None


@dataclass(frozen=True)
class Due:
    """A job that a policy does not keep. ``num_newer``: how many jobs of its outcome ended after it."""

    job_id: str
    name: str | None
    state: str
    finished_at: datetime
    num_bytes: int
    num_newer: int
    age_days: float


def find_policy(session: Session, project_id: str) -> Keep:
    policy = session.get(RetentionPolicy, project_id)
    return Keep(policy.keep_last, policy.keep_days) if policy else Keep()


def find_policies(session: Session) -> dict[str, Keep]:
    """Return the policies by project id, of the projects that have one."""
    return {
        policy.project_id: Keep(policy.keep_last, policy.keep_days)
        for policy in session.scalars(select(RetentionPolicy))
    }


def set_policy(session: Session, project_id: str, keep: Keep) -> None:
    if keep == Keep():
        session.execute(delete(RetentionPolicy).where(RetentionPolicy.project_id == project_id))
        return
    values = {"keep_last": keep.last, "keep_days": keep.days}
    wanted = insert(RetentionPolicy).values(project_id=project_id, **values)
    session.execute(wanted.on_conflict_do_update(index_elements=["project_id"], set_=values))


def find_due(session: Session, project_id: str, keep: Keep, *, limit: int) -> Sequence[Due]:
    """Return the project's jobs that ``keep`` does not keep, the oldest first."""
    if keep == Keep():
        return []
    newest_first = func.row_number().over(
        partition_by=Job.state == State.SUCCEEDED, order_by=(Job.finished_at.desc(), Job.id.desc())
    )
    age_s = func.extract("epoch", func.clock_timestamp() - Job.finished_at)
    ended = (
        select(
            *(Job.id, Job.name, Job.state, Job.finished_at),
            func.coalesce(Artifact.num_bytes, 0).label("num_bytes"),
            (newest_first - 1).label("num_newer"),
            (age_s / 86400).label("age_days"),
        )
        .outerjoin(Artifact, Artifact.id == Job.artifact_id)
        .where(Job.project_id == project_id, *_may_go())
        .subquery()
    )
    due = select(ended).order_by(ended.c.finished_at, ended.c.id).limit(limit)
    if keep.last is not None:
        due = due.where(ended.c.num_newer >= keep.last)
    if keep.days is not None:
        due = due.where(ended.c.age_days > keep.days)
    return [_due(row) for row in session.execute(due)]


def purge_due(session: Session, caller: Caller, keep: Keep) -> Sequence[Due]:
    """Delete up to BATCH jobs of the caller's project that ``keep`` does not keep, with all that belongs to them."""
    due = {job.job_id: job for job in find_due(session, caller.project_id, keep, limit=BATCH)}
    ids = _purge(session, caller, Job.id.in_(due), keep_last=keep.last, keep_days=keep.days)
    return [due[job_id] for job_id in due if job_id in ids]


def count_pinned(session: Session, project_id: str) -> int:
    pinned = select(func.count()).select_from(Job).where(Job.project_id == project_id, Job.pinned)
    return session.scalar(pinned.where(Job.state.in_(FINAL))) or 0


def purge_event_logs(session: Session, *, keep_days: float) -> int:
    """Delete events and log lines of jobs that ended more than ``keep_days`` ago. Returns the number of jobs."""
    has_any = or_(exists().where(Event.job_id == Job.id), exists().where(LogLine.job_id == Job.id))
    old = select(Job.id).where(Job.state.in_(FINAL), _ended_before(keep_days), has_any).limit(BATCH)
    ids = session.scalars(old.with_for_update(skip_locked=True)).all()
    for table in (Event, LogLine):
        session.execute(delete(table).where(table.job_id.in_(ids)))
    return len(ids)


def purge_jobs(session: Session, *, keep_days: float) -> Collection[str]:
    """Delete jobs that ended more than ``keep_days`` ago, with all their rows. Returns their ids."""
    return _purge(session, None, _ended_before(keep_days))


def find_known(session: Session, job_ids: Collection[str]) -> set[str]:
    """Return those of ``job_ids`` that exist."""
    return set(session.scalars(select(Job.id).where(_among(job_ids))))


def find_artifacts_of_ended(session: Session, job_ids: Collection[str]) -> dict[str, set[str]]:
    """Return those of ``job_ids`` that have ended, each with the names of the folders of its artifacts."""
    wanted = select(Job.id, Artifact.manifest_sha256).outerjoin(Artifact, Artifact.job_id == Job.id)
    names: dict[str, set[str]] = {}
    for job_id, name in session.execute(wanted.where(_among(job_ids), Job.state.in_(FINAL))):
        names.setdefault(job_id, set()).add(name)
    return names


def _purge(session: Session, caller: Caller | None, which: ColumnElement[bool], **why: Any) -> Collection[str]:
    """Delete jobs that ``which`` selects and that may go. Returns their ids. ``caller`` None: the service itself."""
    wanted = select(Job).where(*_may_go(), which).limit(BATCH).with_for_update(skip_locked=True)
    gone = set()
    for job in session.scalars(wanted.execution_options(populate_existing=True)).all():
        may_still = session.scalar(select(Job.id).where(Job.id == job.id, *_may_go()))
        if may_still is not None:  # it was registered or published before its row was locked
            audit.note(session, caller or Caller(job.project_id, None, frozenset()), "job.purge", job.id, **why)
            session.execute(delete(Job).where(Job.id == job.id))
            gone.add(job.id)
    return gone


def _among(job_ids: Collection[str]) -> ColumnElement[bool]:
    """Return the condition for these jobs: one parameter, however many they are."""
    return Job.id == any_(cast([*job_ids], ARRAY(Text)))


def _may_go() -> tuple[ColumnElement[bool], ...]:
    leaving = exists().where(Publication.job_id == Job.id, Publication.state.in_(OPEN))
    registered = exists().where(RegistryVersion.job_id == Job.id)
    return Job.state.in_(FINAL), not_(Job.pinned), not_(leaving), not_(registered)


def _ended_before(days: float) -> ColumnElement[bool]:
    return Job.finished_at < func.clock_timestamp() - timedelta(days=days)


def _due(row: Row[Any]) -> Due:
    columns = row._mapping
    job_id, age_days = columns["id"], float(columns["age_days"])
    names = ("name", "state", "finished_at", "num_bytes", "num_newer")
    return Due(job_id=job_id, age_days=age_days, **{name: columns[name] for name in names})
