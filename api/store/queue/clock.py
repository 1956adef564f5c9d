"""Times by the database's clock, the only one that counts for leases."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, DateTime, cast, func, update
from sqlalchemy.orm import Session

from api.store.states import HELD
from api.store.tables.chats import HOLDING, Chat
from api.store.tables.jobs import Job
from api.store.tables.node_slots import NodeSlot, NodeSlotState
from api.store.tables.publications import Publication, PublicationState

LONGEST = 2.0
"""A lease ends at most this many times its length from now; other workers may have somewhat longer ones."""


def from_now(seconds: float) -> ColumnElement[Any]:
    """Return the time that many seconds from now."""
    return cast(func.clock_timestamp(), DateTime(timezone=True)) + timedelta(seconds=seconds)


def shorten_leases(session: Session, *, lease_s: float) -> int:
    """Bring near what ends long after any lease: the clock was set back. Return how many leases that were.

    Live workers renew theirs anyway. Without this, one that was lost just then would keep its job until the clock has
    caught up.
    """
    latest = from_now(LONGEST * lease_s)
    held: list[tuple[Any, ColumnElement[bool], Any]] = [
        (Job, Job.state.in_(HELD), Job.lease_expires_at),
        (Publication, Publication.state == PublicationState.PUBLISHING, Publication.lease_expires_at),
        (Chat, Chat.state.in_(HOLDING), Chat.lease_expires_at),
        (NodeSlot, NodeSlot.state == NodeSlotState.TAKEN, NodeSlot.expires_at),
    ]
    return sum(
        len(session.scalars(update(row).where(is_held, end > latest).values({end: latest}).returning(end)).all())
        for row, is_held, end in held
    )
