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


class StackError(BitfoundryError):
    """A part of the local stack cannot start or stop."""

    code = "local_stack_failed"


class ApiError(BitfoundryError):
    """The service answered with a problem, or did not answer (status 0). `code` is the service's stable code.

    `errors` has all faults. `field` and `allowed` belong to the first fault: a JSON pointer into the request (or the
    name of a query parameter), and the list of accepted values.
    """

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
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
        self._detail = str(first.get("detail") or "")

    def __str__(self) -> str:
        text = self.message if self._detail in self.message else f"{self.message} {self._detail}"
        return text if self.field in text else f"{text.removesuffix('.')} (at {self.field})."


class WaitTimeout(BitfoundryError):
    """The job did not end within the timeout; it continues."""

    code = "wait_timeout"
