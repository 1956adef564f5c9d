"""The tables of chats: short conversations with a job's result and its original, each held by a worker's lease."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from api.store.tables.jobs import NOW, Base


class ChatState(StrEnum):
    WAITING = "waiting"  # for a worker
    STARTING = "starting"  # a worker holds the lease and loads both models
    OPEN = "open"
    ENDED = "ended"


class EndReason(StrEnum):
    """The reason why a chat ended."""

    CLOSED = "closed"  # by a client
    IDLE = "idle"
    TIME_IS_UP = "time_is_up"
    NO_WORKER = "no_worker"  # none took it in time
    WORKER_NEEDED = "worker_needed"  # by a job
    WORKER_STOPPED = "worker_stopped"
    WORKER_LOST = "worker_lost"
    FAILED = "failed"  # see the error


class TurnState(StrEnum):
    WAITING = "waiting"
    ANSWERING = "answering"
    ANSWERED = "answered"
    FAILED = "failed"


UNANSWERED = (TurnState.WAITING, TurnState.ANSWERING)
HOLDING = (ChatState.STARTING, ChatState.OPEN)
_IS_HELD, _IS_OPEN = text("state IN ('starting', 'open')"), text("state <> 'ended'")


class Chat(Base):
    """A chat. ``seq`` grows with every change of it and of its turns, which note the number of their last change."""

    __tablename__ = "chat"

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"))
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    max_new_tokens: Mapped[int]
    needs_memory_bytes: Mapped[int] = mapped_column(BigInteger)

    state: Mapped[str] = mapped_column(server_default=ChatState.WAITING)
    reason: Mapped[str | None]
    error: Mapped[dict[str, Any] | None]
    has_template: Mapped[bool | None]
    seq: Mapped[int] = mapped_column(BigInteger, server_default="0")

    fence: Mapped[int | None] = mapped_column(BigInteger)
    worker: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]

    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    waits_until: Mapped[datetime]
    started_at: Mapped[datetime | None]
    used_at: Mapped[datetime] = mapped_column(server_default=NOW)
    ended_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("state IN ('ended', 'open', 'starting', 'waiting')", name="state"),
        CheckConstraint(
            "num_nulls(fence, worker, lease_expires_at) = CASE WHEN state IN ('starting', 'open') THEN 0 ELSE 3 END",
            name="held_has_lease",
        ),
        CheckConstraint("(state = 'ended') = (num_nulls(reason, ended_at) = 0)", name="ended_has_reason"),
        # both models take memory and a worker's slot: a project has one chat at a time
        Index("uq_chat_open", "project_id", unique=True, postgresql_where=_IS_OPEN),
        Index("ix_chat_lease", "lease_expires_at", postgresql_where=_IS_HELD),
        Index("ix_chat_job_id", "job_id", "id"),
    )


class ChatTurn(Base):
    """A prompt of a chat; ``answer`` is a ``quantcore.report.answers.Turn`` as JSON, whole or so far."""

    __tablename__ = "chat_turn"

    chat_id: Mapped[str] = mapped_column(ForeignKey("chat.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    prompt: Mapped[str]
    state: Mapped[str] = mapped_column(server_default=TurnState.WAITING)
    answer: Mapped[dict[str, Any] | None]
    error: Mapped[dict[str, Any] | None]
    seq: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (
        CheckConstraint("state IN ('answered', 'answering', 'failed', 'waiting')", name="state"),
        CheckConstraint("(state = 'failed') = (error IS NOT NULL)", name="failed_has_error"),
    )
