"""The commands `bitfoundry webhooks ...`; `COMMANDS` maps names to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitfoundry.commands import terminal
from bitfoundry.commands.account import show_rows
from bitfoundry.commands.options import AsJson, show_deleted, with_client

if TYPE_CHECKING:
    from bitfoundry.client.service import Client

WebhookId = Annotated[str, typer.Argument(help="Webhook: its id or the start of it, or `last`.")]
Events = Annotated[
    list[str] | None, typer.Option("--event", help="Event, e.g. job.succeeded or job.failed. Repeatable.")
]
Format = Annotated[
    str | None, typer.Option(help="Body of the messages: json, or slack or teams for the URL of a channel there.")
]
ENDINGS = ["job.succeeded", "job.failed", "job.cancelled"]
WEBHOOK_COLUMNS = ("id", "url", "format", "event_types", "failing_since", "disabled_reason")
DELIVERY_COLUMNS = ("id", "event_type", "state", "num_tries", "created_at", "last")


@with_client
def create(
    client: Client,
    target: Annotated[str, typer.Argument(metavar="URL", help="Public HTTPS address that receives the events.")],
    event: Events = None,
    format: Format = None,
    as_json: AsJson = False,
) -> None:
    """Create a webhook, by default for the end of every job. Its signing secret is shown only once."""
    webhook = client.webhooks.create(target, event or ENDINGS, format=format or "json")
    if as_json:
        terminal.print_json(webhook.model_dump(mode="json"))
        return
    terminal.out.print(webhook.secret or "", soft_wrap=True)
    terminal.err.print(f"This is the signing secret of {webhook.id}. It will not be shown again.", soft_wrap=True)


@with_client
def list_webhooks(client: Client, as_json: AsJson = False) -> None:
    """List the project's webhooks."""
    show_rows(client.webhooks.list(), WEBHOOK_COLUMNS, as_json)


@with_client
def edit(
    client: Client,
    webhook_id: WebhookId,
    target: Annotated[str | None, typer.Option("--to", metavar="URL", help="New address.")] = None,
    event: Events = None,
    format: Format = None,
    enabled: Annotated[bool | None, typer.Option("--enable/--disable", help="Resume or stop deliveries.")] = None,
    as_json: AsJson = False,
) -> None:
    """Change a webhook, disable it or enable it again."""
    fields: dict[str, Any] = {"url": target, "format": format, "event_types": event, "enabled": enabled}
    changes = {name: value for name, value in fields.items() if value is not None}
    show_rows([client.webhooks.edit(webhook_id, changes)], WEBHOOK_COLUMNS, as_json, single=True)


@with_client
def delete(client: Client, webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Delete a webhook and its deliveries."""
    client.webhooks.delete(webhook_id)
    show_deleted(webhook_id, as_json)


@with_client
def test(client: Client, webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Send an event of type webhook.test. Check the result with `webhooks deliveries`."""
    show_rows([client.webhooks.test(webhook_id)], DELIVERY_COLUMNS, as_json, single=True)


@with_client
def deliveries(
    client: Client,
    webhook_id: WebhookId,
    state: Annotated[
        str | None, typer.Option(help="Only deliveries in this state: pending, delivered or failed.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of deliveries.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the deliveries of a webhook, newest first."""
    stream = client.webhooks.deliveries(webhook_id, state=state, page_size=min(limit, 100))
    rows = [delivery for _, delivery in zip(range(limit), stream, strict=False)]
    if not as_json:  # a table shows the result of the last attempt
        rows = [row.model_copy(update={"last": _last_try(row.tries)}) for row in rows]
    show_rows(rows, DELIVERY_COLUMNS, as_json)


@with_client
def redeliver(
    client: Client,
    webhook_id: WebhookId,
    delivery_id: Annotated[str, typer.Argument(help="Delivery id, as shown by `webhooks deliveries`.")],
    as_json: AsJson = False,
) -> None:
    """Send a delivery again."""
    show_rows([client.webhooks.redeliver(webhook_id, delivery_id)], DELIVERY_COLUMNS, as_json, single=True)


COMMANDS: dict[str, Callable[..., None]] = {
    "create": create,
    "list": list_webhooks,
    "edit": edit,
    "delete": delete,
    "test": test,
    "deliveries": deliveries,
    "redeliver": redeliver,
}


def _last_try(tries: list[dict[str, Any]]) -> str:
    if not tries:
        return "not tried yet"
    last = tries[-1]
    return f"{last['error'] or last['status']} ({last['latency_ms']} ms)"
