"""The tables of what a project has besides jobs. Nothing of a job refers to them, so they have a file of their own."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Identity, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from api.store.tables import NOW, Base


class AuditEntry(Base):
    """Who did what, and when. A trigger refuses changes: rows are only ever added."""

    __tablename__ = "audit_entry"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))  # whose thing it is that was changed
    key_id: Mapped[str | None]  # None: the operator, on the machine itself
    action: Mapped[str]
    object_id: Mapped[str]
    request_id: Mapped[str | None]
    detail: Mapped[dict[str, Any]]

    __table_args__ = (Index("ix_audit_entry_list", "project_id", text("id DESC")),)


class HubToken(Base):
    """A project's token for the Hugging Face Hub, sealed (``vault``). Nothing ever shows it."""

    __tablename__ = "hub_token"

    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    sealed: Mapped[bytes]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)
