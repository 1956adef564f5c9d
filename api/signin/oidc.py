"""The routes of signing in through an OpenID provider. Without one in the settings they answer 404.

The page of the dashboard asks for the provider's address (``POST /v1/sign-in/oidc``), goes there, and comes back with a
code, which it sends here. So nothing here redirects, and a code works only with the cookie of the browser that began.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from api.http import security
from api.http.deps import Context, ContextDep
from api.http.errors import Problem, may
from api.http.strict_json import StrictJsonRoute
from api.jobs.schemas import RequestBody
from api.oidc.provider import Attempt, Identity, Provider, ProviderRefused, ProviderUnavailable
from api.signin import admission
from api.signin.endpoints import SignInOut, set_cookie
from api.store.accounts import members, signins

logger = logging.getLogger(__name__)

ATTEMPT_COOKIE = "bitfoundry_oidc"
ATTEMPT_S = 600
"""Time that a person has at the provider."""
MAX_CODE = 8192


class OidcRoute(StrictJsonRoute):
    """Routes of a browser that is not signed in yet."""

    max_bytes = 16384
    needs_key = False


router = APIRouter(prefix="/sign-in/oidc", tags=["sign-in"], route_class=OidcRoute)


class OidcOut(BaseModel):
    """The name of the OpenID provider that browsers can sign in with, null without one."""

    name: str | None


class OidcStart(BaseModel):
    """The provider's address, where the browser goes on."""

    authorization_url: str


class OidcCallback(RequestBody):
    """The request body for ending a sign-in: what the provider added to the address of the dashboard.

    ``code`` and ``state``, and ``iss`` if the provider sends it; or ``error`` in place of the code.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"code": "SplxlOBeZQQYbYS6WxSbIA", "state": "0" * 64}]})

    state: Annotated[str, Field(max_length=200)]
    code: Annotated[str, Field(max_length=MAX_CODE)] = ""
    iss: Annotated[str, Field(max_length=2048)] | None = None
    error: Annotated[str, Field(max_length=100)] = ""


@router.get("")
def get_provider(context: ContextDep) -> OidcOut:
    """Return the OpenID provider that a browser can sign in with."""
    return OidcOut(name=context.provider.client.config.name if context.provider else None)


@router.post("", responses=may(403, 404))
async def start_sign_in(request: Request, context: ContextDep, response: Response) -> OidcStart:
    """Begin to sign in through the OpenID provider. The cookie of this response binds the rest to this browser."""
    provider = _require_provider(context)
    attempt = Attempt(secrets.token_urlsafe(32))
    async with _conversation(provider):
        url = await provider.authorization_url(attempt)
    response.set_cookie(
        ATTEMPT_COOKIE,
        attempt.token,
        max_age=ATTEMPT_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    response.headers["Cache-Control"] = "no-store"
    return OidcStart(authorization_url=url)


@router.post("/callback", status_code=201, responses=may(403, 404, 422))
async def end_sign_in(body: OidcCallback, request: Request, context: ContextDep, response: Response) -> SignInOut:
    """Sign the browser in with the code that the OpenID provider gave it: the response sets the cookie of a sign-in.

    What the person may do follows from the claims alone, anew at each sign-in.
    """
    provider = _require_provider(context)
    attempt = Attempt(request.cookies.get(ATTEMPT_COOKIE, ""))
    if not attempt.token or not hmac.compare_digest(attempt.state.encode(), body.state.encode()):
        raise Problem(
            403,
            "sign_in_not_started",
            f"This sign-in was not started in this browser, or more than {ATTEMPT_S // 60} minutes ago.",
            hint="Start again from the sign-in page, and finish in the same browser.",
        )
    async with _conversation(provider):
        if body.iss is not None and body.iss != provider.client.config.issuer:  # RFC 9207
            raise ProviderRefused("the answer comes from another issuer")
        if not body.code:
            error = body.error if re.fullmatch(r"[ !#-\[\]-~]+", body.error) else "no code"
            raise ProviderRefused(f"it sent the browser back with '{error}'")
        identity = await provider.identify(attempt, body.code)
    token = secrets.token_urlsafe(32)
    shown = await run_in_threadpool(_let_in, context, provider, identity, token, request.scope["request_id"])
    response.delete_cookie(ATTEMPT_COOKIE, httponly=True, samesite="strict")
    set_cookie(request, response, context, token)
    return shown


def _let_in(context: Context, provider: Provider, identity: Identity, token: str, request_id: str) -> SignInOut:
    """Store the sign-in, and what the person's claims grant. Raises Problem 403 if that is nothing."""
    config, lasts_s = provider.client.config, context.settings.sign_in_s
    grants = admission.matching(config.grants, identity)
    with context.sessions.begin() as session:
        admitted = admission.admit(session, grants, identity, lasts_s, request_id)
        if admitted:
            key = admitted[0].key
            end = signins.add(session, security.hash_secret(token), key.id, key.secret_sha256, lasts_s)
            session.refresh(key)
            return SignInOut.of(token, key, end, members.find_reachable(session, key.id))
    who = identity.email or identity.subject
    logger.warning("sign-in through %s: nothing is granted to the subject %r", config.name, identity.subject)
    missing = dict.fromkeys(grant.project for grant in grants)
    why = (
        f"the project '{next(iter(missing))}' of the operator's rules does not exist"
        if missing
        else f"no rule of the operator fits the claims: {admission.describe(config.grants, identity.claims)}"
    )
    raise Problem(
        403,
        "no_grant",
        f"{config.name} knows you as {who}, but no project is open to you: {why}.",
        hint="Ask the operator to add you to a group that has access, or to add a rule for you. Then sign in again.",
    )


def _require_provider(context: Context) -> Provider:
    if context.provider is None:
        raise Problem(
            404,
            "oidc_not_configured",
            "This service has no sign-in through an OpenID provider.",
            hint="Sign in with an API key. The operator can set BITFOUNDRY_OIDC_FILE (see docs/how-to/oidc.md).",
        )
    return context.provider


@asynccontextmanager
async def _conversation(provider: Provider) -> AsyncIterator[None]:
    """Talk to the provider, as one of few at once. Raises Problem 503 and 403 for what can go wrong there."""
    name = provider.client.config.name
    if provider.conversations.locked():
        hint = "Try again in a moment."
        raise Problem(503, "busy", "Too many sign-ins are in progress.", hint=hint, headers={"Retry-After": "5"})
    async with provider.conversations:
        try:
            yield
        except ProviderUnavailable as error:
            logger.warning("sign-in through %s: %s", name, error)
            raise Problem(
                503,
                "provider_unavailable",
                f"{name} cannot be reached: {error}.",
                hint="Try again in a moment, or sign in with an API key.",
                headers={"Retry-After": "5"},
            ) from error
        except ProviderRefused as error:
            logger.warning("sign-in through %s: %s", name, error)
            raise Problem(
                403,
                "sign_in_refused",
                f"The sign-in through {name} failed: {error}.",
                hint="Start again from the sign-in page. If it fails again, show this message to the operator.",
            ) from error
