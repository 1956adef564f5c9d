"""The route of the audit log: who did what, newest first."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from api.http.deps import SessionsDep
from api.http.errors import may
from api.http.security import OPERATOR, Admin, check_scope
from api.jobs.schemas import Printable, RequestBody
from api.keys.schemas import KEY, MemberRef
from api.store.accounts import audit, keys
from api.store.accounts.audit import AuditFilter
from api.store.tables.accounts import AuditEntry
from api.store.tables.jobs import Member

router = APIRouter(prefix="/audit", tags=["audit"])


class AuditQuery(RequestBody):
    """The filter of the audit log, and the page of it."""

    action: Annotated[Printable, Field(max_length=64)] | None = Field(default=None, description="As `key.create`.")
    object_id: Annotated[Printable, Field(max_length=128)] | None = Field(
        default=None, description="The thing that was changed."
    )
    project_id: Annotated[str, Field(pattern="^(prj_[0-9a-f]{32}|all)$")] | None = Field(
        default=None, description="Another project, or `all`: needs the scope `operator`."
    )
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    cursor: Annotated[str, Field(pattern="^[0-9]{1,18}$")] | None = Field(
        default=None, description="`next_cursor` of the previous page."
    )


class AuditEntryOut(BaseModel):
    """A change in the audit log. ``key_id`` is null for a change on the machine itself; ``detail`` holds no secret.

    ``member`` has the key; it is null for the key of a program.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": 7,
                    "at": "2026-11-22T08:00:00Z",
                    "project_id": "prj_00000000000000000000000000000000",
                    "key_id": "0123456789ab",
                    "member": KEY["member"],
                    "action": "job.cancel",
                    "object_id": "job_01a200dc5edf7cfaa251b183f95c582d",
                    "request_id": "req_0123456789abcdef",
                    "detail": {},
                }
            ]
        }
    )

    id: int
    at: datetime
    project_id: str
    key_id: str | None
    member: MemberRef | None
    action: str
    object_id: str
    request_id: str | None
    detail: dict[str, Any]

    @classmethod
    def of(cls, entry: AuditEntry, member: Member | None) -> AuditEntryOut:
        columns = {name: getattr(entry, name) for name in cls.model_fields if name != "member"}
        return cls(**columns, member=MemberRef.of(member))


class AuditPage(BaseModel):
    """A page of the audit log, newest first; ``next_cursor`` asks for the next page."""

    data: list[AuditEntryOut]
    has_more: bool
    next_cursor: str | None


@router.get("", responses=may(422))
def list_audit_entries(
    query: Annotated[AuditQuery, Query()], caller: Admin, sessions: SessionsDep, request: Request, response: Response
) -> AuditPage:
    """List the changes to the project's objects: key, project, action, object, time, request."""
    project_id: str | None = caller.project_id
    if query.project_id not in (None, caller.project_id):
        check_scope(caller, OPERATOR)
        project_id = None if query.project_id == "all" else query.project_id
    wanted = AuditFilter(project_id, query.action, query.object_id)
    before = int(query.cursor) if query.cursor else None
    with sessions.begin() as session:
        entries = audit.page(session, wanted, before=before, limit=query.limit + 1)
        people = keys.find_members(session, {entry.key_id for entry in entries if entry.key_id})
    shown = [AuditEntryOut.of(entry, people.get(entry.key_id or "")) for entry in entries[: query.limit]]
    next_cursor = str(shown[-1].id) if len(entries) > query.limit else None
    if next_cursor:
        following = request.url.include_query_params(cursor=next_cursor)
        response.headers["Link"] = f'<{following.path}?{following.query}>; rel="next"'
    return AuditPage(data=shown, has_more=next_cursor is not None, next_cursor=next_cursor)
