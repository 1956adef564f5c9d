"""The operations of workers on chats: taken as jobs are (``leases``), but never given back. A chat that loses its
worker has ended, because the conversation is in that worker's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import delete, exists, func, or_, select, update
from sqlalchemy.orm import Session

from api.store.accounts import hub_tokens
from api.store.queue import chats, leases
from api.store.queue.clock import from_now
from api.store.queue.leases import LeaseLost, Order
from api.store.tables.chats import HOLDING, UNANSWERED, Chat, ChatState, ChatTurn, EndReason, TurnState
from api.store.tables.jobs import FENCE, Artifact, Job

KEPT = timedelta(days=1)
"""Time for which an ended chat can be read."""


@dataclass(frozen=True)
class ChatLease:
    """The right to hold one chat, and what is needed for it."""

    job_id: str
    chat_id: str
    fence: int
    project_id: str
    model: dict[str, Any]
    sealed_hub_token: bytes | None
    folder: str
    manifest_sha256: str
    exports: dict[str, Any]
    max_new_tokens: int
    needs_memory_bytes: int


@dataclass(frozen=True)
class Limits:
    """The limits of a chat: seconds without a prompt, seconds altogether, and seconds that a due job waits for it.

    Jobs that need more than ``memory_bytes`` do not count: this worker could not take them.
    """

    idle_s: float
    max_s: float
    job_waits_s: float
    memory_bytes: int


@dataclass(frozen=True)
class Asked:
    """A prompt that waits for its answer."""

    number: int
    prompt: str


def claim(session: Session, *, worker: str, lease_s: float, memory_bytes: int | None = None) -> ChatLease | None:
    """Take the chat that has waited longest and fits into ``memory_bytes``, or return None."""
    due = (
        select(Chat, Job, Artifact)
        .join(Job, Job.id == Chat.job_id)
        .join(Artifact, Artifact.id == Job.artifact_id)
        .where(Chat.state == ChatState.WAITING)
        .order_by(Chat.id)
        .limit(1)
        .with_for_update(skip_locked=True, of=Chat)
    )
    if memory_bytes is not None:
        due = due.where(Chat.needs_memory_bytes <= memory_bytes)
    row = session.execute(due).one_or_none()
    if row is None:
        return None
    chat, job, artifact = row
    fence = session.execute(FENCE.next_value()).scalar_one()
    chat.state, chat.seq, chat.started_at = ChatState.STARTING, chat.seq + 1, func.clock_timestamp()
    chat.fence, chat.worker, chat.lease_expires_at = fence, worker, from_now(lease_s)
    token = job.model.get("hub_token")
    return ChatLease(
        job_id=job.id,
        chat_id=chat.id,
        fence=fence,
        project_id=chat.project_id,
        model=job.model,
        sealed_hub_token=hub_tokens.find_sealed(session, chat.project_id, token) if token else None,
        folder=artifact.path,
        manifest_sha256=artifact.manifest_sha256,
        exports=(job.summary or {}).get("exports") or {},
        max_new_tokens=chat.max_new_tokens,
        needs_memory_bytes=chat.needs_memory_bytes,
    )


def renew(session: Session, lease: ChatLease, *, lease_s: float, limits: Limits) -> Order | None:
    """Extend the lease (its heartbeat), and return the limit that the chat has reached, if any.

    Raises LeaseLost, also when a client has ended the chat.
    """
    is_asked = exists().where(ChatTurn.chat_id == Chat.id, ChatTurn.state.in_(UNANSWERED))
    is_idle = (Chat.state == ChatState.OPEN) & (Chat.used_at < from_now(-limits.idle_s)) & ~is_asked
    beat = (
        update(Chat)
        .where(Chat.id == lease.chat_id, Chat.fence == lease.fence, Chat.lease_expires_at > func.clock_timestamp())
        .values(lease_expires_at=from_now(lease_s))
        .returning(is_idle, Chat.started_at < from_now(-limits.max_s), Chat.worker)
    )
    row = session.execute(beat).one_or_none()
    if row is None:
        raise LeaseLost
    idle, time_is_up, worker = row
    assert worker is not None
    if time_is_up:
        return Order.TIME_IS_UP
    if leases.is_any_due(session, worker=worker, waits_s=limits.job_waits_s, memory_bytes=limits.memory_bytes):
        return Order.WORKER_NEEDED
    return Order.IDLE if idle else None


def start(session: Session, lease: ChatLease, *, has_template: bool) -> None:
    """Note that both models are in memory."""
    chat = _held(session, lease)
    chat.state, chat.has_template, chat.used_at, chat.seq = ChatState.OPEN, has_template, func.now(), chat.seq + 1


def take_prompt(session: Session, lease: ChatLease, *, after: int) -> Asked | None:
    """Return the prompt behind turn ``after`` that waits, which is being answered from now on; None if there is none.

    A worker that did not learn of its commit asks again, and gets the same. Raises LeaseLost.
    """
    check(session, lease)
    waiting = select(ChatTurn).where(
        ChatTurn.chat_id == lease.chat_id, ChatTurn.number > after, ChatTurn.state.in_(UNANSWERED)
    )
    turn = session.scalar(waiting)  # asked often, so without a lock
    if turn is None:
        return None
    chat = _held(session, lease)
    chat.seq += 1
    turn.state, turn.seq = TurnState.ANSWERING, chat.seq
    return Asked(turn.number, turn.prompt)


def check(session: Session, lease: ChatLease) -> None:
    """Raise LeaseLost if the chat has ended, or is no longer ours."""
    if not is_held(session, lease.chat_id, lease.fence):
        raise LeaseLost


def record(session: Session, lease: ChatLease, *, number: int, answer: dict[str, Any], is_whole: bool) -> None:
    """Store the answers so far, or the whole ones."""
    turn = _turn(session, lease, number)
    if turn is not None:
        turn.answer, turn.state = answer, TurnState.ANSWERED if is_whole else TurnState.ANSWERING


def fail_turn(session: Session, lease: ChatLease, *, number: int, error: dict[str, Any]) -> None:
    """Note that a prompt cannot be answered."""
    turn = _turn(session, lease, number)
    if turn is not None:
        turn.state, turn.answer, turn.error = TurnState.FAILED, None, error


def finish(session: Session, lease: ChatLease, *, reason: EndReason, error: dict[str, Any] | None = None) -> None:
    """End the chat."""
    chats.end(session, _held(session, lease), reason, error)


def is_held(session: Session, chat_id: str, fence: int) -> bool:
    """Return True if a worker holds the chat under this fence."""
    wanted = select(Chat.id).where(Chat.id == chat_id, Chat.fence == fence)
    return session.scalar(wanted) is not None


def reap(session: Session, *, limit: int = 100) -> int:
    """End chats whose worker was lost, and those that no worker took in time; delete those that ended long ago."""
    now = func.clock_timestamp()
    session.execute(delete(Chat).where(Chat.ended_at < now - KEPT))
    is_lost = Chat.state.in_(HOLDING) & (Chat.lease_expires_at < now)
    is_late = (Chat.state == ChatState.WAITING) & (Chat.waits_until < now)
    over = select(Chat).where(or_(is_lost, is_late)).limit(limit).with_for_update(skip_locked=True)
    found = session.scalars(over).all()
    for chat in found:
        is_waiting = chat.state == ChatState.WAITING
        chats.end(session, chat, EndReason.NO_WORKER if is_waiting else EndReason.WORKER_LOST)
    return len(found)


def _turn(session: Session, lease: ChatLease, number: int) -> ChatTurn | None:
    """Return a turn that is being answered, its chat locked; the change is counted, and the chat is used."""
    chat = _held(session, lease)
    turn = session.get(ChatTurn, (chat.id, number))
    if turn is None or turn.state != TurnState.ANSWERING:
        return None
    chat.seq, chat.used_at = chat.seq + 1, func.clock_timestamp()
    turn.seq = chat.seq
    return turn


def _held(session: Session, lease: ChatLease) -> Chat:
    """Return the leased chat, its row locked. Raises LeaseLost if it has ended."""
    chat = chats.lock(session, lease.chat_id)
    if chat is None or chat.fence != lease.fence:
        raise LeaseLost
    return chat
