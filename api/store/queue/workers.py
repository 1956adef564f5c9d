"""Workers as rows. A worker sends a heartbeat every few seconds; a silent one counts no more when its time is up.

Its row is deleted after an hour: until then it finds its drain order when it comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Select, delete, func, literal, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.store.states import HELD
from api.store.tables.chats import HOLDING, Chat
from api.store.tables.jobs import Job, Worker
from api.store.tables.node_slots import NodeSlot, NodeSlotState

REMEMBERED = timedelta(hours=1)
"""Time for which a silent worker's row is kept."""


@dataclass(frozen=True)
class Registration:
    """What a worker is as long as it runs. ``sandbox`` protects its engines, ``memory_limit`` limits their memory.

    ``launcher`` gives them their nodes.
    """

    id: str
    host: str
    num_slots: int
    memory_bytes: int
    launcher: str = "local"
    sandbox: str = "unknown"
    memory_limit: str = "unknown"


def beat(
    session: Session,
    worker: Registration,
    *,
    devices: list[dict[str, Any]],
    live_s: float,
    blocked_reason: str | None = None,
) -> bool:
    """Record that this worker lives, and will for ``live_s`` seconds more. Returns True if it was drained.

    Then it shall take no jobs. ``blocked_reason``: why it takes none by itself.
    """
    now = func.clock_timestamp()
    live_until = now + timedelta(seconds=live_s)
    state = {"live_until": live_until, "devices": devices, "blocked_reason": blocked_reason}
    row = insert(Worker).values(**asdict(worker), **state)
    kept = row.on_conflict_do_update(index_elements=[Worker.id], set_=state | {"beat_at": now})
    return bool(session.scalar(kept.returning(Worker.drain_requested_at.is_not(None))))


def leave(session: Session, worker_id: str) -> None:
    """Remove a worker, which takes no more jobs."""
    session.execute(delete(Worker).where(Worker.id == worker_id))


def find(session: Session, worker_id: str) -> Worker | None:
    return session.get(Worker, worker_id)


def find_live(session: Session) -> Sequence[Worker]:
    """Return the live workers, by host."""
    live = select(Worker).where(Worker.live_until > func.clock_timestamp())
    return session.scalars(live.order_by(Worker.host, Worker.id)).all()


def find_jobs(session: Session, worker_id: str) -> Sequence[Job]:
    """Return the jobs that the worker's slots hold, by themselves or together with others."""
    seated = select(NodeSlot.job_id).where(
        NodeSlot.state == NodeSlotState.TAKEN, func.starts_with(NodeSlot.worker, f"{worker_id}:")
    )
    mine = or_(func.starts_with(Job.worker, f"{worker_id}:"), Job.id.in_(seated))
    return session.scalars(select(Job).where(Job.state.in_(HELD), mine).order_by(Job.id)).all()


@dataclass(frozen=True)
class Ready:
    """A worker that may be given work; ``is_idle``: it has a free slot now.

    One that ``brings_nodes`` gets the nodes of a job from a scheduler: it works alone.
    """

    host: str
    memory_bytes: int
    is_idle: bool
    brings_nodes: bool = False


def count_ready() -> ColumnElement[int]:
    """Return the number of workers that may be given a part of a job, as a part of a query."""
    return select(func.count()).select_from(Worker).where(*_is_ready(), Worker.launcher == "local").scalar_subquery()


def count_slots() -> ColumnElement[int]:
    """Return the number of jobs that those workers could run at once, as a part of a query."""
    return select(func.coalesce(func.sum(Worker.num_slots), 0)).where(*_is_ready()).scalar_subquery()


def find_ready(session: Session) -> Sequence[Ready]:
    """Return the live workers that are neither drained nor blocked."""
    return [Ready(*row) for row in session.execute(_ready())]


def find_blocked_reason(session: Session) -> str | None:
    """Return why a live worker that is not drained accepts no jobs; None if no such worker is blocked."""
    blocked = select(func.min(Worker.blocked_reason)).where(*_is_there())
    return session.scalar(blocked)


def count_draining(session: Session) -> int:
    """Return the number of live workers that were told to accept no jobs."""
    live = Worker.live_until > func.clock_timestamp(), Worker.drain_requested_at.is_not(None)
    return session.scalar(select(func.count()).select_from(Worker).where(*live)) or 0


@cache
def _ready() -> Select[str, int, bool, bool]:
    """Return the query for the ready workers. Made once: every poll of a job that waits runs it."""
    jobs = select(func.count()).where(Job.state.in_(HELD), func.starts_with(Job.worker, Worker.id + ":"))
    seats = select(func.count()).where(
        NodeSlot.state == NodeSlotState.TAKEN, func.starts_with(NodeSlot.worker, Worker.id + ":")
    )
    chats = select(func.count()).where(Chat.state.in_(HOLDING), func.starts_with(Chat.worker, Worker.id + ":"))
    used: ColumnElement[int] = sum(
        (held.correlate(Worker).scalar_subquery() for held in (jobs, seats, chats)), start=literal(0)
    )
    brings_nodes = Worker.launcher != "local"
    return select(Worker.host, Worker.memory_bytes, used < Worker.num_slots, brings_nodes).where(*_is_ready())


def worker_of(slot: str) -> str:
    """Return the id of the worker that a slot belongs to."""
    return slot.rpartition(":")[0]


def host_of(slot: str) -> str:
    """Return the host of the worker that a slot belongs to. A worker's id begins with it."""
    return slot.partition(":")[0]


def drain(session: Session, worker: Worker) -> None:
    """Order the worker to accept no jobs, and to return those that it has, which it does with its next heartbeat."""
    worker.drain_requested_at = func.coalesce(Worker.drain_requested_at, func.clock_timestamp())
    session.flush()
    session.refresh(worker)


def is_drained(session: Session, slot: str) -> bool:
    """Return True if the worker of a slot was told to accept no jobs, whether it knows that yet or not."""
    drained = select(Worker.id).where(Worker.id == worker_of(slot), Worker.drain_requested_at.is_not(None))
    return session.scalar(drained) is not None


def uncordon(session: Session, worker: Worker) -> None:
    """Let the worker take jobs again."""
    worker.drain_requested_at = None
    session.flush()


def purge(session: Session) -> int:
    """Delete workers that fell silent long ago. Returns 0: there is never more to do at once."""
    session.execute(delete(Worker).where(Worker.live_until < func.clock_timestamp() - REMEMBERED))
    return 0


def is_silent(session: Session, worker: Worker) -> bool:
    """Return True if the worker's time is up. It may come back."""
    return bool(session.scalar(select(func.clock_timestamp() > worker.live_until)))


def _is_ready() -> tuple[ColumnElement[bool], ...]:
    return *_is_there(), Worker.blocked_reason.is_(None)


def _is_there() -> tuple[ColumnElement[bool], ...]:
    return Worker.live_until > func.clock_timestamp(), Worker.drain_requested_at.is_(None)
