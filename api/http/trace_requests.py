"""Adds requests to traces (see ``tracing``)."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import tracing

_SECRET = re.compile(r"(?<=/v1/shared/)[^/]+")  # whoever has it can open the link


class TraceRequests:
    """Opens a span for every request, below that of the client if it sends a ``traceparent``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not tracing.is_on():
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {"http.request.method": scope["method"], "url.path": _SECRET.sub("{token}", scope["path"])}
        with tracing.span(scope["method"], parent=headers.get(b"traceparent"), kind="server", **attributes) as span:

            async def send_traced(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    span.set_attribute("bitfoundry.request_id", scope["request_id"])
                    span.update_name(f"{scope['method']} {_template(scope)}")
                await send(message)

            await self._app(scope, receive, send_traced)


def _template(scope: Scope) -> str:
    """Return the path with the names of its parameters: few names, however many jobs there are."""
    path = str(scope["path"])
    for name, value in scope.get("path_params", {}).items():
        path = path.replace(str(value), f"{{{name}}}")
    return path if "route" in scope else "no route"
