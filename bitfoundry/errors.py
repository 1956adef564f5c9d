"""Errors of the client, the commands and the local stack. Each says what to do next."""

from collections.abc import Mapping
from typing import Any


class BitfoundryError(Exception):
    """A failure with a message and a hint for people and a stable code for programs."""

    code = "bitfoundry_error"

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.code

    @classmethod
    def of(cls, error: Any) -> "BitfoundryError":
        """Return an error of the engine (a ``quantcore.errors.QuantError``) as one of ours."""
        return cls(error.message, hint=error.hint, code=error.code)


class StackError(BitfoundryError):
    """A part of the local stack cannot start or stop."""

    code = "local_stack_failed"


class ApiError(BitfoundryError):
    """The service answered with a problem, or did not answer (status 0). `code` is the service's stable code.

    `errors` has all faults. `field`, `allowed` and `given` belong to the first fault: a JSON pointer into the request
    (or the name of a query parameter), the list of accepted values, and the value in what was `sent`, as text ('' if it
    has none, or if it is a secret).
    """

    def __init__(self, status: int, problem: Mapping[str, Any], sent: Mapping[str, Any] | None = None) -> None:
        detail = str(problem.get("detail") or problem.get("title") or f"HTTP status {status}")
        super().__init__(detail, hint=str(problem.get("hint") or ""))
        self.status = status
        self.code = str(problem.get("code") or "http_error")
        self.request_id = problem.get("request_id")
        self.errors: list[dict[str, Any]] = list(problem.get("errors") or [])
        first = self.errors[0] if self.errors else {}
        self.field = str(first.get("pointer") or first.get("parameter") or "").removeprefix("#")
        allowed = first.get("allowed") or []
        self.allowed: list[Any] = allowed if isinstance(allowed, list) else [allowed]
        self.sent = sent or {}
        self.given = self.given_at(first)
        self._detail = str(first.get("detail") or "")
        self._is_sweep = "values" in first

    def given_at(self, entry: Mapping[str, Any]) -> str:
        """Return the value that was sent where an entry of `errors` points, as text; '' if there is none to show."""
        field = str(entry.get("pointer") or entry.get("parameter") or "").removeprefix("#")
        for axis, value in (entry.get("values") or {}).items():  # of a sweep, whose jobs have them at these places
            place = f"/job{axis}"
            if field == place or field.startswith(f"{place}/"):
                name = axis.rpartition("/")[2]
                return _value_at(f"/{name}{field.removeprefix(place)}", {_unescaped(name): value})
        return _value_at(field, self.sent)

    def __str__(self) -> str:
        text = self.message if self._detail in self.message else f"{self.message} {self._detail}"
        text = text if self.field in text else f"{text.removesuffix('.')} (at {self.field})."
        told = self._detail if self._is_sweep else text  # the text has numbers of jobs
        given = f"{self.given} was given." if self.given and self.given not in told else ""
        return " ".join(part for part in (text, given, self.hint) if part)


class WaitTimeout(BitfoundryError):
    """The job did not end within the timeout; it continues."""

    code = "wait_timeout"


_SECRET = ("token", "secret", "password", "key")
_MAX_SHOWN = 80  # characters of a value in a message


def _value_at(field: str, sent: Any) -> str:
    """Return the value at a JSON pointer, or of a query parameter, as text; '' if there is none to show."""
    parts = [_unescaped(part) for part in field.removeprefix("/").split("/")]
    if any(word in parts[-1] for word in _SECRET):
        return ""
    for part in parts:
        place: Any = int(part) if isinstance(sent, list | tuple) and part.isdecimal() else part
        try:
            sent = sent[place]
        except (LookupError, TypeError):
            return ""
    return repr(sent) if isinstance(sent, str | int | float) and len(repr(sent)) <= _MAX_SHOWN else ""


def _unescaped(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")
