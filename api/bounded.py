"""Bodies that are no JSON have a limit, too: what goes beyond is refused while it comes, before it is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute


def bounded_route(max_bytes: int) -> type[APIRoute]:
    """The class of routes whose bodies have at most ``max_bytes``; 413 for a larger one."""

    class BoundedRequest(Request):
        async def stream(self) -> AsyncGenerator[bytes, None]:
            num_bytes = int(self.headers.get("content-length", 0))
            if num_bytes <= max_bytes:
                num_bytes = 0
                async for chunk in super().stream():
                    num_bytes += len(chunk)
                    if num_bytes > max_bytes:
                        break
                    yield chunk
            if num_bytes > max_bytes:
                raise HTTPException(413, f"The body is larger than {max_bytes} bytes.")

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_bounded(request: Request) -> Response:
                return await handle(BoundedRequest(request.scope, request.receive))

            return handle_bounded

    return BoundedRoute
