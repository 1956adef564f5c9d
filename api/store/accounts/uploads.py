"""Uploads in parts as rows. The parts themselves are files; a row says that its file is whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

from sqlalchemy import DateTime, cast, func, select
from sqlalchemy import delete as sql_delete
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.store.tables.jobs import Upload, UploadPart

LIFETIME_S = 24 * 3600.0


def add(session: Session, upload: Upload) -> Upload:
    """Add the upload; it is deleted when nothing has happened to it for LIFETIME_S seconds."""
    upload.expires_at = _later()  # type: ignore[assignment]
    session.add(upload)
    session.flush()
    session.refresh(upload)
    return upload


def find(session: Session, project_id: str, upload_id: str) -> Upload | None:
    """Return the upload if it is the project's."""
    return session.scalar(select(Upload).where(Upload.id == upload_id, Upload.project_id == project_id))


def lock(session: Session, project_id: str, upload_id: str) -> Upload | None:
    """Return the upload as ``find`` does, with its row locked until the end of the transaction."""
    wanted = select(Upload).where(Upload.id == upload_id, Upload.project_id == project_id).with_for_update()
    return session.scalar(wanted.execution_options(populate_existing=True))


def parts(session: Session, upload_id: str) -> Sequence[UploadPart]:
    """Return the parts in the order of the file."""
    wanted = select(UploadPart).where(UploadPart.upload_id == upload_id).order_by(UploadPart.number)
    return session.scalars(wanted).all()


def put_part(session: Session, upload: Upload, part: UploadPart) -> UploadPart | None:
    """Store the row of a part of a locked upload. Returns the row that it replaces, if any."""
    before = session.scalar(
        select(UploadPart).where(UploadPart.upload_id == upload.id, UploadPart.number == part.number)
    )
    values = {"num_bytes": part.num_bytes, "sha256": part.sha256}
    wanted = insert(UploadPart).values(upload_id=upload.id, number=part.number, **values)
    session.execute(wanted.on_conflict_do_update(index_elements=["upload_id", "number"], set_=values))
    upload.expires_at = _later()  # type: ignore[assignment]
    return before


def find_known(session: Session, upload_ids: Collection[str]) -> set[str]:
    """Return those of ``upload_ids`` that exist."""
    return set(session.scalars(select(Upload.id).where(Upload.id.in_(upload_ids)))) if upload_ids else set()


def delete(session: Session, upload_id: str) -> None:
    session.execute(sql_delete(Upload).where(Upload.id == upload_id))


def purge(session: Session, remove_files: Callable[[str], None], *, limit: int = 100) -> int:
    """Delete the expired uploads, their files first, and return their number.

    A crash in between is made good next time.
    """
    over = select(Upload.id).where(Upload.expires_at < func.clock_timestamp()).limit(limit)
    upload_ids = session.scalars(over.with_for_update(skip_locked=True)).all()
    for upload_id in upload_ids:
        remove_files(upload_id)
        delete(session, upload_id)
    return len(upload_ids)


def _later() -> object:
    return cast(func.clock_timestamp(), DateTime(timezone=True)) + timedelta(seconds=LIFETIME_S)
