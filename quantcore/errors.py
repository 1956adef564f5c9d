"""The tree of the engine's errors.

    QuantError                 any error for a user: what was given, what is allowed, what to do
    ├── ConfigError            the config (or a flag) asks for something impossible or unknown
    ├── ModelError             the model folder is broken, unsafe or of an unsupported kind
    ├── CalibrationError       the calibration text is missing, too short or unreadable
    ├── NumericsError          a weight or a result is not finite
    ├── ProofError             the written artifact is not what was computed
    ├── GateError              the artifact is what was computed, but not good enough
    ├── PublishError           the artifact did not reach its destination
    └── RankError              a process that shares the job is gone

Every error has a stable ``code`` that programs can match, and knows whether a retry can help.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

MAX_SHOWN = 300
"""Maximum number of characters of a message of other code that are shown to a user."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""The numbers of an OSError of a disk that is full, or of a quota that is used up."""


class QuantError(Exception):
    """An error for users: a message, a stable code, a hint and, if one is at fault, the field.

    ``field`` is a JSON pointer into the given config (``/global_quant_config/weight/group_size``); ``allowed`` lists
    the values that would have been accepted; ``retryable`` says whether the same request may succeed later; ``block``
    is the decoder block in progress, if any.
    """

    block: int | None = None

    def __init__(
        self,
        message: str,
        *,
        code: str,
        hint: str = "",
        field: str = "",
        allowed: Iterable[object] = (),
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint
        self.field = field
        self.allowed = (allowed,) if isinstance(allowed, str) else tuple(str(value) for value in allowed)
        self.retryable = retryable

    def to_dict(self) -> dict[str, Any]:
        """Return everything that a client needs, as JSON data."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "field": self.field,
            "allowed": list(self.allowed),
            "retryable": self.retryable,
        }

    def __str__(self) -> str:
        return f"{with_field(self.message, self.field)} {self.hint}".strip()


class ConfigError(QuantError):
    """The config (or a flag) asks for something impossible or unknown."""


class ModelError(QuantError):
    """The model folder is broken, unsafe or of a kind that is not supported."""


class CalibrationError(QuantError):
    """The calibration text is missing, too short or unreadable."""


class NumericsError(QuantError):
    """A weight, a scale or a result is not finite."""


class ProofError(QuantError):
    """The written artifact differs from what was computed; it must not be delivered."""


class GateError(QuantError):
    """The artifact equals what was computed, but misses a limit; it is kept separately."""


class PublishError(QuantError):
    """The artifact did not reach its destination. The local one is intact."""


class RankError(QuantError):
    """A process that shares the job is gone."""


MAX_NEAREST = 5
MIN_LIKENESS = 0.6
"""Of a name that is suggested: the cutoff of difflib."""
MIN_PART = 3
"""Characters of a name that counts as a part of another one."""


def with_field(message: str, field: str) -> str:
    """Add the field at fault to ``message``, unless it names the field: ``Unknown preset 'x' (at /config).``"""
    if not field or re.search(rf"{re.escape(field)}(?![/.]?\w)", message):
        return message
    return f"{message.removesuffix('.')} (at {field})."


@contextmanager
def at_block(index: int | None) -> Iterator[None]:
    """Set the decoder block of errors inside to ``index``."""
    try:
        yield
    except QuantError as error:
        error.block = index
        raise


def reason_of(error: BaseException) -> str:
    """Return an error of other code in one line: its message, with the class if it is one word (``KeyError: 'x'``)."""
    text = " ".join(str(error).split())
    shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    if " " in text:
        return shown
    return f"{type(error).__name__}: {shown}" if text else type(error).__name__


def is_failure(error: BaseException) -> bool:
    """Return whether other code failed and was not stopped: an Exception, or a panic of a library in Rust."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def unknown_value(
    what: str, given: object, allowed: Iterable[object], *, code: str, field: str = "", listed_by: str = ""
) -> ConfigError:
    """Return the error for a name that is not in a list; it suggests the nearest names.

    A short list is shown as a whole. Of a long one ``listed_by`` names the command that shows it.
    """
    names = [str(value) for value in allowed]
    first, *others = nearest_names(given, names) or [""]
    hint = f"Did you mean '{first}'? " if first else ""
    if not listed_by:
        hint += f"Available: {', '.join(names)}."
    else:
        hint += f"Similar: {', '.join(others)}. " if others else ""
        hint += f"{listed_by} lists all."
    return ConfigError(f"Unknown {what} '{given}'.", code=code, hint=hint, field=field, allowed=names)


def nearest_names(given: object, names: Iterable[str], at_most: int = MAX_NEAREST) -> list[str]:
    """Return the names that ``given`` probably means, the most probable first; [] if none is like it.

    Case and punctuation do not count, and parts of a name do: ``q4_k_m`` is like ``gguf_q4_k``, ``4090`` like
    ``rtx4090``.
    """
    wanted = _words(given)
    likeness = {name: _likeness(wanted, _words(name)) for name in names}
    near = sorted((name for name in likeness if likeness[name] >= MIN_LIKENESS), key=lambda name: -likeness[name])
    return near[:at_most]


def _words(text: object) -> list[str]:
    return re.findall(r"[a-z0-9]+", str(text).lower())


def _likeness(one: list[str], other: list[str]) -> float:
    """Return 1 for the same letters, less the more they differ, and less for words in common or a part of the other."""
    texts = "".join(one), "".join(other)
    letters = difflib.SequenceMatcher(None, *texts).ratio()
    if min(map(len, texts)) >= MIN_PART and (texts[0] in texts[1] or texts[1] in texts[0]):
        letters = max(letters, MIN_LIKENESS + (1 - MIN_LIKENESS) * letters)
    return max(letters, 2 * len({*one} & {*other}) / max(1, len(one) + len(other)))
