"""The table of shares: read-only links to the report of a job."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from api.store.tables.jobs import NOW, Base


class Share(Base):
    """A link to a job's report, for anyone with its token. It ends with its time, when it is revoked, with the job."""

    __tablename__ = "share"

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"), index=True)
    token_sha256: Mapped[bytes] = mapped_column(unique=True)
    key_id: Mapped[str | None]  # that made it
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime] = mapped_column(index=True)
