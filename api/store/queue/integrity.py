"""The rows about stored files: the next ones to check, and the faults that were found."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

from sqlalchemy import delete, func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.store.tables.accounts import IntegrityFinding
from api.store.tables.jobs import Artifact, Dataset, Upload, UploadPart

RECHECK_DAYS = 7
PAGE = 200
KINDS = ("damaged", "missing", "orphan")

Thing = Artifact | Dataset
T = TypeVar("T", Artifact, Dataset)


@dataclass(frozen=True)
class Finding:
    """A fault of a file or a folder; ``path`` is below the data folder.

    ``object_id``: the artifact, dataset or upload whose row names it; None for the kind ``orphan``, which no row names.
    """

    kind: str
    path: str
    object_id: str | None
    detail: str


def claim_due(session: Session) -> Thing | None:
    """Claim the artifact or dataset that was checked longest ago, if that is RECHECK_DAYS.

    It counts as checked now, so that no other process does the same.
    """
    return _claim(session, Artifact) or _claim(session, Dataset)


def _claim(session: Session, table: type[T]) -> T | None:
    looked_at = func.coalesce(table.checked_at, table.created_at)
    long_ago = looked_at < func.clock_timestamp() - timedelta(days=RECHECK_DAYS)
    due = select(table).where(long_ago).order_by(looked_at).limit(1).with_for_update(skip_locked=True)
    thing = session.scalar(due)
    if thing is not None:
        thing.checked_at = func.clock_timestamp()
        session.flush()
    return thing


def page(session: Session, table: type[Artifact] | type[Dataset], after: str) -> list[Thing]:
    """Return the rows that come after this id."""
    return [*session.scalars(select(table).where(table.id > after).order_by(table.id).limit(PAGE))]


def find_open_parts(session: Session) -> Iterator[UploadPart]:
    """Yield the parts of the uploads that are still open: their files must exist."""
    still_open = Upload.dataset_id.is_(None), Upload.expires_at > func.clock_timestamp()
    yield from session.scalars(select(UploadPart).join(Upload, Upload.id == UploadPart.upload_id).where(*still_open))


def record_check(session: Session, thing: Thing, findings: Collection[Finding]) -> list[Finding]:
    """Store the findings of a check in place of the earlier ones. Returns what was stored.

    That is nothing if the artifact or dataset has been deleted meanwhile.
    """
    existing_id = session.scalar(
        select(type(thing).id).where(type(thing).id == thing.id).with_for_update(key_share=True)
    )
    session.execute(delete(IntegrityFinding).where(IntegrityFinding.object_id == thing.id))
    noted = [*findings] if existing_id else []
    _add(session, noted)
    return noted


def record_survey(session: Session, findings: Collection[Finding]) -> None:
    """Store all orphans and all missing parts in place of the earlier ones.

    The findings about objects that are gone are deleted.
    """
    owners = select(Artifact.id).union(select(Dataset.id))
    surveyed = or_(IntegrityFinding.object_id.is_(None), IntegrityFinding.object_id.not_in(owners))
    session.execute(delete(IntegrityFinding).where(surveyed))
    _add(session, findings)


def count(session: Session) -> dict[str, int]:
    """Return the number of findings of each kind."""
    rows = session.execute(select(IntegrityFinding.kind, func.count().label("number")).group_by(IntegrityFinding.kind))
    return dict.fromkeys(KINDS, 0) | {row.kind: row.number for row in rows}


def find_all(session: Session) -> list[Finding]:
    rows = session.scalars(select(IntegrityFinding).order_by(IntegrityFinding.kind, IntegrityFinding.path))
    return [Finding(row.kind, row.path, row.object_id, row.detail) for row in rows]


def _add(session: Session, findings: Collection[Finding]) -> None:
    for finding in sorted(findings, key=lambda finding: finding.path):  # two at once do not deadlock
        values = asdict(finding)
        wanted = insert(IntegrityFinding).values(values)
        session.execute(wanted.on_conflict_do_update(index_elements=["path"], set_=values))
