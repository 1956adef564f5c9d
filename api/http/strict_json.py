"""Parses request bodies as strict JSON: no NaN, no duplicate names, no deep nesting, no NUL.

A body that passes is safe to store in Postgres and to print in a response.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import HTTPException, Request, Response

from api.http.bounded import BoundedRequest, BoundedRoute

MAX_BODY_BYTES = 1 << 20
MAX_DEPTH = 32


class _StrictRequest(BoundedRequest):
    async def json(self) -> Any:
        return parse(await self.body())


class StrictJsonRoute(BoundedRoute):
    """A route that reads its body with ``parse``; 413 for a body that is too large, 415 for one of another type."""

    max_bytes = MAX_BODY_BYTES
    request_class = _StrictRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
            if has_body and media_type != "application/json" and not media_type.endswith("+json"):
                raise HTTPException(415, "Send the body as application/json.")
            return await handle(request)

        return handle_strictly


def parse(body: bytes) -> Any:
    """Parse plain, unambiguous JSON. Raises json.JSONDecodeError for anything else."""
    try:
        value = json.loads(body, object_pairs_hook=_unique_names, parse_constant=_refuse)
    except (RecursionError, UnicodeDecodeError) as error:
        raise json.JSONDecodeError("nested too deeply, or not UTF-8", "", 0) from error
    _check(value, depth=1)
    return value


def _check(value: Any, *, depth: int) -> None:
    if depth > MAX_DEPTH:
        _refuse(f"more than {MAX_DEPTH} levels")
    if isinstance(value, str):
        if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
            _refuse("a NUL character or half a surrogate pair")
    elif isinstance(value, dict):
        for name, member in value.items():
            _check(name, depth=depth)
            _check(member, depth=depth + 1)
    elif isinstance(value, list):
        for member in value:
            _check(member, depth=depth + 1)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = {name for name, _ in pairs}
    if len(names) != len(pairs):
        _refuse("a duplicate name")
    return dict(pairs)


def _refuse(what: str) -> NoReturn:
    raise json.JSONDecodeError(f"{what} is not allowed", "", 0)
