"""Answers with an ETag: a client that has them already gets a 304, and a page of a list says where the next one is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Request, Response
from pydantic import BaseModel

IfNoneMatch = Annotated[str | None, Header(description="An ETag: 304 without a body while nothing has changed.")]
UNCHANGED: dict[int | str, dict[str, Any]] = {304: {"description": "Nothing has changed since `If-None-Match`"}}
Page = TypeVar("Page", bound=BaseModel)


@dataclass(frozen=True)
class Pages:
    """The request for a page of a list."""

    request: Request
    response: Response
    if_none_match: str | None

    def answer(self, page: Page, next_cursor: str | None) -> Page | Response:
        """Return the page with its ETag and the Link to the next one; a 304 if the client has it already."""
        etag = etag_of(page)
        if matches(self.if_none_match, etag):
            return Response(status_code=304, headers={"ETag": etag})
        self.response.headers["ETag"] = etag
        if next_cursor:
            following = self.request.url.include_query_params(cursor=next_cursor)
            self.response.headers["Link"] = f'<{following.path}?{following.query}>; rel="next"'
        return page


async def get_pages(request: Request, response: Response, if_none_match: IfNoneMatch = None) -> Pages:
    return Pages(request, response, if_none_match)


PagesDep = Annotated[Pages, Depends(get_pages)]


def etag_of(body: BaseModel) -> str:
    """Return the ETag of a response that has no version of its own."""
    return f'"{hashlib.sha256(body.model_dump_json().encode()).hexdigest()[:32]}"'


def matches(header: str | None, etag: str) -> bool:
    """Return True if an If-None-Match has this ETag, or any."""
    return bool({etag, "*"} & tags_of(header))


def tags_of(header: str | None) -> set[str]:
    """Return the ETags in an If-Match or If-None-Match."""
    return {tag.strip().removeprefix("W/") for tag in (header or "").split(",")}
