"""Routes that take a bounded body: the key is checked before the body is read.

A body beyond the limit is refused while it arrives, before it is stored. ``api.http.connection_limits`` bounds the time
that it may take, and its number of chunks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, ClassVar

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from api.http import security


class BoundedRequest(Request):
    """A request whose body has at most ``max_bytes``; 413 for a larger one."""

    max_bytes: int

    async def stream(self) -> AsyncGenerator[bytes, None]:
        num_bytes = int(self.headers.get("content-length", 0))
        if num_bytes <= self.max_bytes:
            num_bytes = 0
            async for chunk in super().stream():
                num_bytes += len(chunk)
                if num_bytes > self.max_bytes:
                    break
                yield chunk
        if num_bytes > self.max_bytes:
            raise HTTPException(413, f"The body is larger than {self.max_bytes} bytes.")


class BoundedRoute(APIRoute):
    """A route that checks the key before it reads the body, unless the key is in the body (``needs_key`` is False)."""

    max_bytes: ClassVar[int]
    needs_key: ClassVar[bool] = True
    request_class: ClassVar[type[BoundedRequest]] = BoundedRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_bounded(request: Request) -> Response:
            if self.needs_key:
                await security.authenticate(request, request.app.state.context)
            bounded = self.request_class(request.scope, request.receive)
            bounded.max_bytes = self.max_bytes
            return await handle(bounded)

        return handle_bounded


def bounded_route(most: int) -> type[BoundedRoute]:
    """Return the class of routes whose bodies have at most ``most`` bytes."""

    class Route(BoundedRoute):
        max_bytes = most

    return Route
