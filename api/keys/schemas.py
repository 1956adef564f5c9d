"""The request and response bodies of API keys. A key itself is in a response once: when it is made or rotated."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from api.jobs.schemas import RequestBody, Text
from api.store.tables.jobs import ApiKey, Member

Scope = Literal["jobs:read", "jobs:write", "jobs:chat", "admin", "operator"]
MemberId = Annotated[str, Field(pattern="^mem_[0-9a-f]{32}$")]
MAX_OVERLAP_S = 7 * 24 * 3600

KEY: dict[str, Any] = {
    "id": "0123456789ab",
    "prefix": "bf_0123456789ab_",
    "project_id": "prj_00000000000000000000000000000000",
    "name": "nightly pipeline",
    "scopes": ["jobs:read", "jobs:write"],
    "created_at": "2026-11-22T08:00:00Z",
    "rotated_at": None,
    "last_used_at": "2026-11-22T09:30:00Z",
    "expires_at": "2027-11-22T08:00:00Z",
    "revoked_at": None,
    "member": {"id": "mem_01a200dc5edf7cfaa251b183f95c582d", "name": "Ada Lovelace"},
}


class KeyCreate(RequestBody):
    """The request body for a key of the caller's project, or with the scope ``operator`` of another one.

    ``jobs:read`` sees jobs, ``jobs:write`` makes and moves them, ``jobs:chat`` chats with their
    results, ``admin`` manages the project (members, keys, tokens, webhooks,
    audit log), ``operator`` the service (projects, workers). You cannot grant a scope that you do not have, nor a
    longer life than your own key has. The key of a member has the scopes of the role, and those of a later role, unless
    ``scopes`` names some of them: a key with named scopes never gains any.
    """

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "nightly pipeline", "scopes": ["jobs:read", "jobs:write"]}]}
    )

    name: Text
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=5)] | None = Field(
        default=None, description="Required for a key without a member."
    )
    expires_at: AwareDatetime | None = Field(
        default=None, description="Must be in the future. Without it, the key does not expire."
    )
    project_id: Annotated[str, Field(pattern="^prj_[0-9a-f]{32}$")] | None = None
    member_id: MemberId | None = Field(default=None, description="The member who gets the key.")


class KeyRotate(RequestBody):
    """The request body for rotating a key: the time for which its present secret works beside the new one."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"overlap_s": 3600}]})

    overlap_s: Annotated[int, Field(strict=True, ge=0, le=MAX_OVERLAP_S)] = 0


class MemberRef(BaseModel):
    """The id and the present name of a member, who may have been removed."""

    id: str
    name: str

    @classmethod
    def of(cls, member: Member | None) -> MemberRef | None:
        return cls(id=member.id, name=member.name) if member else None


class KeyOut(BaseModel):
    """A key without its secret. The key begins with ``prefix``; ``last_used_at`` is exact to a minute.

    ``member`` has the key; it is null for the key of a program.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [KEY]})

    id: str
    prefix: str
    project_id: str
    name: str
    scopes: list[str]
    created_at: datetime
    rotated_at: datetime | None
    last_used_at: datetime | None
    expires_at: datetime | None
    revoked_at: datetime | None
    member: MemberRef | None

    @classmethod
    def of(cls, key: ApiKey) -> KeyOut:
        return cls(prefix=f"bf_{key.id}_", **_columns(key))


class NewKeyOut(KeyOut):
    """A key with its secret, which is shown now and never again."""

    model_config = ConfigDict(json_schema_extra={"examples": [KEY | {"key": "bf_0123456789ab_" + "x" * 43}]})

    key: str

    @classmethod
    def with_secret(cls, key: ApiKey, plain: str) -> NewKeyOut:
        return cls(prefix=f"bf_{key.id}_", key=plain, **_columns(key))


class KeyList(BaseModel):
    """The keys of the project, the oldest first."""

    data: list[KeyOut]


def _columns(key: ApiKey) -> dict[str, Any]:
    columns = {name: getattr(key, name) for name in KeyOut.model_fields if name not in ("prefix", "member")}
    return columns | {"member": MemberRef.of(key.member)}
