"""The table ``seat``: one row for each node of a job beside its leader's."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, SmallInteger, text
from sqlalchemy.orm import Mapped, mapped_column

from api.store.tables.jobs import Base


class NodeSlotState(StrEnum):
    OPEN = "open"  # nobody has it yet
    TAKEN = "taken"  # a worker waits for the others, or works
    DONE = "done"  # its part of the job is done
    LEFT = "left"  # the worker was drained: nobody's fault
    FAILED = "failed"  # ``error`` says why


_STATES = ", ".join(repr(str(state)) for state in sorted(NodeSlotState))
_IS_OPEN = text("state = 'open'")


class NodeSlot(Base):
    """A seat is the row of one node of an attempt. The leader is node 0 and has none. It ends with the leader's lease.

    ``endpoint`` (``host:port``) is where the nodes meet. It is set when all seats are taken.
    """

    __tablename__ = "seat"

    job_id: Mapped[str] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"), primary_key=True)
    fence: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    node_rank: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    state: Mapped[str] = mapped_column(server_default=NodeSlotState.OPEN)
    worker: Mapped[str | None]
    expires_at: Mapped[datetime | None]
    endpoint: Mapped[str | None]
    error: Mapped[dict[str, Any] | None]

    __table_args__ = (
        CheckConstraint("node_rank > 0", name="node_rank"),
        CheckConstraint(f"state IN ({_STATES})", name="state"),
        CheckConstraint(
            "num_nulls(worker, expires_at) = CASE WHEN state = 'open' THEN 2 ELSE 0 END", name="taken_has_lease"
        ),
        CheckConstraint("(state = 'failed') = (error IS NOT NULL)", name="failed_has_error"),
        Index("ix_seat_open", "job_id", postgresql_where=_IS_OPEN),
    )
