"""Calls for webhooks: `client.webhooks`. They need the scope `admin`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from bitfoundry.client.project_answers import Delivery as Delivery
from bitfoundry.client.project_answers import Webhook as Webhook
from bitfoundry.client.transport import Transport


class Webhooks:
    """Calls for webhooks."""

    def __init__(self, service: Transport) -> None:
        self._service = service

    def create(self, url: str, event_types: Sequence[str], *, format: str = "json") -> Webhook:
        """Create a webhook that sends these events to `url` from now on. Keep the `secret`: it is shown once.

        `format` is `json`, or `slack` or `teams` for the URL of a channel there.
        """
        body = {"url": url, "format": format, "event_types": [*event_types]}
        return self._webhook("POST", "/v1/webhooks", body=body)

    def list(self) -> Sequence[Webhook]:
        """Return the project's webhooks, oldest first."""
        return [Webhook.model_validate(row) for row in self._service.send("GET", "/v1/webhooks").json()["data"]]

    def get(self, webhook_id: str) -> Webhook:
        """Return a webhook. Raises ApiError `webhook_not_found`."""
        return self._webhook("GET", _path(webhook_id))

    def edit(self, webhook_id: str, changes: Mapping[str, Any]) -> Webhook:
        """Change `url`, `format`, `event_types` or `enabled` of a webhook."""
        return self._webhook("PATCH", _path(webhook_id), body=changes)

    def delete(self, webhook_id: str) -> None:
        """Delete a webhook and its deliveries."""
        self._service.send("DELETE", _path(webhook_id))

    def test(self, webhook_id: str) -> Delivery:
        """Send a message of the type webhook.test."""
        return self._delivery(f"{_path(webhook_id)}/test")

    def deliveries(self, webhook_id: str, *, state: str | None = None, page_size: int = 50) -> Iterator[Delivery]:
        """Yield the sent and waiting messages, newest first, loaded page by page."""
        query: dict[str, Any] = {"limit": page_size} | ({"state": state} if state else {})
        while True:
            page = self._service.send("GET", f"{_path(webhook_id)}/deliveries", query=query).json()
            yield from (Delivery.model_validate(row) for row in page["data"])
            if not page["has_more"]:
                return
            query["cursor"] = page["next_cursor"]

    def redeliver(self, webhook_id: str, delivery_id: str) -> Delivery:
        """Send a message again, under the same id."""
        return self._delivery(f"{_path(webhook_id)}/deliveries/{quote(delivery_id, safe='')}/redeliver")

    def _webhook(self, method: str, path: str, *, body: Mapping[str, Any] | None = None) -> Webhook:
        return Webhook.model_validate_json(self._service.send(method, path, body=body).content)

    def _delivery(self, path: str) -> Delivery:
        return Delivery.model_validate_json(self._service.send("POST", path).content)


def _path(webhook_id: str) -> str:
    return f"/v1/webhooks/{quote(webhook_id, safe='')}"
