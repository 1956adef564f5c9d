"""Chats as rows: opened, asked and ended by clients. Workers take them in ``chat_leases``.

Whoever changes a chat or a turn locks the chat's row and raises its ``seq``: a stream that has sent all up to n misses
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.store.accounts import projects
from api.store.ids import new_id
from api.store.queue import outbox
from api.store.states import State
from api.store.tables.chats import UNANSWERED, Chat, ChatState, ChatTurn, EndReason, TurnState
from api.store.tables.jobs import Job

EXTRA_MEMORY_BYTES = 1 << 30
"""Memory of a chat's process beside both models: its libraries, and the caches of both conversations."""


class CannotChat(Exception):
    """A chat cannot be opened or prompted.

    ``code``: ``not_ready`` (no artifact), ``chat_in_progress``, ``chat_ended``, ``turn_in_progress``,
    ``too_many_turns``.
    """

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


def begin(session: Session, job: Job, *, max_new_tokens: int, wait_s: float) -> Chat:
    """Add a chat with the result of a succeeded job, and wake the workers. It waits ``wait_s`` for one at most.

    Raises CannotChat, also if the project has a chat already.
    """
    if job.state != State.SUCCEEDED:
        raise CannotChat("not_ready", f"The job is {job.state}: only a succeeded job has a result to chat with.")
    projects.lock(session, job.project_id)
    mine = select(Chat).where(Chat.project_id == job.project_id, Chat.state != ChatState.ENDED)
    if (other := session.scalar(mine)) is not None:
        raise CannotChat(
            "chat_in_progress",
            f"The project already has a chat with the result of {other.job_id} ({other.id}).",
            f"End that chat first: DELETE /v1/chats/{other.id}.",
        )
    summary = job.summary or {}
    size_bytes = int(summary.get("float_bytes") or summary.get("size_before_bytes") or 0)
    chat = Chat(
        id=new_id("chat"),
        job_id=job.id,
        project_id=job.project_id,
        max_new_tokens=max_new_tokens,
        needs_memory_bytes=2 * size_bytes + EXTRA_MEMORY_BYTES,
        seq=1,
        waits_until=func.clock_timestamp() + timedelta(seconds=wait_s),
    )
    session.add(chat)
    outbox.wake(session)
    session.flush()
    session.refresh(chat)
    return chat


def ask(session: Session, chat: Chat, prompt: str, *, max_turns: int) -> ChatTurn:
    """Add a turn to a locked chat. Raises CannotChat."""
    turns = read_turns(session, chat.id)
    if chat.state == ChatState.ENDED:
        raise CannotChat("chat_ended", f"The chat has ended ({chat.reason}).", "Open a new one.")
    if turns and turns[-1].state in UNANSWERED:
        raise CannotChat("turn_in_progress", "The last prompt has not been answered yet.", "Wait for its answer.")
    if len(turns) >= max_turns:
        raise CannotChat("too_many_turns", f"The chat has reached its limit of {max_turns} turns.", "Open a new one.")
    chat.seq += 1
    chat.used_at = func.clock_timestamp()
    turn = ChatTurn(chat_id=chat.id, number=len(turns) + 1, prompt=prompt, state=TurnState.WAITING, seq=chat.seq)
    session.add(turn)
    session.flush()
    return turn


def end(session: Session, chat: Chat, reason: EndReason, error: dict[str, Any] | None = None) -> None:
    """End a locked chat, and fail its turn that is not answered. One that has ended stays as it is."""
    if chat.state == ChatState.ENDED:
        return
    chat.seq += 1
    chat.state, chat.reason, chat.error, chat.ended_at = ChatState.ENDED, reason, error, func.clock_timestamp()
    chat.fence = chat.worker = chat.lease_expires_at = None
    for turn in read_turns(session, chat.id):
        if turn.state in UNANSWERED:
            turn.state, turn.seq = TurnState.FAILED, chat.seq
            turn.error = {"code": "chat_ended", "message": "The chat ended before this prompt was answered."}
    session.flush()


def find(session: Session, chat_id: str) -> Chat | None:
    return session.get(Chat, chat_id)


def lock(session: Session, chat_id: str) -> Chat | None:
    """Return the chat, with its row locked until the end of the transaction."""
    wanted = select(Chat).where(Chat.id == chat_id).with_for_update()
    return session.scalar(wanted.execution_options(populate_existing=True))


def find_last(session: Session, job_id: str) -> Chat | None:
    """Return the newest chat of a job."""
    return session.scalar(select(Chat).where(Chat.job_id == job_id).order_by(Chat.id.desc()).limit(1))


def read_turns(session: Session, chat_id: str, *, after: int = 0) -> Sequence[ChatTurn]:
    """Return the turns that changed after the change number ``after``, in order."""
    wanted = select(ChatTurn).where(ChatTurn.chat_id == chat_id, ChatTurn.seq > after)
    return session.scalars(wanted.order_by(ChatTurn.number)).all()


def find_heads(session: Session, chat_ids: Sequence[str]) -> dict[str, int]:
    """Return the number of the last change of each chat that exists."""
    if not chat_ids:
        return {}
    return {row.id: row.seq for row in session.execute(select(Chat.id, Chat.seq).where(Chat.id.in_(chat_ids)))}
