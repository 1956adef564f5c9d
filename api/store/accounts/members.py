"""Members of projects as rows. What changes one, or the keys of one, locks the project first (``projects.lock``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from api.store.accounts.keys import is_live
from api.store.tables.jobs import ApiKey, Member, Project


@dataclass(frozen=True)
class Listed:
    """A member with the number of the keys that are valid, and the last use of any key."""

    member: Member
    num_keys: int
    last_used_at: datetime | None


def find(session: Session, project_id: str, member_id: str) -> Member | None:
    """Return a present member of the project."""
    return session.scalar(_present(project_id).where(Member.id == member_id))


def find_by_name(session: Session, project_id: str, name: str) -> Member | None:
    """Return the present member of the project who has this name."""
    return session.scalar(_present(project_id).where(Member.name == name))


def find_of_subject(session: Session, issuer: str, subject: str) -> Sequence[Member]:
    """Return the rows of a person of an OpenID provider, one for each project; of removed ones, too."""
    return session.scalars(select(Member).where(Member.issuer == issuer, Member.subject == subject)).all()


def find_reachable(session: Session, key_id: str) -> Sequence[tuple[Project, ApiKey]]:
    """Return the projects that a sign-in with this key can be for, by name, each with the key for it.

    For a person of an OpenID provider these are the projects of the last sign-in; for all others that of the key.
    """
    own = session.get_one(ApiKey, key_id)
    wanted = select(Project, ApiKey).join(ApiKey, ApiKey.project_id == Project.id).order_by(Project.name)
    if own.member is None or own.member.subject is None:
        wanted = wanted.where(ApiKey.id == key_id)
    else:
        person = Member.issuer == own.member.issuer, Member.subject == own.member.subject
        wanted = wanted.join(Member, Member.id == ApiKey.member_id).where(*person, is_live())
    return [(project, key) for project, key in session.execute(wanted).all()]


def find_all(session: Session, project_id: str) -> Sequence[Listed]:
    """Return the present members of the project, the oldest first."""
    wanted = _present(project_id).order_by(Member.created_at, Member.id)
    return [Listed(*row) for row in session.execute(_with_keys(wanted))]


def find_listed(session: Session, member: Member) -> Listed:
    wanted = select(Member).where(Member.id == member.id)
    return Listed(*session.execute(_with_keys(wanted)).one())


def remove(session: Session, member: Member) -> None:
    """Remove the member. The row stays, and the name becomes free."""
    member.removed_at = func.clock_timestamp()
    session.flush()


def _present(project_id: str) -> Select[Member]:
    return select(Member).where(Member.project_id == project_id, Member.removed_at.is_(None))


def _with_keys(members: Select[Member]) -> Select[Member, int, datetime | None]:
    keys = func.count(ApiKey.id).filter(is_live()), func.max(ApiKey.last_used_at)
    return members.add_columns(*keys).outerjoin(ApiKey, ApiKey.member_id == Member.id).group_by(Member.id)
