"""The page /docs: a list of all operations, made from the OpenAPI document. It runs no script and loads nothing."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

STYLE = """:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto}
dt{margin-top:1rem;font-family:monospace;font-weight:bold}dd{margin:0 0 0 1.5rem}"""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
}
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Bitfoundry API</title><style>{style}</style>
<h1>Bitfoundry API</h1>
<p><a href="openapi.json">openapi.json</a> is the full description: schemas, examples and errors. Client generators,
Postman and Swagger UI read it. Send an API key as <code>Authorization: Bearer bf_...</code>.</p>
"""


router = APIRouter()


@router.get("/docs", include_in_schema=False)
async def show_docs(request: Request) -> HTMLResponse:
    return HTMLResponse(_page(request.app.openapi()), headers=HEADERS)


def _page(document: dict[str, Any]) -> str:
    operations = [
        (operation["tags"][0], f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    sections = (
        f"<h2>{escape(tag)}</h2><dl>{''.join(_entry(name, operation) for _, name, operation in group)}</dl>"
        for tag, group in groupby(sorted(operations, key=lambda row: row[0]), key=lambda row: row[0])
    )
    return HEAD.format(style=STYLE) + "\n".join(sections)


def _entry(name: str, operation: dict[str, Any]) -> str:
    about = f"{escape(operation['description'])} <code>{escape(operation['operationId'])}</code>"
    return f"<dt>{escape(name)}</dt><dd>{about}</dd>"
