"""What can go wrong on the person's side of the service: each error says what to do next."""

from collections.abc import Mapping
from typing import Any


class BitfoundryError(Exception):
    """A failure with a message for a person, a hint for the way out and a stable code for a program."""

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
    """The service answered with a problem, or did not answer (status 0). `code` is the service's stable code."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        detail = str(problem.get("detail") or problem.get("title") or f"HTTP status {status}")
        super().__init__(detail, hint=str(problem.get("hint") or ""))
        self.status = status
        self.code = str(problem.get("code") or "http_error")
        self.request_id = problem.get("request_id")
        self.errors: list[dict[str, Any]] = list(problem.get("errors") or [])


class WaitTimeout(BitfoundryError):
    """The job had not ended in the given time; it goes on."""

    code = "wait_timeout"
