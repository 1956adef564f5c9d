"""Projects as rows, and their quotas: how much of the service one project may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from api.store.states import HELD, State
from api.store.tables.accounts import Webhook
from api.store.tables.jobs import Artifact, Dataset, Job, Project, Upload

DEFAULT = "prj_" + "0" * 32  # made by the migration; what was there before projects belongs to it
WAITING = frozenset({State.QUEUED, State.RETRY_WAIT, State.PAUSED})  # paused counts: else a pause would make room


@dataclass(frozen=True)
class Quota:
    """A limit that a project may have, a column of ``Project``.

    ``used``: the field of ``Usage`` that counts against it. ``default``: the limit of a project that has none of its
    own. ``room``: the advice when it is used up.
    """

    unit: str
    used: str
    room: str
    default: int | None = None


QUOTAS = {
    "max_waiting": Quota(
        "jobs", "num_waiting", "Wait until some of the project's waiting jobs have run, or cancel some."
    ),
    "max_running": Quota("jobs", "num_running", "Wait until some of the project's jobs have ended."),
    "max_stored_bytes": Quota("bytes", "stored_bytes", "Delete jobs whose artifacts are no longer needed."),
    "max_datasets": Quota("datasets", "num_datasets", "Delete datasets that are no longer needed."),
    "max_dataset_bytes": Quota("bytes", "dataset_bytes", "Delete datasets that are no longer needed."),
    "max_uploads": Quota("uploads", "num_uploads", "Complete or cancel some of the open uploads.", 100),
    "max_streams": Quota("streams", "num_streams", "Close some of the project's event and log streams.", 1000),
    "max_webhooks": Quota("webhooks", "num_webhooks", "Delete webhooks that are no longer needed.", 20),
}


class QuotaExceeded(Exception):
    """The project has used ``used`` of its ``limit`` of ``quota``, and ``more`` is too much."""

    def __init__(self, quota: str, limit: int, used: int, more: int = 1) -> None:
        super().__init__(f"{quota}: {used} of {limit}")
        self.quota = quota
        self.limit = limit
        self.used = used
        self.more = more


@dataclass(frozen=True)
class Usage:
    """The present usage of a project. Streams are no rows: ``api.http.stream_permits`` counts them."""

    num_waiting: int = 0
    num_running: int = 0
    stored_bytes: int = 0
    num_datasets: int = 0
    dataset_bytes: int = 0
    num_uploads: int = 0
    num_webhooks: int = 0


def find(session: Session, project_id: str) -> Project | None:
    return session.get(Project, project_id)


def find_by_name(session: Session, name: str) -> Project | None:
    return session.scalar(select(Project).where(Project.name == name))


def find_all(session: Session) -> Sequence[Project]:
    """Return all projects, the oldest first."""
    return session.scalars(select(Project).order_by(Project.created_at, Project.id)).all()


def measure(session: Session, project_id: str) -> Usage:
    return measure_all(session, [project_id])[project_id]


def measure_all(session: Session, project_ids: Sequence[str]) -> dict[str, Usage]:
    """Return the present usage of each of the projects, with one query for each kind of object."""
    usage: dict[str, dict[str, int]] = {project_id: {} for project_id in project_ids}
    for name, (owner, wanted) in _counted().items():
        grouped = wanted.add_columns(owner).where(owner.in_(project_ids)).group_by(owner)
        for number, project_id in session.execute(grouped):
            usage[project_id][name] = int(number)
    return {project_id: Usage(**counts) for project_id, counts in usage.items()}


def limit_of(project: Project, quota: str) -> int | None:
    limit: int | None = getattr(project, quota)
    return QUOTAS[quota].default if limit is None else limit


def check_room(session: Session, project_id: str, **wanted: int) -> None:
    """Check that the project may have so much more of each quota, as ``max_datasets=1``. Raises QuotaExceeded.

    Of two checks at the same time the second waits for the first.
    """
    project = session.get_one(Project, project_id)
    limits = {quota: limit for quota in wanted if (limit := limit_of(project, quota)) is not None}
    if not limits:
        return
    lock(session, project_id)
    for quota, limit in limits.items():
        used = _count(session, project_id, QUOTAS[quota].used)
        if used + wanted[quota] > limit:
            raise QuotaExceeded(quota, limit, used, wanted[quota])


def may_run(session: Session, project_id: str) -> bool:
    """Return True if one more job of the project may run. Locks the project: two claims count one another."""
    project = session.get_one(Project, project_id)
    if project.max_running is None:
        return True
    lock(session, project_id)
    return _count(session, project_id, "num_running") < project.max_running


def lock(session: Session, project_id: str) -> None:
    """Lock the project until the end of the transaction; rows that only refer to it are not kept waiting."""
    session.execute(select(Project.id).where(Project.id == project_id).with_for_update(key_share=True))


def _count(session: Session, project_id: str, what: str) -> int:
    owner, wanted = _counted()[what]
    return int(session.scalar(wanted.where(owner == project_id)) or 0)


@cache
def _counted() -> dict[str, tuple[InstrumentedAttribute[str], Select[Any]]]:
    """Return for each field of ``Usage`` (the column of the project's id, the query that counts)."""
    kept = select(func.sum(Artifact.num_bytes)).join(Job, Job.id == Artifact.job_id)
    is_open = Upload.dataset_id.is_(None), Upload.expires_at > func.clock_timestamp()
    number = select(func.count())
    return {
        "num_waiting": (Job.project_id, number.where(Job.state.in_(WAITING))),
        "num_running": (Job.project_id, number.where(Job.state.in_(HELD))),
        "stored_bytes": (Job.project_id, kept),
        "num_datasets": (Dataset.project_id, number),
        "dataset_bytes": (Dataset.project_id, select(func.sum(Dataset.num_bytes))),
        "num_uploads": (Upload.project_id, number.where(*is_open)),
        "num_webhooks": (Webhook.project_id, number),
    }
