"""One request, one result: what a client's Idempotency-Key stood for, kept for a day.

The row is written in the transaction that makes the thing, so both are there or neither; of two requests with one key
at the same time the second waits for the first one's commit and then finds its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.store.tables.jobs import IdempotencyKey

KEPT_FOR = timedelta(hours=24)


@dataclass(frozen=True)
class Request:
    """What tells one request from another: who sent it where, under which key, with which body."""

    api_key_id: str
    route: str
    key: str
    body_sha256: bytes


class KeyReused(Exception):
    """The key came before, with another body."""


def find(session: Session, request: Request) -> str | None:
    """The id that this request made, or None if it is new. Raises KeyReused."""
    same_key = select(IdempotencyKey).where(
        IdempotencyKey.api_key_id == request.api_key_id,
        IdempotencyKey.route == request.route,
        IdempotencyKey.key == request.key,
    )
    known = session.scalar(same_key)
    if known is None:
        return None
    if known.body_sha256 != request.body_sha256:
        raise KeyReused
    return known.made_id


def claim(session: Session, request: Request, made_id: str) -> str | None:
    """Note that ``request`` makes ``made_id``; the id that it made already if another transaction was first.

    Raises KeyReused.
    """
    noted = insert(IdempotencyKey).values(**vars(request), made_id=made_id).on_conflict_do_nothing()
    if session.execute(noted.returning(IdempotencyKey.key)).scalar() is not None:
        return None
    return find(session, request)


def purge(session: Session) -> int:
    """Forget keys older than a day. Returns 0: there is never more to do at once."""
    session.execute(delete(IdempotencyKey).where(IdempotencyKey.created_at < func.clock_timestamp() - KEPT_FOR))
    return 0
