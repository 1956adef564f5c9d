"""Seats are the rows of a job's nodes, when several workers do it together. Node 0 is the leader, and holds the lease.

Each of the other nodes holds a seat of that lease. A claim opens the seats, and idle workers take them before they look
for jobs. When all are taken, the leader writes the endpoint at which the nodes meet. All seats end with the leader's
lease: their workers learn it with their next heartbeat and stop their engines. A node writes its failure into its seat,
and the leader reads it with its own heartbeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Select, func, not_, select
from sqlalchemy.orm import Session, aliased

from api.store.queue import leases, placement
from api.store.queue.clock import from_now
from api.store.queue.leases import Failure, Lease, LeaseLost, Order
from api.store.queue.workers import host_of, worker_of
from api.store.states import HELD, State
from api.store.tables.jobs import Job
from api.store.tables.node_slots import NodeSlot, NodeSlotState


@dataclass(frozen=True)
class NodeSlotLease:
    """Allows a worker to do one node of a job while the leader's lease ``fence`` lives."""

    job_id: str
    fence: int
    node_rank: int
    nodes: int
    project_id: str
    needs_memory_bytes: int | None  # the plan's estimate for each node


def run_id(lease: Lease | NodeSlotLease) -> str:
    """Return the name of this attempt that all its nodes share."""
    return f"{lease.job_id}.{lease.fence}"


def take(session: Session, *, worker: str, lease_s: float, memory_bytes: int | None = None) -> NodeSlotLease | None:
    """Take a free seat of a job that fits into ``memory_bytes``, or return None. The oldest lease comes first.

    Jobs that avoid the worker's host are left to others. A worker takes one node of a job at most. Two workers never
    get the same seat (SKIP LOCKED).
    """
    mine = f"{worker_of(worker)}:"
    other = aliased(NodeSlot)
    has_one = select(other).where(other.job_id == NodeSlot.job_id, func.starts_with(other.worker, mine)).exists()
    free = (
        select(NodeSlot, Job)
        .join(Job, (Job.id == NodeSlot.job_id) & (Job.fence == NodeSlot.fence))
        .where(
            NodeSlot.state == NodeSlotState.OPEN,
            Job.state == State.RUNNING,
            Job.lease_expires_at > func.clock_timestamp(),
        )
        .where(not_(func.starts_with(Job.worker, mine)), not_(has_one), placement.may_run_on(host_of(worker)))
    )
    if memory_bytes is not None:
        free = free.where(func.coalesce(Job.needs_memory_bytes, 0) <= memory_bytes)
    free = free.order_by(NodeSlot.fence, NodeSlot.node_rank).limit(1).with_for_update(of=NodeSlot, skip_locked=True)
    row = session.execute(free).one_or_none()
    if row is None:
        return None
    seat, job = row
    seat.state, seat.worker, seat.expires_at = NodeSlotState.TAKEN, worker, from_now(lease_s)
    session.flush()
    return NodeSlotLease(seat.job_id, seat.fence, seat.node_rank, job.nodes, job.project_id, job.needs_memory_bytes)


def renew(session: Session, lease: NodeSlotLease, *, lease_s: float) -> None:
    """Extend a seat (its heartbeat). Raises LeaseLost when the leader's lease has ended."""
    _find(session, lease).expires_at = from_now(lease_s)


def find_endpoint(session: Session, lease: NodeSlotLease) -> str | None:
    """Return the address at which the nodes meet, or None while some are missing. Raises LeaseLost."""
    return _find(session, lease).endpoint


def leave(session: Session, lease: NodeSlotLease, *, state: NodeSlotState, failure: Failure | None = None) -> None:
    """End the seat's work as DONE, LEFT, or FAILED with a ``failure``. Raises LeaseLost.

    A seat that is LEFT before the start is open to other workers again.
    """
    seat = _find(session, lease)
    seat.state, seat.error = state, failure.to_dict() if failure else None
    if state == NodeSlotState.LEFT and seat.endpoint is None:
        seat.state, seat.worker, seat.expires_at = NodeSlotState.OPEN, None, None


def renew_leader(session: Session, lease: Lease, *, lease_s: float) -> Order | None:
    """Extend the leader's lease as ``leases.renew`` does, and report a node that is lost or has left."""
    order = leases.renew(session, lease, lease_s=lease_s)
    if order is None and session.scalar(_seats(lease).where(_is_lost())):
        return Order.NODE_LOST
    if order is None and session.scalar(_seats(lease).where(NodeSlot.state == NodeSlotState.LEFT)):
        return Order.NODE_LEFT
    return order


def start(session: Session, lease: Lease, *, endpoint: str) -> bool:
    """Tell all nodes to meet at ``endpoint``. Returns False while a seat is free or lost, or if the lease has ended."""
    taken = _seats(lease).where(NodeSlot.state == NodeSlotState.TAKEN, not_(_is_lost())).with_for_update()
    seats = session.scalars(taken).all()
    if len(seats) != lease.nodes - 1:
        return False
    for seat in seats:
        seat.endpoint = endpoint
    return True


def find_ended(session: Session, lease: Lease) -> Sequence[NodeSlot]:
    """Return the seats whose work has ended, by rank."""
    ended = _seats(lease).where(NodeSlot.state.in_((NodeSlotState.DONE, NodeSlotState.LEFT, NodeSlotState.FAILED)))
    return session.scalars(ended.order_by(NodeSlot.node_rank)).all()


def _find(session: Session, lease: NodeSlotLease) -> NodeSlot:
    """Return the locked seat, if its lease lives. Raises LeaseLost."""
    is_held = (Job.id == NodeSlot.job_id) & (Job.fence == NodeSlot.fence) & Job.state.in_(HELD)
    mine = select(NodeSlot).join(Job, is_held).where(*_of(lease), NodeSlot.node_rank == lease.node_rank)
    live = mine.where(NodeSlot.state == NodeSlotState.TAKEN, Job.lease_expires_at > func.clock_timestamp())
    seat = session.scalar(live.with_for_update(of=NodeSlot))
    if seat is None:
        raise LeaseLost
    return seat


def _seats(lease: Lease) -> Select[NodeSlot]:
    return select(NodeSlot).where(*_of(lease))


def _of(lease: Lease | NodeSlotLease) -> tuple[ColumnElement[bool], ...]:
    return NodeSlot.job_id == lease.job_id, NodeSlot.fence == lease.fence


def _is_lost() -> ColumnElement[bool]:
    """Return the condition for seats that failed, or whose worker sends no heartbeat any more."""
    silent = (NodeSlot.state == NodeSlotState.TAKEN) & (NodeSlot.expires_at < func.clock_timestamp())
    return silent | (NodeSlot.state == NodeSlotState.FAILED)
