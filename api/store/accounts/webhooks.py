"""Webhooks and their deliveries as rows.

A delivery is its own outbox: it is written in the transaction of the change that it reports, so it is sent if and only
if the change happened. The sender (``api.webhooks.deliverer``, in any process of the API) claims the *webhook*, for
one delivery at a time: a slow receiver keeps one sender busy and not all, and sees its messages nearly in order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, func, or_, select
from sqlalchemy.orm import Session

from api.store.ids import new_id
from api.store.states import State
from api.store.tables.accounts import Webhook, WebhookDelivery
from api.store.tables.jobs import Job
from api.store.vault import Vault

PUBLISHED, PUBLISH_FAILED = "job.published", "job.publish_failed"
VERSION_ADDED = "model.version_added"
ALIAS_REQUESTED, ALIAS_MOVED, ALIAS_REFUSED = "model.alias_requested", "model.alias_moved", "model.alias_refused"
EVENT_TYPES = (
    *(f"job.{state}" for state in State),
    *(PUBLISHED, PUBLISH_FAILED),
    *(VERSION_ADDED, ALIAS_REQUESTED, ALIAS_MOVED, ALIAS_REFUSED),
)
TEST = "webhook.test"  # what the test button sends, whatever the webhook subscribes to
PENDING, DELIVERED, FAILED = "pending", "delivered", "failed"

# Delays after each failure, as Standard Webhooks suggests; then the message is given up. Three days in all.
RETRY_AFTER_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
MAX_RETRY_AFTER_S = 86_400.0
DISABLED_AFTER = timedelta(days=5)
KEPT_FOR = timedelta(days=30)
PURGE_BATCH = 1000


@dataclass(frozen=True)
class Message:
    """A delivery that is due, and its address."""

    id: str
    webhook_id: str
    project_id: str
    url: str
    format: str
    sealed_secret: bytes
    event_type: str
    created_at: datetime
    data: dict[str, Any]


@dataclass(frozen=True)
class Try:
    """The result of a delivery attempt: the receiver's HTTP status, or the error; the wait that the receiver wants."""

    at: datetime
    latency_ms: int
    status: int | None = None
    error: str | None = None
    retry_after_s: float = 0.0

    @property
    def succeeded(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    def to_dict(self) -> dict[str, Any]:
        return {"at": self.at.isoformat(), "status": self.status, "latency_ms": self.latency_ms, "error": self.error}


def add(session: Session, vault: Vault, webhook: Webhook, secret: str) -> None:
    """Store a new webhook; its secret is sealed and bound to this row."""
    webhook.sealed_secret = vault.seal(secret, _about(webhook.id))
    session.add(webhook)
    session.flush()


def open_secret(vault: Vault, message: Message) -> str:
    """Return the secret that signs the message. Raises CannotOpen."""
    return vault.open(message.sealed_secret, _about(message.webhook_id))


def find_own(session: Session, project_id: str, webhook_id: str) -> Webhook | None:
    return session.scalar(select(Webhook).where(Webhook.id == webhook_id, Webhook.project_id == project_id))


def find_all(session: Session, project_id: str) -> Sequence[Webhook]:
    """Return the project's webhooks, the oldest first."""
    return session.scalars(select(Webhook).where(Webhook.project_id == project_id).order_by(Webhook.id)).all()


def enable(session: Session, webhook: Webhook) -> None:
    """Enable the webhook: its waiting messages are sent as if it had never failed."""
    webhook.disabled_at = webhook.disabled_reason = webhook.failing_since = None
    session.flush()


def disable(session: Session, webhook: Webhook, reason: str) -> None:
    """Disable the webhook: nothing more is sent to it, or queued for it."""
    webhook.disabled_at, webhook.disabled_reason = func.clock_timestamp(), reason
    session.flush()
    session.refresh(webhook)


def queue(session: Session, project_id: str, event_type: str, data: dict[str, Any]) -> None:
    """Queue a delivery for each webhook of the project that subscribes to the event.

    It is part of the caller's transaction, which is the outbox.
    """
    wanted = select(Webhook.id).where(
        Webhook.project_id == project_id,
        Webhook.disabled_at.is_(None),
        Webhook.event_types.contains([event_type]),
    )
    with session.no_autoflush:  # the caller may be in the middle of changing the job
        ids = session.scalars(wanted).all()
    for webhook_id in ids:
        queue_one(session, webhook_id, event_type, data)


def queue_about(session: Session, job: Job, event_type: str, data: dict[str, Any]) -> None:
    """Queue an event of a job, as ``queue`` does."""
    about_job = {
        "id": job.id,
        "project_id": job.project_id,
        "name": job.name,
        "labels": job.labels,
        "model": job.model.get("id") or job.model["path"],
    }
    queue(session, job.project_id, event_type, about_job | data)


def queue_one(session: Session, webhook_id: str, event_type: str, data: dict[str, Any]) -> WebhookDelivery:
    delivery = WebhookDelivery(id=new_id("msg"), webhook_id=webhook_id, event_type=event_type, data=data)
    session.add(delivery)
    return delivery


def find_delivery(session: Session, webhook: Webhook, delivery_id: str) -> WebhookDelivery | None:
    wanted = select(WebhookDelivery).where(WebhookDelivery.id == delivery_id)
    return session.scalar(wanted.where(WebhookDelivery.webhook_id == webhook.id).with_for_update())


def page(
    session: Session, webhook: Webhook, *, state: str | None, before: str | None, limit: int
) -> Sequence[WebhookDelivery]:
    """Return the deliveries with an id below ``before``, newest first: ids sort by age."""
    deliveries = select(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook.id)
    if state is not None:
        deliveries = deliveries.where(WebhookDelivery.state == state)
    if before is not None:
        deliveries = deliveries.where(WebhookDelivery.id < before)
    return session.scalars(deliveries.order_by(WebhookDelivery.id.desc()).limit(limit)).all()


def redeliver(session: Session, delivery: WebhookDelivery) -> None:
    """Queue the same message again, under the same id: the receiver can tell that it has seen it."""
    delivery.state, delivery.num_tries = PENDING, 0
    delivery.next_try_at, delivery.delivered_at = func.clock_timestamp(), None
    session.flush()
    session.refresh(delivery)


def claim(session: Session, *, lease_s: float) -> Message | None:
    """Claim the delivery that has been due longest, of a webhook that nobody is sending to; None if there is none.

    If ``record`` does not follow within ``lease_s`` seconds, it is tried again.
    """
    now = func.clock_timestamp()
    due = (
        select(WebhookDelivery, Webhook)
        .join(Webhook, Webhook.id == WebhookDelivery.webhook_id)
        .where(WebhookDelivery.state == PENDING, WebhookDelivery.next_try_at <= now, Webhook.disabled_at.is_(None))
        .where(or_(Webhook.busy_until.is_(None), Webhook.busy_until < now))
        .order_by(WebhookDelivery.next_try_at, WebhookDelivery.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    row = session.execute(due).one_or_none()
    if row is None:
        return None
    delivery, webhook = row
    webhook.busy_until = now + timedelta(seconds=lease_s)
    return Message(
        delivery.id,
        webhook.id,
        webhook.project_id,
        webhook.url,
        webhook.format,
        webhook.sealed_secret,
        delivery.event_type,
        delivery.created_at,
        delivery.data,
    )


def record(session: Session, message: Message, result: Try) -> None:
    """Record the result of a claimed delivery: done, to be tried later, or given up. Nothing if it was deleted."""
    locked = select(WebhookDelivery, Webhook).join(Webhook, Webhook.id == WebhookDelivery.webhook_id)
    row = session.execute(locked.where(WebhookDelivery.id == message.id).with_for_update()).one_or_none()
    if row is None:
        return
    delivery, webhook = row
    webhook.busy_until = None
    delivery.num_tries += 1
    delivery.tries = [*delivery.tries, result.to_dict()]
    if result.succeeded:
        delivery.state, delivery.delivered_at = DELIVERED, func.clock_timestamp()
        webhook.failing_since = None
        return
    if delivery.num_tries > len(RETRY_AFTER_S):
        delivery.state = FAILED
    else:
        delivery.next_try_at = func.clock_timestamp() + timedelta(seconds=_delay_s(delivery.num_tries, result))
    now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    webhook.failing_since = webhook.failing_since or now
    if result.status == 410:
        disable(session, webhook, "the receiver answered 410 Gone")
    elif webhook.failing_since < now - DISABLED_AFTER:
        disable(session, webhook, f"nothing could be delivered for {DISABLED_AFTER.days} days")


def purge(session: Session, *, limit: int = PURGE_BATCH) -> int:
    """Delete deliveries after 30 days. Returns their number."""
    old = select(WebhookDelivery.id).where(WebhookDelivery.created_at < func.clock_timestamp() - KEPT_FOR)
    gone = delete(WebhookDelivery).where(WebhookDelivery.id.in_(old.limit(limit).with_for_update(skip_locked=True)))
    return len(session.scalars(gone.returning(WebhookDelivery.id)).all())


def _delay_s(num_tries: int, result: Try) -> float:
    """Return the seconds until the next attempt, with jitter, and no fewer than the receiver asked for.

    The jitter keeps a receiver that comes back from being run over.
    """
    delay_s = RETRY_AFTER_S[num_tries - 1] * random.uniform(1.0, 1.2)
    return min(max(delay_s, result.retry_after_s), MAX_RETRY_AFTER_S * 1.2)


def _about(webhook_id: str) -> str:
    return f"webhook {webhook_id}"
