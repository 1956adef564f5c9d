"""The table of publications: artifacts on their way to the Hub or to a folder, each with a lease of its own."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from api.store.tables.jobs import NOW, Base


class PublicationState(StrEnum):
    PENDING = "pending"  # also between two attempts: then it has an error
    PUBLISHING = "publishing"  # a worker holds the lease
    PUBLISHED = "published"
    FAILED = "failed"


OPEN = (PublicationState.PENDING, PublicationState.PUBLISHING)
_IS_OPEN, _IS_HELD = text("state IN ('pending', 'publishing')"), text("state = 'publishing'")


class Publication(Base):
    """A publication of one artifact to one target. ``target`` is a ``quantcore.hub.target.Target`` as JSON.

    ``attempt`` counts claims and goes on in a retry: from the second one on a worker looks for what was done before.
    """

    __tablename__ = "publication"

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"))
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    target: Mapped[dict[str, Any]]
    hub_token: Mapped[str | None]  # its name

    state: Mapped[str] = mapped_column(server_default=PublicationState.PENDING)
    progress: Mapped[dict[str, Any] | None]
    revision: Mapped[str | None]
    url: Mapped[str | None]
    error: Mapped[dict[str, Any] | None]

    attempt: Mapped[int] = mapped_column(server_default="0")
    failure_count: Mapped[int] = mapped_column(server_default="0")
    lost_count: Mapped[int] = mapped_column(server_default="0")
    fence: Mapped[int | None] = mapped_column(BigInteger)
    worker: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    run_at: Mapped[datetime] = mapped_column(server_default=NOW)

    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    finished_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("state IN ('failed', 'pending', 'published', 'publishing')", name="state"),
        CheckConstraint(
            "num_nulls(fence, worker, lease_expires_at) = CASE WHEN state = 'publishing' THEN 0 ELSE 3 END",
            name="held_has_lease",
        ),
        CheckConstraint("(state IN ('published', 'failed')) = (finished_at IS NOT NULL)", name="final_has_finished_at"),
        CheckConstraint("state <> 'published' OR num_nulls(revision, url) = 0", name="published_has_revision"),
        CheckConstraint("state <> 'failed' OR error ->> 'code' IS NOT NULL", name="failed_has_code"),
        Index("uq_publication_open", "job_id", unique=True, postgresql_where=_IS_OPEN),
        # no store can lock a folder: one publication at a time goes to a folder
        Index("uq_publication_to", text("(target ->> 'to')"), unique=True, postgresql_where=_IS_HELD),
        Index("ix_publication_claim", "run_at", "id", postgresql_where=text("state = 'pending'")),
        Index("ix_publication_lease", "lease_expires_at", postgresql_where=_IS_HELD),
        Index("ix_publication_job_id", "job_id", "id"),
    )


class PublishTarget(Base):
    """A folder behind a URL, and the project that first published to it: no other one does."""

    __tablename__ = "publish_target"

    url: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"), index=True)
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
