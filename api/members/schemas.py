"""The request and response bodies of members."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from api.jobs.schemas import RequestBody, Text
from api.keys.schemas import KEY, NewKeyOut
from api.store.accounts.members import Listed

Role = Literal["viewer", "editor", "admin"]

MEMBER: dict[str, Any] = {
    "id": KEY["member"]["id"],
    "name": KEY["member"]["name"],
    "role": "editor",
    "num_keys": 1,
    "last_used_at": "2026-11-22T09:30:00Z",
    "created_at": "2026-11-22T08:00:00Z",
}
FIRST_KEY = KEY | {"name": MEMBER["name"], "scopes": ["jobs:read", "jobs:write", "jobs:chat"], "last_used_at": None}


class MemberCreate(RequestBody):
    """The request body for adding a member. The first key has the scopes of the role; ``expires_at`` is its end.

    ``viewer`` has ``jobs:read``; ``editor`` also ``jobs:write`` and ``jobs:chat``; ``admin`` also ``admin``.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": MEMBER["name"], "role": "editor"}]})

    name: Text
    role: Role
    expires_at: AwareDatetime | None = Field(
        default=None, description="Must be in the future. Without it, the key does not expire."
    )


class MemberPatch(RequestBody):
    """The request body for changing a member. Fields that are not named stay."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"role": "viewer"}]})

    name: Text = ""
    role: Role = "viewer"


class MemberOut(BaseModel):
    """A member. ``num_keys`` counts the valid keys; ``last_used_at`` is the last use of any key, exact to a minute."""

    model_config = ConfigDict(json_schema_extra={"examples": [MEMBER]})

    id: str
    name: str
    role: Role
    num_keys: int
    last_used_at: datetime | None
    created_at: datetime

    @classmethod
    def of(cls, listed: Listed) -> MemberOut:
        return cls(**columns_of(listed))


class NewMemberOut(MemberOut):
    """A member with the first key, whose secret is shown now and never again."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                MEMBER | {"last_used_at": None, "first_key": FIRST_KEY | {"key": "bf_0123456789ab_" + "x" * 43}}
            ]
        }
    )

    first_key: NewKeyOut


class MemberList(BaseModel):
    """The present members of the project, the oldest first."""

    data: list[MemberOut]


def columns_of(listed: Listed) -> dict[str, Any]:
    member = listed.member
    names = ("id", "name", "role", "created_at")
    columns = {name: getattr(member, name) for name in names}
    return columns | {"num_keys": listed.num_keys, "last_used_at": listed.last_used_at}
