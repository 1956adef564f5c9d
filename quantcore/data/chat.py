"""Renders chats with the model's own template, under limits of memory and time.

A template is a program that came with a model. Transformers runs it in Jinja's sandbox, which denies access to files
and attributes but permits gigabytes of output and endless loops; hence the limits. Called only in the engine's process
or another child.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import PreTrainedTokenizerBase

from quantcore.data.builtin_text import Render
from quantcore.data.messages import holds_media
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
            with _bounded():
                text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        except Exception as error:  # an untrusted program: it can raise anything
            raise _bad(f"{type(error).__name__}: {str(error)[:200]}") from error
        return str(text)

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


@contextmanager
def _bounded() -> Iterator[None]:
    """Limit memory and time inside, if this is the main thread of a POSIX system with /proc."""
    statm = Path("/proc/self/statm")
    if threading.current_thread() is not threading.main_thread() or not statm.exists():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    most = int(statm.read_text("ascii").split()[0]) * resource.getpagesize() + MAX_MEMORY_BYTES
    if before[0] == resource.RLIM_INFINITY or before[0] > most:
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    handler = signal.signal(signal.SIGALRM, _time_is_up)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _time_is_up(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"it took more than {MAX_SECONDS:g} s")
