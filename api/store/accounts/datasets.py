"""Uploaded datasets as rows: a project sees its own."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import cast, func, or_, select
from sqlalchemy import delete as sql_delete
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session

from api.store.accounts import projects
from api.store.states import FINAL
from api.store.tables.jobs import Dataset, Job


class DatasetInUse(Exception):
    """Jobs that have not ended need the dataset."""

    def __init__(self, job_ids: Sequence[str]) -> None:
        super().__init__(f"{len(job_ids)} jobs need it")
        self.job_ids = job_ids


def file_name(dataset: Dataset) -> str:
    """Return the name of the dataset's file in the service's folder of datasets."""
    return f"{dataset.sha256}.{dataset.format}"


def find(session: Session, project_id: str, dataset_id: str) -> Dataset | None:
    """Return the dataset if it is the project's."""
    return session.scalar(select(Dataset).where(Dataset.id == dataset_id, Dataset.project_id == project_id))


def page(session: Session, project_id: str, *, limit: int, after: str | None = None) -> Sequence[Dataset]:
    """Return the project's datasets, newest first; ``after`` is the id of the last one seen (ids sort by age)."""
    wanted = select(Dataset).where(Dataset.project_id == project_id).order_by(Dataset.id.desc()).limit(limit)
    return session.scalars(wanted.where(Dataset.id < after) if after else wanted).all()


def add(session: Session, dataset: Dataset) -> None:
    """Add a dataset. Raises QuotaExceeded."""
    projects.check_room(session, dataset.project_id, max_datasets=1, max_dataset_bytes=dataset.num_bytes)
    session.add(dataset)
    session.flush()


def keep_for_job(session: Session, project_id: str, dataset_id: str) -> bool:
    """Hold the project's dataset until the end of this transaction, which stores a job that needs it.

    Returns False if it is gone.
    """
    held = select(Dataset.id).where(Dataset.id == dataset_id, Dataset.project_id == project_id)
    return session.scalar(held.with_for_update(read=True, key_share=True)) is not None


def delete(session: Session, dataset: Dataset) -> None:
    """Delete a dataset. Raises DatasetInUse while a job that has not ended needs it.

    A job that is stored meanwhile waits for the lock.
    """
    session.execute(select(Dataset.id).where(Dataset.id == dataset.id).with_for_update())
    sources = cast(Job.spec["calibration"]["sources"], JSONB)
    named = or_(
        Job.dataset_id == dataset.id,
        Job.evaluation_dataset_id == dataset.id,
        sources.contains([{"source": dataset.id}]),
    )
    needing = select(Job.id).where(named, Job.state.not_in(FINAL)).order_by(Job.id).limit(20)
    if job_ids := session.scalars(needing).all():
        raise DatasetInUse(job_ids)
    session.execute(sql_delete(Dataset).where(Dataset.id == dataset.id))


def lock_file(session: Session, sha256: str) -> None:
    """Lock the file of this content until the end of the transaction: nobody else adds or removes it."""
    session.execute(select(func.pg_advisory_xact_lock(int(sha256[:15], 16))))


def has_file(session: Session, sha256: str, format: str) -> bool:
    """Return True if a dataset needs this file."""
    wanted = select(Dataset.id).where(Dataset.sha256 == sha256, Dataset.format == format).limit(1)
    return session.scalar(wanted) is not None
