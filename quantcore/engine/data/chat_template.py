"""Renders chats with the model's own template, under limits of memory and time.

A template is a program that came with a model. Transformers runs it in Jinja's sandbox, which denies access to files
and attributes but permits gigabytes of output and endless loops; hence a process with limits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from quantcore.data.builtin_text import Render
from quantcore.data.messages import as_templates_take_them, holds_media, without_parts
from quantcore.data.template_process import LimitedProcess, TookTooLong
from quantcore.errors import CalibrationError

MAX_TEMPLATE_CHARS = 64 << 10
MAX_MEMORY_BYTES = 512 << 20
MAX_SECONDS = 5.0


Run = Callable[[list[dict[str, Any]], Mapping[str, Any]], str]


class MediaFound(CalibrationError):
    """A chat contains images or sound, but only text was expected."""


def chat_renderer(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], *, with_media: bool = False
) -> Render:
    """Return a function that renders the messages of a chat with the tokenizer's template, which gets ``arguments``.

    Its second argument are the tools of a row. It raises CalibrationError: ``no_chat_template``; ``no_tools`` for tools
    that the template does not read; ``bad_chat_template`` for one that is too long, fails on these messages, or takes
    more memory or time than MAX_MEMORY_BYTES and MAX_SECONDS. MediaFound is raised for messages with images or sound,
    unless ``with_media``.
    """

    def template(messages: list[dict[str, Any]], given: Mapping[str, Any]) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **given))

    run: Run = template
    if hasattr(os, "fork"):
        run = LimitedProcess(template, max_seconds=MAX_SECONDS, max_memory_bytes=MAX_MEMORY_BYTES)

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        if not with_media and holds_media(messages):
            raise MediaFound(
                "it contains images or sound, but only text can be used here.",
                code="holds_media",
                hint="Use text data.",
                field="/calibration/source",
            )
        if not tokenizer.chat_template:
            raise CalibrationError(
                "this is a chat, but the model's tokenizer has no chat template.",
                code="no_chat_template",
                hint="Use a chat model, or specify a column that contains text.",
                field="/calibration/column",
            )
        if len(str(tokenizer.chat_template)) > MAX_TEMPLATE_CHARS:
            raise _bad(f"it is longer than {MAX_TEMPLATE_CHARS} characters")
        messages = as_templates_take_them(messages)
        _check_tools(tokenizer, messages, tools)
        given = arguments if tools is None else {**arguments, "tools": tools}
        in_parts, whole = messages, without_parts(messages)
        try:
            text = _apply(run, in_parts, given)
        except CalibrationError:
            if whole == in_parts:
                raise
            return _apply(run, whole, given)
        printed = any(repr(message["content"]) in text for message in in_parts if isinstance(message["content"], list))
        return _apply(run, whole, given) if printed else text  # such a template takes no parts

    return render


def _apply(run: Run, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
    try:
        return run(messages, arguments)
    except TookTooLong as error:
        raise _bad(f"TimeoutError: {error}") from error
    except MemoryError as error:
        raise _bad(f"MemoryError: {error}") from error
    except Exception as error:  # an untrusted program: it can raise anything
        raise _bad(str(error)) from error


def _check_tools(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Any) -> None:
    """Raise CalibrationError for tools, or calls of them, that the template would leave out of the text."""
    has_calls = any(message.get("tool_calls") for message in messages)
    given = {"tools": tools is not None, "tool_calls": has_calls}
    if unread := unread_arguments(tokenizer, {name: True for name, is_given in given.items() if is_given}):
        raise CalibrationError(
            f"the model's chat template never reads {' and '.join(unread)}, but this chat uses it.",
            code="no_tools",
            hint="Use a model whose template supports tools, or remove these chats (or the column 'tools').",
            field="/calibration/column",
        )


def unread_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of ``arguments`` that do not occur in the tokenizer's template, which thus never reads them."""
    words = set(re.findall(r"\w+", str(tokenizer.chat_template)))
    return [name for name in arguments if name not in words]


def _bad(why: str) -> CalibrationError:
    return CalibrationError(
        f"the model's chat template cannot render these messages ({why}).",
        code="bad_chat_template",
        hint="Check that each message has a role and content the model supports, or specify a column that contains "
        "text.",
        field="/calibration/column",
    )
