"""The routes of Hub tokens. A token comes in and never goes out: not here, not in an event, a log or an artifact."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from api.http.deps import ContextDep, SessionsDep
from api.http.errors import Problem, may
from api.http.security import Admin, Reader
from api.http.strict_json import StrictJsonRoute
from api.jobs.schemas import TOKEN_NAME, RequestBody
from api.store.accounts import audit, hub_tokens
from api.store.tables.accounts import HubToken

router = APIRouter(prefix="/hub-tokens", tags=["hub tokens"], route_class=StrictJsonRoute)

TokenName = Annotated[str, Path(pattern=TOKEN_NAME)]


class HubTokenPut(RequestBody):
    """The token as the Hub issued it. Read access to the models that are needed is enough."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"token": "hf_..."}]})

    token: SecretStr = Field(min_length=1, max_length=512)


class HubTokenOut(BaseModel):
    """The name of a stored token, never the token itself."""

    name: str
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(cls, token: HubToken) -> HubTokenOut:
        return cls(name=token.name, created_at=token.created_at, updated_at=token.updated_at)


class HubTokenList(BaseModel):
    """The project's tokens by name."""

    data: list[HubTokenOut]


@router.put("/{name}", responses=may(409, 422))
def put_hub_token(name: TokenName, body: HubTokenPut, caller: Admin, context: ContextDep) -> HubTokenOut:
    """Store a token under a name, in place of the one that was there. Jobs use it with ``model.hub_token``."""
    token = body.token.get_secret_value()
    if not (token.isascii() and token.isprintable() and " " not in token):
        entry = {
            "pointer": "#/token",
            "detail": "a token contains only letters, digits and signs",
            "code": "invalid_text",
        }
        raise Problem(422, "invalid_text", "This is not a valid token.", errors=[entry])
    vault = context.require_vault()
    with context.sessions.begin() as session:
        stored = hub_tokens.put(session, vault, caller.project_id, name, token)
        audit.note(session, caller, "hub_token.put", name)
        return HubTokenOut.of(stored)


@router.get("")
def list_hub_tokens(caller: Reader, sessions: SessionsDep) -> HubTokenList:
    """List the tokens that jobs of this project can use, by name."""
    with sessions.begin() as session:
        return HubTokenList(data=[HubTokenOut.of(token) for token in hub_tokens.find_all(session, caller.project_id)])


@router.delete("/{name}", status_code=204, responses=may(404))
def delete_hub_token(name: TokenName, caller: Admin, sessions: SessionsDep) -> None:
    """Delete a token. Jobs that name it and have not downloaded their model yet will fail."""
    with sessions.begin() as session:
        if not hub_tokens.remove(session, caller.project_id, name):
            raise Problem(404, "hub_token_not_found", "There is no such token.")
        audit.note(session, caller, "hub_token.delete", name)
