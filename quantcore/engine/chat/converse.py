"""``python -m quantcore converse TASK.json``: a chat for a worker, with prompts and answers as JSON lines.

Each line of standard input is ``{"number": 1, "prompt": "..."}``; the chat ends with the input. The models answer with
the events ``chat_ready``, then ``chat_turn`` a few times a second while a turn grows, or ``chat_turn_failed``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantcore.config.values import config_error
from quantcore.engine.chat.chat import Chat, open_chat
from quantcore.errors import QuantError
from quantcore.events import Emit, Event, PhaseStarted
from quantcore.hub.download import download
from quantcore.report.answers import Answer, Turn

INTERVAL_S = 0.25
MAX_TEXT_CHARS = 20_000
"""Length of an answer's text in an event: a worker reads lines of 256 KiB at most."""


class ChatTask(BaseModel):
    """The two models of a chat: the ``artifact_dir``, and its original in a folder or on the Hub.

    With ``token_on_stdin`` the first line of standard input is the Hub's token, or empty.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    artifact_dir: Path
    model_dir: Path | None = None
    model_id: str = ""
    revision: str = ""
    token_on_stdin: bool = False
    max_new_tokens: Annotated[int, Field(ge=1)]


def read_chat_task(path: Path) -> ChatTask:
    """Read the task in a JSON file. Raises ConfigError ``invalid_task``."""
    try:
        return ChatTask.model_validate_json(path.read_text("utf-8"))
    except ValidationError as error:
        raise config_error(error, f"The task in {path}", code="invalid_task") from error


@dataclass(frozen=True)
class ChatReady(Event):
    """Both models are in memory. Without a chat template, prompts are continued."""

    kind: ClassVar[str] = "chat_ready"
    has_template: bool


@dataclass(frozen=True)
class ChatTurn(Event):
    """A turn so far, or whole: ``turn`` is a ``quantcore.report.answers.Turn`` as JSON data."""

    kind: ClassVar[str] = "chat_turn"
    number: int
    turn: dict[str, Any]
    is_whole: bool


@dataclass(frozen=True)
class ChatTurnFailed(Event):
    """A prompt that the models cannot answer. The chat goes on, and forgets the turn."""

    kind: ClassVar[str] = "chat_turn_failed"
    number: int
    code: str
    message: str
    hint: str


def converse(task: ChatTask, lines: Iterable[str], emit: Emit) -> None:
    """Load the models, then answer the prompts of ``lines``. Raises as ``open_chat`` and ``hub.download``."""
    lines = iter(lines)
    token = next(lines, "").strip() if task.token_on_stdin else ""
    original = task.model_dir
    if original is None:
        emit(PhaseStarted("download"))
        original = download(task.model_id, task.revision, emit, token=token or None)
    with open_chat(task.artifact_dir, original, task.max_new_tokens) as chat:
        emit(ChatReady(chat.has_template))
        for line in lines:
            asked = json.loads(line)
            try:
                _answer(chat, asked["number"], asked["prompt"], emit)
            except QuantError as error:
                emit(ChatTurnFailed(asked["number"], error.code, error.message, error.hint))


def _answer(chat: Chat, number: int, prompt: str, emit: Emit) -> None:
    last, told_at = None, 0.0
    for last in chat.say(prompt):
        if time.monotonic() - told_at >= INTERVAL_S:
            emit(ChatTurn(number, _short(last), is_whole=False))
            told_at = time.monotonic()
    if last is not None:
        emit(ChatTurn(number, _short(last), is_whole=True))


def _short(turn: Turn) -> dict[str, Any]:
    def cut(answer: Answer) -> Answer:
        return answer.replace(text=answer.text[:MAX_TEXT_CHARS])

    return turn.replace(original=turn.original and cut(turn.original), quantized=cut(turn.quantized)).to_dict()
