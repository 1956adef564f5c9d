"""The request and response bodies of chats."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.schemas import RequestBody
from api.store.tables.chats import Chat, ChatState, ChatTurn, EndReason, TurnState
from quantcore.report.answers import MAX_NEW_TOKENS, Answer

MAX_PROMPT_CHARS = 8000


class ChatCreate(RequestBody):
    """The request body for a chat. ``max_new_tokens``: tokens after which an answer is cut off."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"max_new_tokens": 200}]})

    max_new_tokens: Annotated[int, Field(strict=True, ge=1)] = MAX_NEW_TOKENS


class ChatPrompt(RequestBody):
    """The request body for a turn."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "What is the capital of France?"}]})

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS, pattern=r"\S")]


class ChatError(BaseModel):
    """The reason why a chat or a turn failed."""

    code: str
    message: str
    hint: str = ""


class TurnOut(BaseModel):
    """A prompt and both answers, whole if ``state`` is answered, else so far.

    ``first_difference`` is the index of the first token that differs, null while all are equal; the text of that token
    begins at ``first_different_char`` of the quantized model's answer. ``seq`` is the number of the last change.
    """

    seq: int
    number: int
    prompt: str
    state: TurnState
    original: Answer | None = None
    quantized: Answer | None = None
    first_difference: int | None = None
    first_different_char: int | None = None
    error: ChatError | None = None

    @classmethod
    def of(cls, turn: ChatTurn) -> TurnOut:
        answer: dict[str, Any] = {name: value for name, value in (turn.answer or {}).items() if name != "prompt"}
        error = None if turn.error is None else ChatError(**turn.error)
        return cls(
            seq=turn.seq,
            number=turn.number,
            prompt=turn.prompt,
            state=TurnState(turn.state),
            error=error,
            **answer,
        )


class ChatOut(BaseModel):
    """A chat. ``state`` is waiting (for a worker), starting (the models are loaded), open or ended.

    An ended chat has a ``reason``, and if it failed an ``error``; it can be read for a day. Without a chat template
    (``has_template``) the models continue each prompt by itself. ``turns`` are missing in the events of a stream.
    """

    id: str
    job_id: str
    seq: int
    state: ChatState
    reason: EndReason | None
    error: ChatError | None
    has_template: bool | None
    max_new_tokens: int
    max_turns: int
    created_at: datetime
    ended_at: datetime | None
    turns: list[TurnOut] | None = None

    @classmethod
    def of(cls, chat: Chat, max_turns: int, turns: Sequence[ChatTurn] | None = None) -> ChatOut:
        names = (
            "id",
            "job_id",
            "seq",
            "state",
            "reason",
            "error",
            "has_template",
            "max_new_tokens",
            "created_at",
            "ended_at",
        )
        shown = None if turns is None else [TurnOut.of(turn) for turn in turns]
        return cls(**{name: getattr(chat, name) for name in names}, max_turns=max_turns, turns=shown)
