"""The routes of API keys."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response
from sqlalchemy.orm import Session

from api.http import security
from api.http.deps import SessionsDep
from api.http.errors import Problem, may
from api.http.security import Admin
from api.http.strict_json import StrictJsonRoute
from api.keys.schemas import KeyCreate, KeyList, KeyOut, KeyRotate, NewKeyOut
from api.projects.endpoints import open_project
from api.store.accounts import audit, keys
from api.store.accounts.audit import Caller
from api.store.tables.jobs import ApiKey

router = APIRouter(prefix="/keys", tags=["keys"], route_class=StrictJsonRoute)

KeyId = Annotated[str, Path(pattern="^[0-9a-f]{12}$")]


@router.post("", status_code=201, responses=may(404, 422))
def create_key(body: KeyCreate, caller: Admin, sessions: SessionsDep, response: Response) -> NewKeyOut:
    """Create a key. It is in this response and nowhere else: the service keeps only a hash."""
    project_id = body.project_id or caller.project_id
    if project_id != caller.project_id:
        security.check_scope(caller, security.OPERATOR)
    if body.expires_at is not None and body.expires_at <= datetime.now(UTC):
        entry = {"pointer": "#/expires_at", "detail": "is in the past", "code": "invalid_request"}
        raise Problem(422, "invalid_request", "`expires_at` must be in the future.", errors=[entry])
    row, plain = security.new_key(project_id, body.name, body.scopes, body.expires_at)
    with sessions.begin() as session:
        _check_may_hold(session, caller, row)
        open_project(session, project_id)
        keys.add(session, row)
        audit.note(session, caller, "key.create", row.id, project_id=project_id, name=row.name, scopes=row.scopes)
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
        _check_may_hold(session, caller, key)
        if key.revoked_at is not None:
            raise Problem(409, "key_revoked", "The key was revoked.", hint="Make a new one.")
        keys.rotate(session, key, security.hash_secret(secret), body.overlap_s)
        audit.note(session, caller, "key.rotate", key_id, overlap_s=body.overlap_s)
    response.headers["Cache-Control"] = "no-store"
    return NewKeyOut.with_secret(key, security.plain_key(key_id, secret))


@router.post("/{key_id}/revoke", responses=may(404))
def revoke_key(key_id: KeyId, caller: Admin, sessions: SessionsDep) -> KeyOut:
    """Revoke the key, from now on and for ever."""
    with sessions.begin() as session:
        key = _open(session, caller, key_id)
        if security.OPERATOR in key.scopes:  # an admin may not revoke an operator's key
            security.check_scope(caller, security.OPERATOR)
        keys.revoke(session, key)
        audit.note(session, caller, "key.revoke", key_id)
        return KeyOut.of(key)


def _open(session: Session, caller: Caller, key_id: str) -> ApiKey:
    key = keys.find(session, caller.project_id, key_id)
    if key is None:
        raise Problem(404, "key_not_found", "There is no such key.")
    return key


def _check_may_hold(session: Session, caller: Caller, key: ApiKey) -> None:
    """Check that the caller may hold this key: it has no scope that he lacks, and ends no later than his own key.

    Whoever makes or rotates a key holds it. Raises Problem 403.
    """
    for scope in key.scopes:
        security.check_scope(caller, scope)
    own = keys.find(session, caller.project_id, caller.key_id or "")
    until = own.expires_at if own else None
    if until is not None and (key.expires_at is None or key.expires_at > until):
        raise Problem(
            403,
            "expires_too_late",
            f"Your key ends at {until.isoformat()}: a key that you make or rotate must end no later.",
            hint="Give that time, or an earlier one, as `expires_at`.",
            errors=[{"pointer": "#/expires_at", "detail": "later than the end of your own key"}
                    | {"code": "expires_too_late", "allowed": [until.isoformat()]}],
        )  # fmt: skip
