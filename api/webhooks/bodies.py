"""The body of a message in the form that its receiver reads: our own JSON, or a message for a Slack or Teams channel.

The name of a job, its model and the texts about it are strangers' words. Slack decodes ``&``, ``<`` and ``>`` alone
(docs.slack.dev: formatting message text) and formats no ``plain_text``. Teams reads Markdown in a ``TextBlock``, never
in the ``TextRun`` of a ``RichTextBlock`` (Adaptive Cards 1.2: text features), so all of our texts are such runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from api.store.accounts import webhooks
from api.store.accounts.webhooks import Message

MAX_TEXT_LENGTH = 500
"""Characters of a text: escaped it stays below the 3000 that Slack takes, and a card below the 28 KB of Teams."""
_CARD = "application/vnd.microsoft.card.adaptive"
_SCHEMA = "http://adaptivecards.io/schemas/adaptive-card.json"
_IN_ARTIFACT = re.compile(r"/(job_[0-9a-f]{32})/[0-9a-f]{64}(/|$)")
_STATES = {"job.retry_wait": "waiting to retry", webhooks.PUBLISH_FAILED: "could not be published"}
_MARKS = {"job.succeeded": "✓ ", "job.failed": "✕ ", webhooks.PUBLISHED: "✓ ", webhooks.PUBLISH_FAILED: "✕ "}
_MODEL_STATES = {
    webhooks.VERSION_ADDED: "new version",
    webhooks.ALIAS_REQUESTED: "approval requested",
    webhooks.ALIAS_MOVED: "moved",
    webhooks.ALIAS_REFUSED: "refused",
}


def body_of(message: Message, public_url: str | None) -> bytes:
    """Return the body in the webhook's format, the same bytes at every try.

    ``public_url`` is the address of the service for people, without which a channel's message has no link.
    """
    content = _FORMATS[message.format](message, public_url)
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True)
class _Text:
    """The text of a message for people: a title, lines of (label, text), and a link to the run or the registry."""

    title: str
    lines: tuple[tuple[str, str], ...]
    link: str | None
    link_title: str = "Open the run"


def _json(message: Message, _: str | None) -> dict[str, Any]:
    return {"type": message.event_type, "timestamp": message.created_at.isoformat(), "data": message.data}


def _slack(message: Message, public_url: str | None) -> dict[str, Any]:
    """Return a message for an incoming webhook of Slack. Its clients show ``text`` where they cannot show blocks."""
    text = _text_of(message, public_url)
    lines = (text.title, *(f"{label}: {line}" for label, line in text.lines))
    blocks = [_slack_section("plain_text", _slack_escape(line), emoji=False) for line in lines]
    if text.link:
        blocks.append(_slack_section("mrkdwn", f"<{_slack_escape(text.link)}|{text.link_title}>"))
    return {"text": _slack_escape(text.title), "blocks": blocks, "unfurl_links": False, "unfurl_media": False}


def _slack_section(kind: str, text: str, **more: bool) -> dict[str, Any]:
    return {"type": "section", "text": {"type": kind, "text": text, **more}}


def _slack_escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _teams(message: Message, public_url: str | None) -> dict[str, Any]:
    """Return a message with an Adaptive Card, as the workflow "when a Teams webhook request is received" posts it."""
    text = _text_of(message, public_url)
    card: dict[str, Any] = {
        "$schema": _SCHEMA,
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [
            _teams_line({"text": text.title, "weight": "Bolder", "size": "Medium"}),
            *(_teams_line({"text": f"{label}: ", "weight": "Bolder"}, {"text": line}) for label, line in text.lines),
        ],
    }
    if text.link:
        card["actions"] = [{"type": "Action.OpenUrl", "title": text.link_title, "url": text.link}]
    return {"type": "message", "attachments": [{"contentType": _CARD, "contentUrl": None, "content": card}]}


def _teams_line(*runs: dict[str, str]) -> dict[str, Any]:
    return {"type": "RichTextBlock", "inlines": [{"type": "TextRun", **run} for run in runs]}


def _text_of(message: Message, public_url: str | None) -> _Text:
    data, event_type = message.data, message.event_type
    if event_type == webhooks.TEST:
        return _Text("Test message from Bitfoundry", (), None)
    if event_type in _MODEL_STATES:
        return _text_of_model(message, public_url)
    error: dict[str, Any] = data.get("error") or {}
    model = _model_text(data.get("model") or "")  # messages that wait since before an upgrade have none
    verdict = ": ".join(str(data[name]) for name in ("verdict", "verdict_reason") if data.get(name))
    state = _STATES.get(event_type, event_type.removeprefix("job."))
    lines = {
        "Model": model,
        "Verdict": verdict,
        "Goal missed": str(data.get("goal_missed") or ""),
        "Error": str(error.get("message") or ""),
        "What to do": str(error.get("hint") or ""),
    }
    return _Text(
        title=_shortened(f"{_MARKS.get(event_type, '')}{data.get('name') or model or data['id']}: {state}"),
        lines=tuple((label, _shortened(text)) for label, text in lines.items() if text),
        link=f"{public_url}/ui/jobs/{data['id']}" if public_url else None,
    )


def _text_of_model(message: Message, public_url: str | None) -> _Text:
    """Return the text of an event of the registry: what moves from which version to which, why, and who did it."""
    data = message.data
    alias, version, before = data.get("alias"), data["version"], data.get("from_version")
    name = f"{data['model']}@{alias or version}"
    moves = f"{before or 'none'} → {version or 'none'}" if alias else ""
    lines = {"Version": moves, "Reason": data.get("reason"), "Comment": data.get("comment"), "By": data.get("by")}
    return _Text(
        title=_shortened(f"{name}: {_MODEL_STATES[message.event_type]}"),
        lines=tuple((label, _shortened(text)) for label, text in lines.items() if text),
        link=f"{public_url}/ui/registry?name={quote(data['model'])}" if public_url else None,
        link_title="Open the registry",
    )


def _model_text(model: str) -> str:
    """Return an id on the Hub, the last part of a path, or the job whose artifact the path lies in."""
    if match := _IN_ARTIFACT.search(model):
        return f"result of {match[1]}"
    return PurePosixPath(model).name if model.startswith("/") else model


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT_LENGTH else text[: MAX_TEXT_LENGTH - 1] + "…"


_FORMATS: dict[str, Callable[[Message, str | None], dict[str, Any]]] = {
    "json": _json,
    "slack": _slack,
    "teams": _teams,
}
