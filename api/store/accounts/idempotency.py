"""The results of requests with an Idempotency-Key, kept for a day: one request, one result.

The row is written in the transaction that makes the object, so both are there or neither; of two requests with one key
at the same time the second waits for the first one's commit and then finds its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.store.tables.accounts import IdempotencyKey

KEPT_FOR = timedelta(hours=24)


@dataclass(frozen=True)
class Request:
    """The identity of a request: its API key, route, idempotency key and body."""

    api_key_id: str
    route: str
    key: str
    body_sha256: bytes


class KeyReused(Exception):
    """The key was used before, with another body."""


def find(session: Session, request: Request) -> str | None:
    """Return the id of the object that this request made, or None if it is new. Raises KeyReused."""
    same_key = select(IdempotencyKey).where(
        IdempotencyKey.api_key_id == request.api_key_id,
        IdempotencyKey.route == request.route,
        IdempotencyKey.key == request.key,
    )
    row = session.scalar(same_key)
    if row is None:
        return None
    if row.body_sha256 != request.body_sha256:
        raise KeyReused
    return row.made_id


def claim(session: Session, request: Request, made_id: str) -> str | None:
    """Note that ``request`` makes ``made_id``. Returns the id that it made already if another transaction was first.

    Raises KeyReused.
    """
    noted = insert(IdempotencyKey).values(**vars(request), made_id=made_id).on_conflict_do_nothing()
    if session.execute(noted.returning(IdempotencyKey.key)).scalar() is not None:
        return None
    return find(session, request)


def purge(session: Session) -> int:
    """Delete keys older than a day. Returns 0: there is never more to do at once."""
    session.execute(delete(IdempotencyKey).where(IdempotencyKey.created_at < func.clock_timestamp() - KEPT_FOR))
    return 0
