"""Projects as rows, and their quotas: how much of the service one project may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.store.states import HELD, State
from api.store.tables import Artifact, Job, Project

DEFAULT = "prj_" + "0" * 32  # made by the migration; what was there before projects belongs to it
WAITING = frozenset({State.QUEUED, State.RETRY_WAIT, State.PAUSED})  # paused counts: else a pause would make room


class QuotaExceeded(Exception):
    """The project has ``used`` all of its ``limit`` of ``quota``, which is a column of ``Project``."""

    def __init__(self, quota: str, limit: int, used: int) -> None:
        super().__init__(f"{quota}: {used} of {limit}")
        self.quota = quota
        self.limit = limit
        self.used = used


@dataclass(frozen=True)
class Usage:
    """What a project takes now."""

    num_waiting: int
    num_running: int
    stored_bytes: int


def find(session: Session, project_id: str) -> Project | None:
    return session.get(Project, project_id)


def find_by_name(session: Session, name: str) -> Project | None:
    return session.scalar(select(Project).where(Project.name == name))


def find_all(session: Session) -> Sequence[Project]:
    """All projects, the oldest first."""
    return session.scalars(select(Project).order_by(Project.created_at, Project.id)).all()


def measure(session: Session, project_id: str) -> Usage:
    return Usage(
        count_jobs(session, project_id, WAITING),
        count_jobs(session, project_id, HELD),
        _stored_bytes(session, project_id),
    )


def count_jobs(session: Session, project_id: str, states: frozenset[State]) -> int:
    counted = select(func.count()).where(Job.project_id == project_id, Job.state.in_(states))
    return session.scalar(counted) or 0


def check_room(session: Session, project_id: str) -> None:
    """Raises QuotaExceeded unless one more job may wait. Of two at the same time the second waits for the first."""
    project = session.get_one(Project, project_id)
    if project.max_waiting is None and project.max_stored_bytes is None:
        return
    lock(session, project_id)
    if project.max_waiting is not None:
        _check("max_waiting", project.max_waiting, count_jobs(session, project_id, WAITING))
    if project.max_stored_bytes is not None:
        _check("max_stored_bytes", project.max_stored_bytes, _stored_bytes(session, project_id))


def may_run(session: Session, project_id: str) -> bool:
    """Whether one more job of the project may run. Holds the project's row, so that two claims count one another."""
    project = session.get_one(Project, project_id)
    if project.max_running is None:
        return True
    lock(session, project_id)
    return count_jobs(session, project_id, HELD) < project.max_running


def lock(session: Session, project_id: str) -> None:
    """Until the end of the transaction; rows that only refer to the project are not kept waiting."""
    session.execute(select(Project.id).where(Project.id == project_id).with_for_update(key_share=True))


def _check(quota: str, limit: int, used: int) -> None:
    if used >= limit:
        raise QuotaExceeded(quota, limit, used)


def _stored_bytes(session: Session, project_id: str) -> int:
    kept = select(func.sum(Artifact.num_bytes)).join(Job, Job.id == Artifact.job_id)
    return int(session.scalar(kept.where(Job.project_id == project_id)) or 0)
