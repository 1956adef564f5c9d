"""Handles ``Idempotency-Key``: a repeated request with the same key does nothing, and returns the same result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Header
from pydantic import BaseModel
from sqlalchemy.orm import Session

from api.http.errors import Problem
from api.store.accounts import idempotency
from api.store.accounts.audit import Caller
from api.store.accounts.idempotency import KeyReused, Request
from api.store.engine import Sessions, reading
from api.store.ids import new_id

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        pattern="^[ -~]+$",
        description="A unique text per intended request, such as a UUID. Kept for 24 hours.",
    ),
]

Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class MadeOnce:
    """The id of the object that a request made; ``replayed``: an earlier request with its key made it."""

    id: str
    replayed: bool


def request_of(caller: Caller, route: str, idempotency_key: str | None, body: BaseModel) -> Request | None:
    """Return the record of this request for the store, None without a key."""
    if idempotency_key is None or caller.key_id is None:
        return None
    return Request(caller.key_id, route, idempotency_key, hashlib.sha256(body.model_dump_json().encode()).digest())


def make_once(
    sessions: Sessions,
    request: Request | None,
    prefix: str,
    prepare: Callable[[], Prepared],
    store: Callable[[Session, str, Prepared], object],
) -> MadeOnce:
    """Prepare (slow, outside of any transaction) and store under a new id, unless ``request`` did so before.

    Raises Problem 422 ``idempotency_key_reused`` for a key that came with another body.
    """
    try:
        if request:
            with reading(sessions) as session:
                if before := idempotency.find(session, request):
                    return MadeOnce(before, replayed=True)
        prepared = prepare()
        new = new_id(prefix)
        with sessions.begin() as session:
            if request and (before := idempotency.claim(session, request, new)):
                return MadeOnce(before, replayed=True)
            store(session, new, prepared)
        return MadeOnce(new, replayed=False)
    except KeyReused as error:
        raise Problem(
            422,
            "idempotency_key_reused",
            "This Idempotency-Key was already used with a different body.",
            hint="Use a new key for a new request, or resend the same body for the same request.",
        ) from error
