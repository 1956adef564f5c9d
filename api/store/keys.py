"""API keys as rows. What a key looks like and how it is checked is ``api.security``'s."""

from __future__ import annotations

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from api.store.tables import ApiKey


def add(session: Session, key: ApiKey) -> None:
    session.add(key)


def find_valid(session: Session, key_id: str) -> ApiKey | None:
    """The key, unless it was revoked or has expired."""
    alive = or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.clock_timestamp())
    return session.scalar(select(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None), alive))
