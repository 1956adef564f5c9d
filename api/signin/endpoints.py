"""The routes of signing in, for the dashboard, whose scripts must not be able to read a key."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from api.http import security
from api.http.deps import Context, ContextDep
from api.http.errors import may
from api.http.security import SIGN_IN_COOKIE
from api.http.strict_json import StrictJsonRoute
from api.jobs.schemas import RequestBody
from api.keys.schemas import KeyOut
from api.projects.endpoints import no_such_project
from api.store.accounts import audit, keys, members, signins
from api.store.accounts.audit import Caller
from api.store.tables.jobs import ApiKey, Project


class SignInRoute(StrictJsonRoute):
    """The only route with a body that is read before a key is known: the key is in it, and little else."""

    max_bytes = 4096
    needs_key = False


router = APIRouter(prefix="/sign-in", tags=["sign-in"], route_class=SignInRoute)
project_router = APIRouter(prefix="/sign-in", tags=["sign-in"], route_class=StrictJsonRoute)


class SignInCreate(RequestBody):
    """The request body for signing in: an API key."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"api_key": "bf_0123456789ab_" + "x" * 43}]})

    api_key: Annotated[SecretStr, Field(max_length=200)]


class ProjectRef(BaseModel):
    """The id and the name of a project."""

    id: str
    name: str


class SignInOut(BaseModel):
    """A sign-in: its key and its end; ``csrf_token`` goes into the header X-CSRF-Token of each request that changes.

    ``projects``, by name: the project of the key, and those that ``POST /v1/sign-in/project`` can change to.
    """

    key: KeyOut
    csrf_token: str
    expires_at: datetime
    projects: list[ProjectRef]

    @classmethod
    def of(
        cls, token: str, key: ApiKey, expires_at: datetime, reachable: Sequence[tuple[Project, ApiKey]]
    ) -> SignInOut:
        refs = [ProjectRef(id=project.id, name=project.name) for project, _ in reachable]
        csrf_token = security.csrf_token(token)
        return cls(key=KeyOut.of(key), csrf_token=csrf_token, expires_at=expires_at, projects=refs)


class ProjectChange(RequestBody):
    """The request body for continuing a sign-in in another project."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"project_id": "prj_" + "0" * 32}]})

    project_id: Annotated[str, Field(pattern="^prj_[0-9a-f]{32}$")]


@router.post("", status_code=201, responses=may(401, 422))
def sign_in(body: SignInCreate, request: Request, context: ContextDep, response: Response) -> SignInOut:
    """Sign a browser in: the response sets a cookie with which every route works as with the key itself.

    Scripts cannot read the cookie, and no other site's request carries it.
    """
    token = secrets.token_urlsafe(32)
    key_id, secret_sha256 = security.take_apart(body.api_key.get_secret_value())
    with context.sessions.begin() as session:
        key = security.open_key(session, key_id, secret_sha256)
        hashed = security.hash_secret(token)
        expires_at = signins.add(session, hashed, key.id, secret_sha256, context.settings.sign_in_s)
        caller = Caller(key.project_id, key.id, key.scopes, request.scope["request_id"])
        audit.note(session, caller, "key.sign_in", key.id)
        row = keys.find(session, key.project_id, key.id)
        assert row is not None
        shown = SignInOut.of(token, row, expires_at, members.find_reachable(session, key.id))
    set_cookie(request, response, context, token)
    return shown


@router.get("", responses=may(401, 403, 429))
def get_sign_in(
    request: Request, caller: Annotated[Caller, Depends(security.authenticate)], context: ContextDep, response: Response
) -> SignInOut:
    """Return the sign-in of this browser, for a page that was loaded again. 401 if it is not signed in."""
    token = request.cookies.get(SIGN_IN_COOKIE, "")
    with context.sessions.begin() as session:
        valid = signins.find_valid(session, security.hash_secret(token))
        row = keys.find(session, caller.project_id, valid[0].id) if valid else None
        if valid is None or row is None:
            raise security.unauthorized()
        shown = SignInOut.of(token, row, valid[1].expires_at, members.find_reachable(session, row.id))
    response.headers["Cache-Control"] = "no-store"
    return shown


@project_router.post("/project", responses=may(401, 403, 404, 422, 429))
def change_project(
    body: ProjectChange,
    request: Request,
    caller: Annotated[Caller, Depends(security.authenticate)],
    context: ContextDep,
    response: Response,
) -> SignInOut:
    """Continue the sign-in of this browser in another of its `projects`, until the same time.

    The cookie and the CSRF token are new ones: a page that still shows the other project can change nothing.
    """
    token, new_token = request.cookies.get(SIGN_IN_COOKIE, ""), secrets.token_urlsafe(32)
    with context.sessions.begin() as session:
        valid = signins.find_valid(session, security.hash_secret(token))
        if valid is None:
            raise security.unauthorized()
        key, row = valid
        reachable = members.find_reachable(session, key.id)
        wanted = next((one for project, one in reachable if project.id == body.project_id), None)
        if wanted is None:
            raise no_such_project()
        signins.switch(session, row.token_sha256, security.hash_secret(new_token), wanted)
        audit.note(session, Caller(wanted.project_id, wanted.id, frozenset(wanted.scopes)), "key.sign_in", wanted.id)
        shown = SignInOut.of(new_token, wanted, row.expires_at, reachable)
    set_cookie(request, response, context, new_token)
    return shown


@router.delete("", status_code=204, responses=may(401, 403, 429))
def sign_out(
    request: Request, caller: Annotated[Caller, Depends(security.authenticate)], context: ContextDep, response: Response
) -> None:
    """End the sign-in of this browser, here and in the service."""
    with context.sessions.begin() as session:
        signins.remove(session, security.hash_secret(request.cookies.get(SIGN_IN_COOKIE, "")))
    response.delete_cookie(SIGN_IN_COOKIE, httponly=True, samesite="strict")


def set_cookie(request: Request, response: Response, context: Context, token: str) -> None:
    """Give the browser the cookie of its sign-in, which no script can read and no other site's request carries."""
    response.set_cookie(
        SIGN_IN_COOKIE,
        token,
        max_age=round(context.settings.sign_in_s),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    response.headers["Cache-Control"] = "no-store"
