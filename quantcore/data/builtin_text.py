"""Reads the built-in text: prose, dialogues, code and several languages (``builtin/README.md`` says from where).

It is the same for every version of Python. Its parts by kind are files of rows, as ``files.read_rows`` would read them;
every fourth row of a kind is held out from calibration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

from quantcore.errors import CalibrationError

Render = Callable[..., str]
"""Makes a text of messages, and of the tools beside them if a row has some."""
"""Function from the messages of a chat to the text that the model would see."""
KINDS = ("prose", "dialogue", "code", "languages")


def read_kind(kind: str, render: Render | None = None) -> list[str]:
    """Return the documents of one of the KINDS.

    Dialogues are rendered by ``render`` if the model has a template that takes them, else as plain text.
    """
    rows = _read_rows(kind)
    if kind != "dialogue":
        return [row["text"] for row in rows]
    chats = [row["messages"] for row in rows]
    try:
        return [(render or plain)(messages) for messages in chats]
    except CalibrationError:  # no template, or one that nobody can use: the text of nobody's choice fails no job
        return [plain(messages) for messages in chats]


def read_builtin(render: Render | None = None) -> Iterator[str]:
    """Yield the documents of all kinds in turn, so that every part of them has about the same mix."""
    documents = [
        ((place + 0.5) / len(texts), text)
        for texts in (read_kind(kind, render) for kind in KINDS)
        for place, text in enumerate(texts)
    ]
    yield from (text for _, text in sorted(documents, key=lambda document: document[0]))


def read_prompts() -> list[dict[str, Any]]:
    """Return the packaged prompts, which no calibration sees: rows with ``kind``, ``messages`` and perhaps ``tools``.

    Kinds come in turn, so that the first of them are of all kinds.
    """
    return _read_rows("prompts")


def _read_rows(name: str) -> list[dict[str, Any]]:
    lines = files("quantcore.data").joinpath("builtin", f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def plain(messages: list[dict[str, Any]]) -> str:
    """Return a dialogue as plain text."""
    return "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in messages)
