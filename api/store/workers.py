"""Who is there to work. A worker says so every few seconds; one that falls silent is forgotten when its time is up."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.store.states import HELD
from api.store.tables import Job, Worker


def beat(
    session: Session,
    *,
    worker_id: str,
    host: str,
    num_slots: int,
    memory_bytes: int,
    devices: list[dict[str, Any]],
    live_s: float,
) -> bool:
    """This worker lives, and will for ``live_s`` seconds more. Returns whether it shall take no jobs (``drain``)."""
    now = func.clock_timestamp()
    live_until = now + timedelta(seconds=live_s)
    row = insert(Worker).values(
        id=worker_id, host=host, num_slots=num_slots, memory_bytes=memory_bytes, devices=devices, live_until=live_until
    )
    kept = row.on_conflict_do_update(
        index_elements=[Worker.id], set_={"live_until": live_until, "beat_at": now, "devices": devices}
    )
    return bool(session.scalar(kept.returning(Worker.drain_requested_at.is_not(None))))


def leave(session: Session, worker_id: str) -> None:
    """This worker takes no more jobs."""
    session.execute(delete(Worker).where(Worker.id == worker_id))


def find(session: Session, worker_id: str) -> Worker | None:
    return session.get(Worker, worker_id)


def find_live(session: Session) -> Sequence[Worker]:
    """The workers that live, by host."""
    live = select(Worker).where(Worker.live_until > func.clock_timestamp())
    return session.scalars(live.order_by(Worker.host, Worker.id)).all()


def find_jobs(session: Session, worker_id: str) -> Sequence[Job]:
    """The jobs that the worker's slots hold."""
    held = select(Job).where(Job.state.in_(HELD), Job.worker.startswith(f"{worker_id}:", autoescape=True))
    return session.scalars(held.order_by(Job.id)).all()


def drain(session: Session, worker: Worker) -> None:
    """The worker shall take no jobs, and give back those that it has. It does so with its next beat."""
    worker.drain_requested_at = func.coalesce(Worker.drain_requested_at, func.clock_timestamp())
    session.flush()
    session.refresh(worker)


def uncordon(session: Session, worker: Worker) -> None:
    """The worker shall take jobs again."""
    worker.drain_requested_at = None
    session.flush()


def purge(session: Session) -> int:
    """Forget workers that fell silent. Returns 0: there is never more to do at once."""
    session.execute(delete(Worker).where(Worker.live_until < func.clock_timestamp()))
    return 0
