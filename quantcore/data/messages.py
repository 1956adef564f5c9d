"""Messages whose content is a list of parts: texts, images and sounds, as chat templates take them. No torch.

A part holds its image or sound, or the row does in a column of its own, in the order of the parts: as TRL has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantcore.errors import CalibrationError

Message = dict[str, Any]
MEDIA_KINDS = ("image", "audio")
"""Types of the parts that are not text."""
COLUMNS = {"image": ("images", "image"), "audio": ("audios", "audio")}
MEDIA_COLUMNS = tuple(name for names in COLUMNS.values() for name in names)
"""Names of the columns of a row with its images or sounds: a list of them, or a single one."""


@dataclass(frozen=True)
class Reference:
    """An image or a sound (``kind``): a path or a data URL, or the content of the file."""

    kind: str
    source: str | bytes


def as_templates_take_them(messages: Sequence[Message]) -> list[Message]:
    """Return messages as chat templates expect them; vLLM gives a template the same.

    No content (beside tool calls) is an empty text: many templates would print "None". A part that is a string is a
    part of text, and arguments of tool calls are an object, not JSON in a string.
    """
    taken = []
    for message in messages:
        calls = message.get("tool_calls")
        with_calls = {"tool_calls": [_call(call) for call in calls]} if isinstance(calls, list) else {}
        taken.append({**message, "content": _content(message.get("content")), **with_calls})
    return taken


def without_parts(messages: Sequence[Message]) -> list[Message]:
    """Return messages with lists of text parts joined, for templates that only take text."""
    return [
        message | {"content": "\n".join(str(part.get("text") or "") for part in content)}
        if isinstance(content := message.get("content"), list) and all(_is_text(part) for part in content)
        else message
        for message in messages
    ]


def _content(content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return "" if content is None else content


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def holds_media(messages: Sequence[Message]) -> bool:
    """Return True for a chat of which a part is an image, a sound or a video (which is refused later)."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    return any(isinstance(part, dict) and _kind(part) in (*MEDIA_KINDS, "video") for part in parts)


def without_references(
    messages: Sequence[Message], row: Mapping[str, Any]
) -> tuple[list[Message], tuple[Reference, ...]]:
    """Return the messages without what their parts refer to, and that; ``row`` are the columns beside them.

    Raises CalibrationError ``bad_media`` for a part of another type, and for an image or sound that is missing or left.
    """
    beside = {kind: _of_row(row, kind) for kind in MEDIA_KINDS}
    references: list[Reference] = []

    def bare(part: Any) -> Message:
        kind = _kind(part) if isinstance(part, dict) else type(part).__name__
        if kind == "text":
            return {"type": "text", "text": part.get("text")}
        if kind not in MEDIA_KINDS:
            raise CalibrationError(
                f"it has a part of type '{kind[:50]}'.",
                code="bad_media",
                hint="A message is a text or a list of parts of the allowed types.",
                field="/calibration/column",
                allowed=("text", *MEDIA_KINDS),
            )
        source = _source(part, kind) or next(beside[kind], None)
        if source is None:
            raise CalibrationError(
                f"it has a part of type '{kind}' without a file.",
                code="bad_media",
                hint=f'{{"type": "{kind}", "{kind}": "FILE"}}: a path relative to the data file, or a data URL. Or '
                f"put them in a column called {COLUMNS[kind][0]}.",
                field="/calibration/column",
            )
        references.append(Reference(kind, source))
        return {"type": kind}

    changed = [
        message | {"content": [bare(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    for kind in MEDIA_KINDS:
        if any(reference.kind == kind for reference in references) and (num_left := len(list(beside[kind]))):
            raise CalibrationError(
                f"{num_left} in the column '{COLUMNS[kind][0]}' do not belong to a part of type '{kind}'.",
                code="bad_media",
                hint="Use as many parts as there are files in the column.",
                field="/calibration/column",
            )
    return changed, tuple(references)


def sounds_of(row: Mapping[str, Any]) -> tuple[Reference, ...]:
    """Return the sounds in the columns of a row, to which its text belongs as a whole."""
    return tuple(Reference("audio", source) for source in _of_row(row, "audio"))


def texts_of(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of ``without_references`` with only their text parts."""
    return [
        message | {"content": [part for part in message["content"] if part["type"] == "text"]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _kind(part: Mapping[str, Any]) -> str:
    return str(part.get("type")).removesuffix("_url")  # image_url is the API's of OpenAI


def _source(part: Mapping[str, Any], kind: str) -> str | bytes | None:
    """Return what a part itself refers to."""
    names = (part.get(name) for name in (kind, "path", "url", f"{kind}_url"))
    given = next(filter(None, names), None)
    return _plain(given.get("url") or given) if isinstance(given, dict) else _plain(given)


def _of_row(row: Mapping[str, Any], kind: str) -> Iterator[str | bytes]:
    """Yield the images or sounds in a column of a row."""
    found: Any = next((row[name] for name in COLUMNS[kind] if row.get(name)), [])
    yield from filter(None, map(_plain, found if isinstance(found, list) else [found]))


def _plain(value: Any) -> str | bytes | None:
    """Return a path, a data URL or content; the datasets library stores ``{"bytes": ..., "path": ...}``."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    return value if isinstance(value, (str, bytes)) else None
