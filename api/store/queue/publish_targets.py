"""Folders that artifacts are published to, as rows: each belongs to the project that published to it first."""

from __future__ import annotations

from sqlalchemy import Select, func, literal, or_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.store.tables.publications import PublishTarget


def is_of_another(session: Session, project_id: str, url: str) -> bool:
    """Return True if the folder, one in it or one around it belongs to another project."""
    return session.scalar(_of_others(project_id, url)) is not None


def take(session: Session, project_id: str, url: str) -> bool:
    """Make the folder the project's. Returns False if it, one in it or one around it is another project's."""
    session.execute(text("LOCK TABLE publish_target IN SHARE ROW EXCLUSIVE MODE"))  # of two at once one is first
    if is_of_another(session, project_id, url):
        return False
    session.execute(insert(PublishTarget).values(url=url, project_id=project_id).on_conflict_do_nothing())
    return True


def _of_others(project_id: str, url: str) -> Select[str]:
    theirs, below = PublishTarget.url, func.starts_with
    overlap = or_(theirs == url, below(theirs, f"{url}/"), below(literal(url), theirs + "/"))
    return select(theirs).where(PublishTarget.project_id != project_id, overlap).limit(1)
