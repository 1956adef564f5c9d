"""The routes that a link opens: the report of one job as a page and as JSON. They want no key.

There is one 404 for every link that opens nothing, whether it is unknown, over, revoked, or its job was deleted. A
browser shows it as a page.
"""

from __future__ import annotations

import re
from html import escape

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from api.http import docs, security
from api.http.deps import Context, ContextDep
from api.http.errors import Problem, may
from api.shares import public_report
from api.store.accounts import shares
from api.store.engine import reading
from quantcore.report import html
from quantcore.report.values import Report

REQUESTS_PER_MINUTE = 60
"""Number of requests with one link, from everybody together."""
HEADERS = docs.HEADERS | {"Cache-Control": "no-store", "X-Robots-Tag": "noindex"}

router = APIRouter(prefix="/shared/{token}", tags=["shares"], responses=may(404, 429))

_TOKEN = re.compile(r"[0-9A-Za-z_-]{43}")


@router.get("", response_class=HTMLResponse)
def show_shared_report(token: str, request: Request, context: ContextDep) -> HTMLResponse:
    """Show the report of a shared job as a page that runs no script and loads nothing.

    An error is a page too for a client that accepts ``text/html``, as browsers do, and JSON for all others.
    """
    try:
        return HTMLResponse(html.page(*_open(token, request, context)))
    except Problem as problem:
        if "text/html" not in request.headers.get("accept", ""):
            raise
        return HTMLResponse(_error_page(problem), problem.status, problem.headers)


@router.get("/report.json")
def get_shared_report(token: str, request: Request, context: ContextDep) -> Report:
    """Return the report of a shared job. Files and folders have their names in it, not their paths."""
    report, _ = _open(token, request, context)
    return report


def _open(token: str, request: Request, context: Context) -> tuple[Report, str]:
    """Return (the report that the token opens, which run it is of). Raises Problem 404 and, if asked too often, 429."""
    request.scope["answer_headers"].update(HEADERS)  # of every response, errors included
    if not _TOKEN.fullmatch(token):
        raise _nothing_shared()
    with reading(context.sessions) as session:
        found = shares.find_open(session, security.hash_secret(token))
    if found is None:
        raise _nothing_shared()
    share, artifact, name = found
    security.count_request(request, context, f"share:{share.id}", REQUESTS_PER_MINUTE, "This link has had")
    report = public_report.read(artifact)
    if report is None:
        raise _nothing_shared()
    run = f"Run {name}" if name else "A run"
    return (
        report,
        f"{run}, finished on {artifact.created_at:%Y-%m-%d}. This link expires on {share.expires_at:%Y-%m-%d}.",
    )


def _nothing_shared() -> Problem:
    hint = "It may have expired or been revoked, or its run was deleted. Ask the sender for a new link."
    return Problem(404, "share_not_found", "This link does not open a report.", hint=hint)


def _error_page(problem: Problem) -> str:
    title, hint = escape(problem.detail), escape(problem.hint)
    return html.document(title, f"<h1>{title}</h1><p>{hint}</p>")
