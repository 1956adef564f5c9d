"""The request and response bodies of shares."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.schemas import RequestBody
from api.store.tables.shares import Share

MIN_EXPIRES_IN_S = 60
DEFAULT_EXPIRES_IN_S = 7 * 24 * 3600
MAX_EXPIRES_IN_S = 90 * 24 * 3600

SHARE: dict[str, Any] = {
    "id": "shr_01a200dc5edf7cfaa251b183f95c582d",
    "created_at": "2026-11-22T08:00:00Z",
    "expires_at": "2026-11-29T08:00:00Z",
    "created_by": "nightly pipeline",
}


class ShareCreate(RequestBody):
    """The request body for a link: how long it opens the report, by default a week and at most 90 days."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"expires_in_s": 604800}]})

    expires_in_s: Annotated[int, Field(strict=True, ge=MIN_EXPIRES_IN_S, le=MAX_EXPIRES_IN_S)] = DEFAULT_EXPIRES_IN_S


class ShareOut(BaseModel):
    """A link to a job's report, without its token. ``created_by`` is the name of the key that made it."""

    model_config = ConfigDict(json_schema_extra={"examples": [SHARE]})

    id: str
    created_at: datetime
    expires_at: datetime
    created_by: str | None

    @classmethod
    def of(cls, share: Share, key_names: dict[str, str]) -> ShareOut:
        return cls(
            id=share.id,
            created_at=share.created_at,
            expires_at=share.expires_at,
            created_by=key_names.get(share.key_id or ""),
        )


class NewShareOut(ShareOut):
    """A link with its ``url``, which is shown now and never again."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [SHARE | {"url": "https://bitfoundry.example.org/v1/shared/" + "x" * 43}]}
    )

    url: str


class ShareList(BaseModel):
    """The links to a job that have not expired, the oldest first."""

    data: list[ShareOut]
