"""The dashboard: files that `make ui` builds from dashboard/ into api/ui/, served below /ui.

The page is one document for every address below /ui; its script decides what is shown. It may load nothing from
elsewhere and run no script but its own (``POLICY``).
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

FOLDER = Path(__file__).parents[1] / "ui"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}
FOR_EVER = "public, max-age=31536000, immutable"  # names of assets carry the hash of their content
NOT_BUILT = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Bitfoundry</title>
<h1>The dashboard is not built</h1>
<p>The service is running: the API is available at <code>/v1</code>.</p>
<p>To build the dashboard, run <code>make ui</code> in Bitfoundry's folder, then reload this page.</p></html>
"""


def install(app: FastAPI, folder: Path = FOLDER) -> None:
    """Serve the dashboard of ``folder`` below /ui; / redirects there."""
    app.router.routes.append(Route("/", lambda request: RedirectResponse("/ui/"), name="root"))
    app.router.routes.append(Mount("/ui", app=GZipMiddleware(_Pages(folder)), name="dashboard"))


class _Pages:
    def __init__(self, folder: Path) -> None:
        self._index = folder / "index.html"
        self._assets = StaticFiles(directory=folder / "assets", check_dir=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        response = await self._answer(scope)
        response.headers.update(HEADERS)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope) -> Response:
        if scope["method"] not in ("GET", "HEAD"):
            return Response("Only GET and HEAD.", 405, {"Allow": "GET, HEAD"}, "text/plain")
        path = scope["path"].removeprefix(scope.get("root_path", "")).lstrip("/")
        if path.startswith("assets/"):
            return await self._asset(path.removeprefix("assets/"), scope)
        try:
            page = self._index.read_text()
        except FileNotFoundError:
            return HTMLResponse(NOT_BUILT, 503, {"Cache-Control": "no-store"})
        return HTMLResponse(page, headers={"Cache-Control": "no-cache"})

    async def _asset(self, name: str, scope: Scope) -> Response:
        try:
            response = await self._assets.get_response(name, scope)
        except HTTPException as error:
            return Response("There is no such file.", error.status_code, media_type="text/plain")
        response.headers["Cache-Control"] = FOR_EVER
        return response
