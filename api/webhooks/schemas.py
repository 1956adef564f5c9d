"""The request and response bodies of webhooks."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.schemas import Printable, RequestBody
from api.store.tables.accounts import Webhook, WebhookDelivery

EventType = Literal[
    "job.queued",
    "job.running",
    "job.retry_wait",
    "job.cancelling",
    "job.pausing",
    "job.paused",
    "job.succeeded",
    "job.failed",
    "job.cancelled",
    "job.published",
    "job.publish_failed",
    "model.version_added",
    "model.alias_requested",
    "model.alias_moved",
    "model.alias_refused",
]
Url = Annotated[Printable, Field(min_length=1, max_length=2000)]
EventTypes = Annotated[list[EventType], Field(min_length=1, max_length=16)]
Format = Literal["json", "slack", "teams"]
DeliveryState = Literal["pending", "delivered", "failed"]

WEBHOOK: dict[str, Any] = {
    "id": "whk_01a200dc5edf7cfaa251b183f95c582d",
    "url": "https://ci.example.org/bitfoundry",
    "format": "json",
    "event_types": ["job.succeeded", "job.failed"],
    "created_at": "2026-11-22T08:00:00Z",
    "failing_since": None,
    "disabled_at": None,
    "disabled_reason": None,
}
DELIVERY: dict[str, Any] = {
    "id": "msg_01a200dc5edf7cfaa251b183f95c582d",
    "event_type": "job.succeeded",
    "data": {"id": "job_01a200dc5edf7cfaa251b183f95c582d", "state": "succeeded", "name": "nightly"},
    "state": "delivered",
    "num_tries": 1,
    "tries": [{"at": "2026-11-22T08:00:00Z", "status": 204, "latency_ms": 31, "error": None}],
    "next_try_at": None,
    "created_at": "2026-11-22T08:00:00Z",
    "delivered_at": "2026-11-22T08:00:00Z",
}


class WebhookCreate(RequestBody):
    """The request body for creating a webhook. The URL is https and public, unless the operator allows more."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"url": WEBHOOK["url"], "event_types": WEBHOOK["event_types"]}]}
    )

    url: Url
    format: Format = Field(
        default="json",
        description="Body of the messages: our JSON, or a message for a Slack or Microsoft Teams channel.",
    )
    event_types: EventTypes


class WebhookPatch(RequestBody):
    """The request body for changing a webhook. Fields that are not named stay; ``enabled`` true resumes it."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"enabled": True}]})

    url: Url = ""
    format: Format = "json"
    event_types: Annotated[tuple[EventType, ...], Field(min_length=1, max_length=16)] = ()
    enabled: bool = True


class WebhookOut(BaseModel):
    """A webhook. ``disabled_reason`` says why nothing is sent any more."""

    model_config = ConfigDict(
        json_schema_serialization_defaults_required=True, json_schema_extra={"examples": [WEBHOOK]}
    )

    id: str
    url: str
    format: Format = "json"
    event_types: list[str]
    created_at: datetime
    failing_since: datetime | None
    disabled_at: datetime | None
    disabled_reason: str | None

    @classmethod
    def of(cls, webhook: Webhook) -> WebhookOut:
        return cls(**{name: getattr(webhook, name) for name in WebhookOut.model_fields})


class NewWebhookOut(WebhookOut):
    """A webhook with the secret that signs its messages, which is shown now and never again."""

    model_config = ConfigDict(json_schema_extra={"examples": [WEBHOOK | {"secret": "whsec_" + "x" * 43 + "="}]})

    secret: str


class WebhookList(BaseModel):
    """The project's webhooks, the oldest first."""

    data: list[WebhookOut]


class TryOut(BaseModel):
    """A delivery attempt: the receiver's HTTP status, or ``error`` if there was no response."""

    at: datetime
    status: int | None
    latency_ms: int
    error: str | None


class DeliveryOut(BaseModel):
    """A message and its tries; ``next_try_at`` while it is pending."""

    model_config = ConfigDict(json_schema_extra={"examples": [DELIVERY]})

    id: str
    event_type: str
    data: dict[str, Any]
    state: DeliveryState
    num_tries: int
    tries: list[TryOut]
    next_try_at: datetime | None
    created_at: datetime
    delivered_at: datetime | None

    @classmethod
    def of(cls, delivery: WebhookDelivery) -> DeliveryOut:
        columns = {name: getattr(delivery, name) for name in cls.model_fields}
        return cls(**columns | {"next_try_at": delivery.next_try_at if delivery.state == "pending" else None})


class DeliveryPage(BaseModel):
    """A page of deliveries, newest first; ``next_cursor`` asks for the next page. Deliveries are kept for 30 days."""

    data: list[DeliveryOut]
    has_more: bool
    next_cursor: str | None
