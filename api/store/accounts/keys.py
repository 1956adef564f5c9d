"""API keys as rows. ``api.http.security`` defines their form and checks them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, bindparam, case, func, or_, select, update
from sqlalchemy.orm import Session

from api.store.tables.jobs import ApiKey, Member, Project

USE_NOTED_EVERY = timedelta(minutes=1)  # a poll must not be a write


@dataclass(frozen=True)
class ValidKey:
    """A key that a request is checked against: the hashes of the secrets that open it, and its scopes."""

    id: str
    project_id: str
    scopes: frozenset[str]
    secrets_sha256: tuple[bytes, ...]
    used_lately: bool
    requests_per_minute: int | None


def add(session: Session, key: ApiKey) -> None:
    session.add(key)
    session.flush()


def is_live() -> ColumnElement[bool]:
    """Return the condition of a key that is neither revoked nor over."""
    now = func.clock_timestamp()
    return and_(ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now))


def find_valid(session: Session, key_id: str) -> ValidKey | None:
    """Return the key, unless it was revoked or has expired. Only secrets whose time is not over are in it."""
    return find_all_valid(session, [key_id]).get(key_id)


def find_all_valid(session: Session, key_ids: Collection[str]) -> dict[str, ValidKey]:
    """Return the keys that are valid, by id, with one query."""
    valid_keys = {}
    for key_id, project_id, scopes, secret, previous, used_lately, rate in session.execute(
        _valid(), {"key_ids": list(key_ids)}
    ):
        secrets = tuple(digest for digest in (secret, previous) if digest is not None)
        valid_keys[key_id] = ValidKey(key_id, project_id, frozenset(scopes), secrets, used_lately, rate)
    return valid_keys


@cache
def _valid() -> Select[Any]:
    """Return the query for valid keys. Made once: to make it takes longer than to run it, and every request runs it."""
    now = func.clock_timestamp()
    wanted = select(
        ApiKey.id,
        ApiKey.project_id,
        ApiKey.scopes,
        ApiKey.secret_sha256,
        case((ApiKey.previous_until > now, ApiKey.previous_sha256)),
        func.coalesce(ApiKey.last_used_at > now - USE_NOTED_EVERY, False),
        Project.requests_per_minute,
    ).join(Project, Project.id == ApiKey.project_id)
    named = ApiKey.id.in_(bindparam("key_ids", expanding=True))
    return wanted.where(named, is_live())


def is_any_valid(session: Session) -> bool:
    """Return True if any key is valid."""
    return session.scalar(select(ApiKey.id).where(is_live()).limit(1)) is not None


def is_any_live_with(session: Session, project_id: str, scope: str) -> bool:
    """Return True if the project has a valid key with this scope."""
    wanted = select(ApiKey.id).where(ApiKey.project_id == project_id, ApiKey.scopes.contains([scope]), is_live())
    return session.scalar(wanted.limit(1)) is not None


def note_use(session: Session, key_id: str) -> None:
    """Note that the key was used now."""
    session.execute(update(ApiKey).where(ApiKey.id == key_id).values(last_used_at=func.clock_timestamp()))


def find(session: Session, project_id: str, key_id: str) -> ApiKey | None:
    return session.scalar(select(ApiKey).where(ApiKey.id == key_id, ApiKey.project_id == project_id))


def find_all(session: Session, project_id: str) -> Sequence[ApiKey]:
    """Return the project's keys, the oldest first; revoked and expired ones, too."""
    return session.scalars(
        select(ApiKey).where(ApiKey.project_id == project_id).order_by(ApiKey.created_at, ApiKey.id)
    ).all()


def find_of_member(session: Session, member_id: str) -> Sequence[ApiKey]:
    """Return the keys of the member that were not revoked, the oldest first; expired ones, too."""
    wanted = select(ApiKey).where(ApiKey.member_id == member_id, ApiKey.revoked_at.is_(None))
    return session.scalars(wanted.order_by(ApiKey.created_at, ApiKey.id)).all()


def find_members(session: Session, key_ids: Collection[str]) -> dict[str, Member]:
    """Return the members who have these keys, by the id of the key."""
    wanted = select(ApiKey.id, Member).join(Member, Member.id == ApiKey.member_id).where(ApiKey.id.in_(key_ids))
    return dict(session.execute(wanted).all())


def find_names(session: Session, key_ids: Collection[str]) -> dict[str, str]:
    """Return the names of these keys by id, each read once.

    A key keeps its name, and all responses with jobs have it.
    """
    if unknown := [key_id for key_id in key_ids if key_id not in _known_names]:
        _known_names.update({row.id: row.name for row in session.execute(_names(), {"key_ids": unknown})})
    return {key_id: _known_names[key_id] for key_id in key_ids if key_id in _known_names}


_known_names: dict[str, str] = {}


@cache
def _names() -> Select[str, str]:
    return select(ApiKey.id, ApiKey.name).where(ApiKey.id.in_(bindparam("key_ids", expanding=True)))


def rotate(session: Session, key: ApiKey, secret_sha256: bytes, overlap_s: int) -> None:
    """Give the key a new secret; the present one works for ``overlap_s`` seconds more."""
    key.previous_sha256 = key.secret_sha256 if overlap_s else None
    key.previous_until = func.clock_timestamp() + timedelta(seconds=overlap_s) if overlap_s else None
    key.secret_sha256 = secret_sha256
    key.rotated_at = func.clock_timestamp()
    session.flush()
    session.refresh(key)


def revoke(session: Session, key: ApiKey) -> None:
    """Revoke the key. Its row stays: the audit log has the key's actions."""
    key.revoked_at = func.coalesce(ApiKey.revoked_at, func.clock_timestamp())
    session.flush()
    session.refresh(key)
