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
from quantcore.data.messages import holds_media
from quantcore.data.template_process import LimitedProcess, TookTooLong
from quantcore.errors import CalibrationError

MAX_TEMPLATE_CHARS = 64 << 10
MAX_MEMORY_BYTES = 512 << 20
MAX_SECONDS = 5.0


class MediaFound(CalibrationError):
    """A chat holds images or sound, where text was expected."""


def chat_renderer(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], *, with_media: bool = False
) -> Render:
    """Return a function that renders the messages of a chat with the tokenizer's template, which gets ``arguments``.

    It raises CalibrationError: ``no_chat_template``, ``bad_chat_template`` for one that is too long, fails on these
    messages, or takes more memory or time than MAX_MEMORY_BYTES and MAX_SECONDS. MediaFound is raised for messages with
    images or sound, unless ``with_media``.
    """

    def apply(messages: list[dict[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))

    run: Callable[[list[dict[str, Any]]], str] = apply
    if hasattr(os, "fork"):
        run = LimitedProcess(apply, max_seconds=MAX_SECONDS, max_memory_bytes=MAX_MEMORY_BYTES)

    def render(messages: list[dict[str, Any]]) -> str:
        if not with_media and holds_media(messages):
            raise MediaFound(
                "it holds images or sound, and only text can be read here.",
                code="holds_media",
                hint="Give data of text.",
                field="/calibration/source",
            )
        if not tokenizer.chat_template:
            raise CalibrationError(
                "this is a chat, and the model's tokenizer has no chat template.",
                code="no_chat_template",
                hint="Take a model for chats, or name a column that holds text.",
                field="/calibration/column",
            )
        if len(str(tokenizer.chat_template)) > MAX_TEMPLATE_CHARS:
            raise _bad(f"it is longer than {MAX_TEMPLATE_CHARS} characters")
        try:
            return run(messages)
        except TookTooLong as error:
            raise _bad(f"TimeoutError: {error}") from error
        except MemoryError as error:
            raise _bad(f"MemoryError: {error}") from error
        except Exception as error:  # an untrusted program: it can raise anything
            raise _bad(str(error)) from error

    return render


def unread_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of ``arguments`` that do not occur in the tokenizer's template, which thus never reads them."""
    words = set(re.findall(r"\w+", str(tokenizer.chat_template)))
    return [name for name in arguments if name not in words]


def _bad(why: str) -> CalibrationError:
    return CalibrationError(
        f"the model's chat template cannot render these messages ({why}).",
        code="bad_chat_template",
        hint="Check that each message has a role and a content that the model knows, or name a column that holds text.",
        field="/calibration/column",
    )
