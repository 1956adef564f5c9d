"""Who is there to work. A worker says so every few seconds; one that falls silent is forgotten when its time is up."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import delete, func
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.store.tables import Worker


def beat(session: Session, *, worker_id: str, host: str, num_slots: int, memory_bytes: int, live_s: float) -> None:
    """This worker lives, and will for ``live_s`` seconds more."""
    live_until = func.clock_timestamp() + timedelta(seconds=live_s)
    row = insert(Worker).values(
        id=worker_id, host=host, num_slots=num_slots, memory_bytes=memory_bytes, live_until=live_until
    )
    session.execute(row.on_conflict_do_update(index_elements=[Worker.id], set_={"live_until": live_until}))


def leave(session: Session, worker_id: str) -> None:
    """This worker takes no more jobs."""
    session.execute(delete(Worker).where(Worker.id == worker_id))


def purge(session: Session) -> int:
    """Forget workers that fell silent. Returns 0: there is never more to do at once."""
    session.execute(delete(Worker).where(Worker.live_until < func.clock_timestamp()))
    return 0
