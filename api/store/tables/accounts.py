"""The tables of a project besides its jobs. No table of jobs refers to them, so they have a file of their own."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Identity, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from api.store.tables.jobs import NOW, Base


class AuditEntry(Base):
    """An entry of the audit log: an action, its actor and its time. A trigger refuses changes of entries."""

    __tablename__ = "audit_entry"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))  # the owner of the changed object
    key_id: Mapped[str | None]  # None: the operator, on the machine itself
    action: Mapped[str]
    object_id: Mapped[str]
    request_id: Mapped[str | None]
    detail: Mapped[dict[str, Any]]

    __table_args__ = (Index("ix_audit_entry_list", "project_id", text("id DESC")),)


class RetentionPolicy(Base):
    """A project's policy for jobs that have ended; see ``retention.Keep``. Without a row all of them stay."""

    __tablename__ = "retention_policy"

    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"), primary_key=True)
    keep_last: Mapped[int | None]
    keep_days: Mapped[int | None]

    __table_args__ = (CheckConstraint("keep_last > 0 AND keep_days > 0", name="limits"),)


class IntegrityFinding(Base):
    """A fault of a stored file: ``missing`` or ``damaged`` (changed) against its row, or an ``orphan`` without one."""

    __tablename__ = "integrity_finding"

    path: Mapped[str] = mapped_column(primary_key=True)  # below the data folder
    kind: Mapped[str]
    object_id: Mapped[str | None]
    detail: Mapped[str]
    found_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (CheckConstraint("kind IN ('damaged', 'missing', 'orphan')", name="kind"),)


class HubToken(Base):
    """A project's token for the Hugging Face Hub, sealed (``vault``). Nothing ever shows it."""

    __tablename__ = "hub_token"

    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    sealed: Mapped[bytes]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Webhook(Base):
    """An address that receives events. ``busy_until``: a process is sending it a message, one at a time."""

    __tablename__ = "webhook"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"), index=True)
    url: Mapped[str]
    format: Mapped[str] = mapped_column(server_default="json")  # of the body
    event_types: Mapped[list[str]]
    sealed_secret: Mapped[bytes]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    failing_since: Mapped[datetime | None]  # the first of the tries in a row that failed
    disabled_at: Mapped[datetime | None]
    disabled_reason: Mapped[str | None]
    busy_until: Mapped[datetime | None]

    __table_args__ = (CheckConstraint("format IN ('json', 'slack', 'teams')", name="format"),)


class WebhookDelivery(Base):
    """A message to a webhook and its outcome: the outbox row, written with the change that it reports."""

    __tablename__ = "webhook_delivery"

    id: Mapped[str] = mapped_column(primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhook.id", ondelete="CASCADE"))
    event_type: Mapped[str]
    data: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(server_default="pending")
    num_tries: Mapped[int] = mapped_column(server_default="0")  # since it was queued, or last queued again
    tries: Mapped[list[dict[str, Any]]] = mapped_column(server_default="[]")  # {at, status, latency_ms, error}
    next_try_at: Mapped[datetime] = mapped_column(server_default=NOW)
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    delivered_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("state IN ('delivered', 'failed', 'pending')", name="state"),
        Index("ix_webhook_delivery_due", "next_try_at", postgresql_where=text("state = 'pending'")),
        Index("ix_webhook_delivery_list", "webhook_id", text("id DESC")),
        Index("ix_webhook_delivery_created_at", "created_at"),
    )


class SignIn(Base):
    """The sign-in of a browser with a key. It ends with its time, with the key, and with the secret that was shown."""

    __tablename__ = "sign_in"

    token_sha256: Mapped[bytes] = mapped_column(primary_key=True)
    api_key_id: Mapped[str] = mapped_column(ForeignKey("api_key.id", ondelete="CASCADE"), index=True)
    secret_sha256: Mapped[bytes]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime] = mapped_column(index=True)


class IdempotencyKey(Base):
    """A client's idempotency key for a request, and the id it created. Unique: two at once create one object."""

    __tablename__ = "idempotency_key"

    api_key_id: Mapped[str] = mapped_column(ForeignKey("api_key.id", ondelete="CASCADE"), primary_key=True)
    route: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    body_sha256: Mapped[bytes]
    made_id: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW, index=True)
