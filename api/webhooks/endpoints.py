"""The routes of webhooks."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Path, Query, Request, Response
from sqlalchemy.orm import Session

from api.http.deps import Context, ContextDep, SessionsDep
from api.http.errors import Problem, may
from api.http.security import Admin
from api.http.strict_json import StrictJsonRoute
from api.store.accounts import audit, projects, webhooks
from api.store.accounts.audit import Caller
from api.store.ids import new_id
from api.store.tables.accounts import Webhook
from api.webhooks import addresses, signing
from api.webhooks.schemas import (
    DeliveryOut,
    DeliveryPage,
    DeliveryState,
    NewWebhookOut,
    WebhookCreate,
    WebhookList,
    WebhookOut,
    WebhookPatch,
)

router = APIRouter(prefix="/webhooks", tags=["webhooks"], route_class=StrictJsonRoute)

WebhookId = Annotated[str, Path(pattern="^whk_[0-9a-f]{32}$")]
DeliveryId = Annotated[str, Path(pattern="^msg_[0-9a-f]{32}$")]
Cursor = Annotated[str | None, Query(pattern="^msg_[0-9a-f]{32}$", description="`next_cursor` of the previous page.")]


@router.post("", status_code=201, responses=may(409, 422))
def create_webhook(body: WebhookCreate, caller: Admin, context: ContextDep, response: Response) -> NewWebhookOut:
    """Create a webhook for these events. The secret that signs its messages is in this response only."""
    _check_url(body.url, context)
    vault, secret = context.require_vault(), signing.new_secret()
    webhook = Webhook(id=new_id("whk"), project_id=caller.project_id, **body.model_dump())
    with context.sessions.begin() as session:
        projects.check_room(session, caller.project_id, max_webhooks=1)
        webhooks.add(session, vault, webhook, secret)
        audit.note(session, caller, "webhook.create", webhook.id, **_audited(webhook, body.model_dump()))
        session.refresh(webhook)
    response.headers["Location"] = f"/v1/webhooks/{webhook.id}"
    response.headers["Cache-Control"] = "no-store"
    return NewWebhookOut(**WebhookOut.of(webhook).model_dump(), secret=secret)


@router.get("")
def list_webhooks(caller: Admin, sessions: SessionsDep) -> WebhookList:
    """List the project's webhooks."""
    with sessions.begin() as session:
        return WebhookList(data=[WebhookOut.of(webhook) for webhook in webhooks.find_all(session, caller.project_id)])


@router.get("/{webhook_id}", responses=may(404))
def get_webhook(webhook_id: WebhookId, caller: Admin, sessions: SessionsDep) -> WebhookOut:
    """Return a webhook."""
    with sessions.begin() as session:
        return WebhookOut.of(_open(session, caller, webhook_id))


@router.patch("/{webhook_id}", responses=may(404, 422))
def edit_webhook(webhook_id: WebhookId, body: WebhookPatch, caller: Admin, context: ContextDep) -> WebhookOut:
    """Change the URL, the format or the events; disable the webhook, or enable it again with what waited for it."""
    changes = body.model_dump(exclude_unset=True)
    if "url" in changes:
        _check_url(body.url, context)
    with context.sessions.begin() as session:
        webhook = _open(session, caller, webhook_id)
        for name in changes.keys() & {"url", "format", "event_types"}:
            setattr(webhook, name, changes[name])
        if changes.get("enabled") is True:
            webhooks.enable(session, webhook)
        elif changes.get("enabled") is False:
            webhooks.disable(session, webhook, "on request")
        audit.note(session, caller, "webhook.edit", webhook_id, **_audited(webhook, changes))
        return WebhookOut.of(webhook)


@router.delete("/{webhook_id}", status_code=204, responses=may(404))
def delete_webhook(webhook_id: WebhookId, caller: Admin, sessions: SessionsDep) -> None:
    """Delete a webhook, with its deliveries."""
    with sessions.begin() as session:
        session.delete(_open(session, caller, webhook_id))
        audit.note(session, caller, "webhook.delete", webhook_id)


@router.post("/{webhook_id}/test", status_code=202, responses=may(404, 409))
def test_webhook(webhook_id: WebhookId, caller: Admin, sessions: SessionsDep) -> DeliveryOut:
    """Send a message of the type ``webhook.test``, as any other: signed, tried again, and seen in the deliveries."""
    with sessions.begin() as session:
        webhook = _open_enabled(session, caller, webhook_id)
        delivery = webhooks.queue_one(session, webhook.id, webhooks.TEST, {"webhook_id": webhook.id})
        session.flush()
        session.refresh(delivery)
        audit.note(session, caller, "webhook.test", webhook_id, delivery_id=delivery.id)
        return DeliveryOut.of(delivery)


@router.get("/{webhook_id}/deliveries", responses=may(404, 422))
def list_webhook_deliveries(
    webhook_id: WebhookId,
    caller: Admin,
    sessions: SessionsDep,
    request: Request,
    response: Response,
    state: Annotated[DeliveryState | None, Query(description="Only deliveries in this state.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    cursor: Cursor = None,
) -> DeliveryPage:
    """List the deliveries: sent with their outcome, and waiting; newest first."""
    with sessions.begin() as session:
        webhook = _open(session, caller, webhook_id)
        rows = webhooks.page(session, webhook, state=state, before=cursor, limit=limit + 1)
    shown = [DeliveryOut.of(delivery) for delivery in rows[:limit]]
    next_cursor = shown[-1].id if len(rows) > limit else None
    if next_cursor:
        following = request.url.include_query_params(cursor=next_cursor)
        response.headers["Link"] = f'<{following.path}?{following.query}>; rel="next"'
    return DeliveryPage(data=shown, has_more=next_cursor is not None, next_cursor=next_cursor)


@router.post("/{webhook_id}/deliveries/{delivery_id}/redeliver", status_code=202, responses=may(404, 409))
def redeliver_webhook_delivery(
    webhook_id: WebhookId, delivery_id: DeliveryId, caller: Admin, sessions: SessionsDep
) -> DeliveryOut:
    """Send a message again, delivered or not, with its full number of tries. It keeps its id."""
    with sessions.begin() as session:
        webhook = _open_enabled(session, caller, webhook_id)
        delivery = webhooks.find_delivery(session, webhook, delivery_id)
        if delivery is None:
            raise Problem(404, "delivery_not_found", "There is no such delivery.", hint="They are kept for 30 days.")
        webhooks.redeliver(session, delivery)
        audit.note(session, caller, "webhook.redeliver", webhook_id, delivery_id=delivery_id)
        return DeliveryOut.of(delivery)


def _check_url(url: str, context: Context) -> None:
    """Check the URL as before every try; here it tells whoever makes a mistake. Raises Problem 422."""
    try:
        addresses.locate(url, context.settings.webhook_networks)
    except addresses.NotAllowed as error:
        entry = {"pointer": "#/url", "detail": str(error), "code": "webhook_url_not_allowed"}
        raise Problem(
            422,
            "webhook_url_not_allowed",
            f"Webhooks may not use this URL: {error}.",
            hint="Use an https URL on the public internet. The operator can allow other networks, for example"
            " BITFOUNDRY_WEBHOOK_NETWORKS=127.0.0.0/8 for this machine.",
            errors=[entry],
        ) from error


def _audited(webhook: Webhook, changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes for the audit log: of a channel's URL the host alone, since the URL lets anyone write to it."""
    if webhook.format == "json" or "url" not in changes:
        return changes
    parts = urlsplit(changes["url"])
    return changes | {"url": f"{parts.scheme}://{parts.hostname}/…"}


def _open(session: Session, caller: Caller, webhook_id: str) -> Webhook:
    webhook = webhooks.find_own(session, caller.project_id, webhook_id)
    if webhook is None:
        raise Problem(404, "webhook_not_found", "There is no such webhook.")
    return webhook


def _open_enabled(session: Session, caller: Caller, webhook_id: str) -> Webhook:
    webhook = _open(session, caller, webhook_id)
    if webhook.disabled_at is not None:
        why = f"The webhook is disabled: {webhook.disabled_reason}."
        raise Problem(409, "webhook_disabled", why, hint='PATCH it with {"enabled": true} first.')
    return webhook
