"""Answers every error as RFC 9457 ``application/problem+json`` with a stable ``code`` and a remedy.

It never contains a traceback, the rejected value of a field (it may be a secret), or the text of a database error.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException

from api.disk import DISK_FULL, DISK_READ_ONLY
from api.store.accounts.projects import QUOTAS, QuotaExceeded
from api.store.engine import reason_of
from api.store.states import FINAL, State, WrongState
from quantcore.config.values import allowed_words, fields_at, sentence_of
from quantcore.errors import ProofError, QuantError, nearest_names

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5
QUOTA_RETRY_AFTER_S = 60
ROOM_RETRY_AFTER_S = 60
CODES = {401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"} | {
    415: "unsupported_media_type"
}


class ProblemOut(BaseModel):
    """The body of an error response (RFC 9457). Match on ``code``: it never changes; the texts may."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    request_id: str
    hint: str | None = None
    errors: list[dict[str, Any]] | None = None


# For OpenAPI: the error response that every route may give.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "A problem",
        "content": {"application/problem+json": {"schema": ProblemOut.model_json_schema()}},
    }
}


# status -> (when, an example's code and detail)
WHEN = {
    400: ("The request cannot be read", "invalid_json", "The body is not valid JSON: Expecting value."),
    401: ("The request has no valid API key", "unauthorized", "This needs a valid API key."),
    403: ("The key lacks a scope", "insufficient_scope", "This key lacks the scope 'jobs:write'."),
    404: ("Not found", "job_not_found", "There is no such job."),
    409: (
        "Not allowed in this state; `errors[0].allowed` lists the allowed states",
        "wrong_state",
        "Cannot resume a running job. It must be paused.",
    ),
    410: (
        "The resource created with this Idempotency-Key was deleted",
        "job_deleted",
        "The job created with this Idempotency-Key was deleted.",
    ),
    412: (
        "The job has changed since the ETag in If-Match",
        "job_changed",
        "The job has changed since you read it.",
    ),
    413: ("The body is too large", "body_too_large", "The body is too large."),
    422: (
        "The request is readable but invalid; `errors` has every fault and its place",
        "unknown_preset",
        "Unknown preset 'fp9'.",
    ),
    428: (
        "If-Match is missing",
        "if_match_required",
        "A change needs the job's ETag in If-Match.",
    ),
    429: (
        "Too many requests (`rate_limited`), or a quota of the project is used up (`quota_exceeded`)",
        "rate_limited",
        "The project has sent more than 60000 requests within a minute.",
    ),
    507: (
        "The disk has only the space reserved for the database left (`disk_full`), or is read-only (`disk_read_only`)",
        "disk_full",
        "The service's disk is full.",
    ),
}


def may(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return for OpenAPI the problems of a route besides those that all routes have, each with an example."""
    return {status: _documented(status) for status in statuses}


def _documented(status: int) -> dict[str, Any]:
    when, code, detail = WHEN[status]
    example = ProblemOut(
        type=f"urn:bitfoundry:error:{code}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance="/v1/jobs",
        code=code,
        request_id="req_0123456789abcdef",
    )
    body = {"schema": ProblemOut.model_json_schema(), "example": example.model_dump(exclude_none=True)}
    return {"description": when, "content": {"application/problem+json": body}}


class Problem(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        hint: str = "",
        errors: Sequence[Mapping[str, Any]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.hint = hint
        self.errors = errors
        self.headers = dict(headers or {})


def install(app: FastAPI) -> None:
    """Register a handler for every exception that can be raised."""

    @app.exception_handler(Problem)
    def problem(request: Request, error: Problem) -> JSONResponse:
        return _answer(request, error)

    @app.exception_handler(QuantError)
    def quant_error(request: Request, error: QuantError) -> JSONResponse:
        return _answer(request, _from_quant_error(error))

    @app.exception_handler(WrongState)
    def wrong_state(request: Request, error: WrongState) -> JSONResponse:
        return _answer(request, _from_wrong_state(error))

    @app.exception_handler(QuotaExceeded)
    def quota_exceeded(request: Request, error: QuotaExceeded) -> JSONResponse:
        return _answer(request, _from_quota(error))

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _answer(request, _from_validation(error, _body_of(request)))

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = CODES.get(error.status_code, "bad_request" if error.status_code < 500 else "internal_error")
        return _answer(request, Problem(error.status_code, code, str(error.detail), headers=error.headers))

    @app.exception_handler(PoolTimeoutError)
    @app.exception_handler(InterfaceError)
    @app.exception_handler(OperationalError)
    def database_away(request: Request, error: Exception) -> JSONResponse:
        logger.warning("the database is unavailable (%s)", reason_of(error))
        return _answer(request, _unavailable("database_unavailable", "The database cannot be reached."))

    @app.exception_handler(OSError)
    def disk_fault(request: Request, error: OSError) -> JSONResponse:
        if error.errno not in _DISK_FAULTS:
            raise error
        logger.error("the disk: %s", error.strerror)
        return _answer(request, no_room(_DISK_FAULTS[error.errno]))

    @app.exception_handler(Exception)
    def bug(request: Request, error: Exception) -> JSONResponse:
        return _answer(request, Problem(500, "internal_error", "An internal error occurred.", hint=_REPORT))


_DISK_FAULTS = {errno.ENOSPC: DISK_FULL, errno.EDQUOT: DISK_FULL, errno.EROFS: DISK_READ_ONLY}
_NO_ROOM = {
    DISK_FULL: "The service's disk is full.",
    DISK_READ_ONLY: "The service's disk is read-only.",
}


def no_room(code: str) -> Problem:
    """Return Problem 507: nothing can be stored now."""
    hint = "Nothing was stored. Delete jobs that are no longer needed, or tell the operator; then try again."
    return Problem(507, code, _NO_ROOM[code], hint=hint, headers={"Retry-After": str(ROOM_RETRY_AFTER_S)})


_REPORT = "Tell the operator the request_id: details are in the server's log."


def _answer(request: Request, problem: Problem) -> JSONResponse:
    body = ProblemOut(
        type=f"urn:bitfoundry:error:{problem.code}",
        title=HTTPStatus(problem.status).phrase,
        status=problem.status,
        detail=problem.detail,
        instance=request.url.path,
        code=problem.code,
        request_id=request.scope["request_id"],
        hint=problem.hint or None,
        errors=[dict(entry) for entry in problem.errors] or None,
    )
    content = body.model_dump(mode="json", exclude_none=True)
    return JSONResponse(content, problem.status, problem.headers, media_type="application/problem+json")


def _from_wrong_state(error: WrongState) -> Problem:
    """Return Problem 409 with the job's state, the states that the action needs, and the actions allowed now."""
    final = error.state in FINAL and error.action in ("cancel", "pause")
    code = "job_already_final" if final else "wrong_state"
    allowed = [str(state) for state in error.allowed_states]
    can_cancel = error.action == "delete" and error.state != State.CANCELLING
    remedy = "Cancel it first." if can_cancel else f"It must be {' or '.join(allowed)}."
    detail = f"Cannot {error.action} a {error.state} job. {remedy}"
    entry = {"parameter": "state", "detail": f"the job is {error.state}", "code": code, "allowed": allowed}
    hint = f"Allowed for a {error.state} job: {', '.join(error.allowed_actions)}."
    return Problem(409, code, detail, hint=hint, errors=[entry])


def _from_quota(error: QuotaExceeded) -> Problem:
    """Return Problem 429 that names the exhausted quota. Some time has to pass, or somebody has to make room."""
    usage = f"{error.used} used, {error.limit} allowed"  # more than allowed where jobs went back, or the limit fell
    entry = {"parameter": error.quota, "detail": usage, "code": "quota_exceeded"}
    needed = f". This needs {error.more} more" if error.more > 1 else ""
    return Problem(
        429,
        "quota_exceeded",
        f"The project has no room in its quota {error.quota}: {usage}{needed}.",
        hint=f"{QUOTAS[error.quota].room} `bitfoundry usage` shows all quotas.",
        errors=[entry | {"allowed": [error.limit]}],
        headers={"Retry-After": str(QUOTA_RETRY_AFTER_S)},
    )


def _from_quant_error(error: QuantError) -> Problem:
    """Return the problem for an engine's error: the client's fault (422), ours (500), or temporary (503)."""
    if error.retryable:
        return _unavailable(error.code, error.message, hint=error.hint)
    entry = {"pointer": f"#{error.field}", "detail": error.message, "code": error.code, "allowed": list(error.allowed)}
    status = 500 if isinstance(error, ProofError) else 422
    return Problem(status, error.code, error.message, hint=error.hint, errors=[entry] if error.field else [])


def _body_of(request: Request) -> Any:
    """Return the type of the body of this route, None if it has none."""
    body = getattr(request.scope.get("route"), "body_field", None)
    kind = body and body.field_info.annotation
    return getattr(kind, "CHANGED", kind)


def _from_validation(error: RequestValidationError, body: Any) -> Problem:
    """Return FastAPI's list of errors without the rejected input, and with JSON pointers (RFC 6901).

    ``body`` is the type of the body: one of its fields may be meant by an unknown one at the same place.
    """
    faults = error.errors()
    if faults[0]["type"] == "json_invalid":
        return Problem(400, "invalid_json", f"The body is not valid JSON: {faults[0]['ctx']['error']}.")
    entries = [entry_of(item, body) for item in faults]
    codes = {entry["code"] for entry in entries}
    code = codes.pop() if len(codes) == 1 else "invalid_request"
    first = entries[0]
    whole = "The query" if "parameter" in first else "The body"
    place = first.get("parameter") or first.get("pointer", "").removeprefix("#") or whole
    more = f" There are {len(entries)} faults in all." if len(entries) > 1 else ""
    detail = f"{place} is not valid: {first['detail']}.{more}"
    return Problem(422, code, detail, hint=first.get("hint", ""), errors=entries)


# Our codes for pydantic's types of errors; the type of a PydanticCustomError is the code itself.
_VALIDATION_CODES = {"extra_forbidden": "unknown_field", "missing": "missing_field"}
_OWN_CODES = frozenset({"invalid_model_id", "invalid_model", "invalid_text", "invalid_labels", "invalid_pointer"}) | {
    "invalid_publish",
    "invalid_repo_id",
}


def entry_of(item: Mapping[str, Any], body: Any = None) -> dict[str, Any]:
    """Return a pydantic error as an entry of ``errors``; its ``loc`` starts with the place (``body``, ``query``).

    For an unknown field of ``body``, the type of the body, its ``hint`` is the nearest field at that place, if any.
    Of rejected values only a part of the path is shown: ``instance`` has it as well.
    """
    where, *path = item["loc"]
    code = item["type"] if item["type"] in _OWN_CODES else _VALIDATION_CODES.get(item["type"], "invalid_request")
    place = {"pointer": "#" + "".join(f"/{_escape(part)}" for part in path)}
    if where != "body":
        place = {"parameter": ".".join(map(str, path))}
    allowed = allowed_words(item)
    shown = item if where == "path" else {name: value for name, value in item.items() if name != "input"}
    near = nearest_names(path[-1], fields_at(body, path[:-1]), 1) if code == "unknown_field" and where == "body" else []
    hint = {"hint": f"Did you mean '{near[0]}'?"} if near else {}
    return place | {"detail": sentence_of(shown), "code": code} | ({"allowed": allowed} if allowed else {}) | hint


def _escape(part: object) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")


def _unavailable(code: str, detail: str, *, hint: str = "Try again in a moment.") -> Problem:
    return Problem(503, code, detail, hint=hint, headers={"Retry-After": str(RETRY_AFTER_S)})
