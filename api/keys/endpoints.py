"""The routes of API keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response
from sqlalchemy.orm import Session

from api.http import security
from api.http.deps import SessionsDep
from api.http.errors import Problem, may
from api.http.security import Admin
from api.http.strict_json import StrictJsonRoute
from api.keys.grants import (
    check_in_future,
    check_may_grant,
    check_may_take,
    check_not_locked_out,
    check_not_of_provider,
    open_member,
)
from api.keys.schemas import KeyCreate, KeyList, KeyOut, KeyRotate, NewKeyOut
from api.projects.endpoints import open_project
from api.store.accounts import audit, keys, projects
from api.store.accounts.audit import Caller
from api.store.tables.jobs import ApiKey, Member

router = APIRouter(prefix="/keys", tags=["keys"], route_class=StrictJsonRoute)

KeyId = Annotated[str, Path(pattern="^[0-9a-f]{12}$")]


@router.post("", status_code=201, responses=may(404, 409, 422))
def create_key(body: KeyCreate, caller: Admin, sessions: SessionsDep, response: Response) -> NewKeyOut:
    """Create a key. It is in this response and nowhere else: the service keeps only a hash."""
    project_id = body.project_id or caller.project_id
    if project_id != caller.project_id:
        security.check_scope(caller, security.OPERATOR)
    check_in_future(body.expires_at)
    with sessions.begin() as session:
        open_project(session, project_id)
        member = None
        if body.member_id is not None:
            projects.lock(session, project_id)  # the role stays while the key is made
            member = open_member(session, project_id, body.member_id)
            check_not_of_provider(member)
        scopes, follows_role = _scopes_of(body, member), member is not None and body.scopes is None
        row, plain = security.new_key(project_id, body.name, scopes, body.expires_at, member, follows_role=follows_role)
        check_may_grant(session, caller, row.scopes, row.expires_at)
        keys.add(session, row)
        note_creation(session, caller, row)
        session.refresh(row)
    response.headers["Location"] = f"/v1/keys/{row.id}"
    response.headers["Cache-Control"] = "no-store"
    return NewKeyOut.with_secret(row, plain)


@router.get("")
def list_keys(caller: Admin, sessions: SessionsDep) -> KeyList:
    """List the project's keys, with the revoked and expired ones."""
    with sessions.begin() as session:
        return KeyList(data=[KeyOut.of(key) for key in keys.find_all(session, caller.project_id)])


@router.get("/self")
def get_own_key(caller: Annotated[Caller, Depends(security.authenticate)], sessions: SessionsDep) -> KeyOut:
    """Return the key of this request: its project and its scopes. Any valid key may ask."""
    with sessions.begin() as session:
        return KeyOut.of(_open(session, caller, caller.key_id or ""))


@router.get("/{key_id}", responses=may(404))
def get_key(key_id: KeyId, caller: Admin, sessions: SessionsDep) -> KeyOut:
    """Return a key of the project, without its secret."""
    with sessions.begin() as session:
        return KeyOut.of(_open(session, caller, key_id))


@router.post("/{key_id}/rotate", responses=may(404, 409, 422))
def rotate_key(
    key_id: KeyId,
    caller: Admin,
    sessions: SessionsDep,
    response: Response,
    body: KeyRotate = KeyRotate(),  # noqa: B008  it is frozen
) -> NewKeyOut:
    """Give the key a new secret. The present one works for ``overlap_s`` more seconds."""
    secret = security.new_secret()
    with sessions.begin() as session:
        key = _open(session, caller, key_id)
        check_not_of_provider(key.member)
        check_may_grant(session, caller, key.scopes, key.expires_at)  # who rotates a key holds it
        if key.revoked_at is not None:
            raise Problem(409, "key_revoked", "The key was revoked.", hint="Create a new one.")
        keys.rotate(session, key, security.hash_secret(secret), body.overlap_s)
        audit.note(session, caller, "key.rotate", key_id, overlap_s=body.overlap_s)
    response.headers["Cache-Control"] = "no-store"
    return NewKeyOut.with_secret(key, security.plain_key(key_id, secret))


@router.post("/{key_id}/revoke", responses=may(404, 409))
def revoke_key(key_id: KeyId, caller: Admin, sessions: SessionsDep) -> KeyOut:
    """Revoke the key, from now on and for ever. The last key with the scope ``admin`` stays."""
    with sessions.begin() as session:
        projects.lock(session, caller.project_id)
        key = _open(session, caller, key_id)
        check_may_take(caller, [key])
        keys.revoke(session, key)
        check_not_locked_out(session, caller)
        audit.note(session, caller, "key.revoke", key_id)
        return KeyOut.of(key)


def _open(session: Session, caller: Caller, key_id: str) -> ApiKey:
    key = keys.find(session, caller.project_id, key_id)
    if key is None:
        raise Problem(404, "key_not_found", "There is no such key.")
    return key


def note_creation(session: Session, caller: Caller, key: ApiKey) -> None:
    """Note in the audit log that the key was made."""
    of_member = {"member_id": key.member.id} if key.member else {}
    detail = {"name": key.name, "scopes": key.scopes} | of_member
    audit.note(session, caller, "key.create", key.id, project_id=key.project_id, **detail)


def _scopes_of(body: KeyCreate, member: Member | None) -> Sequence[str]:
    """Return the scopes of the new key: by default those of the member's role. Raises Problem 422."""
    if member is None:
        if body.scopes is None:
            entry = {"pointer": "#/scopes", "detail": "Field required", "code": "missing_field"}
            raise Problem(422, "missing_field", "A key without a member needs `scopes`.", errors=[entry])
        return body.scopes
    of_role = security.ROLES[member.role]
    if beyond := [scope for scope in body.scopes or () if scope not in of_role]:
        entry = {
            "pointer": "#/scopes",
            "detail": f"not part of the role: {', '.join(beyond)}",
            "code": "scope_not_in_role",
        }
        raise Problem(
            422,
            "scope_not_in_role",
            f"The member has the role {member.role}, which does not include the scope '{beyond[0]}'.",
            hint="Remove that scope, or change the member's role.",
            errors=[entry | {"allowed": [*of_role]}],
        )
    return body.scopes or of_role
