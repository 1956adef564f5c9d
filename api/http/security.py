"""Bearer keys: ``bf_<id>_<secret>``. The secret has 256 random bits, so a plain SHA-256 of it is safe to store.

A browser shows its key once and has a cookie from then on (``api.signin``). Other sites can make a browser send
requests, so one that changes something must also carry a token that only our own page can know.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import APIKeyCookie, HTTPBearer
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api.http.deps import Context, ContextDep
from api.http.errors import Problem
from api.store.accounts import audit, keys, projects, signins
from api.store.accounts.audit import Caller, Shown
from api.store.engine import DatabaseReadOnly, Sessions, connect, dispose, reading
from api.store.tables.jobs import ApiKey, Member

READ = "jobs:read"
WRITE = "jobs:write"
CHAT = "jobs:chat"
ADMIN = "admin"
OPERATOR = "operator"
SCOPES = (READ, WRITE, CHAT, ADMIN, OPERATOR)
ROLES = {"viewer": (READ,), "editor": (READ, WRITE, CHAT), "admin": (READ, WRITE, CHAT, ADMIN)}
"""The scopes of each role that a member of a project can have."""
SIGN_IN_COOKIE = "bitfoundry_sign_in"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

# these two only describe in the OpenAPI document what ``authenticate`` reads itself
_KEY_SCHEME = HTTPBearer(
    scheme_name="apiKey", bearerFormat="bf_<id>_<secret>", description="An API key.", auto_error=False
)
_COOKIE_SCHEME = APIKeyCookie(
    name=SIGN_IN_COOKIE,
    scheme_name="signIn",
    description="The cookie that `POST /v1/sign-in` sets. Requests that change something must also send X-CSRF-Token.",
    auto_error=False,
)
_KeyScheme = Annotated[object, Depends(_KEY_SCHEME)]
_CookieScheme = Annotated[object, Depends(_COOKIE_SCHEME)]

_KEY = re.compile(r"bf_([0-9a-f]{12})_([0-9A-Za-z_-]{43})")


def new_key(
    project_id: str,
    name: str,
    scopes: Sequence[str],
    expires_at: datetime | None,
    member: Member | None = None,
    *,
    follows_role: bool = False,
) -> tuple[ApiKey, str]:
    """Return (the row to store, the plain text) of a new key. Nobody sees the plain text a second time."""
    key_id, secret = secrets.token_hex(6), new_secret()
    row = ApiKey(
        id=key_id,
        project_id=project_id,
        name=name,
        secret_sha256=hash_secret(secret),
        scopes=[scope for scope in SCOPES if scope in scopes],
        expires_at=expires_at,
        member=member,
        follows_role=follows_role,
    )
    return row, plain_key(key_id, secret)


def new_secret() -> str:
    return secrets.token_urlsafe(32)


def hash_secret(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def plain_key(key_id: str, secret: str) -> str:
    return f"bf_{key_id}_{secret}"


def create_key(
    database: Sessions | str, name: str, scopes: Sequence[str] = SCOPES, project_id: str = projects.DEFAULT
) -> str:
    """Store a new key and return its plain text, for anyone with access to the database: the first key of all.

    ``database`` may be a URL.
    """
    unknown = set(scopes) - set(SCOPES)
    if unknown:
        raise ValueError(f"unknown scopes {sorted(unknown)}; there are {', '.join(SCOPES)}")
    row, plain = new_key(project_id, name, scopes, None)
    sessions = connect(database, pool_size=1) if isinstance(database, str) else database
    try:
        with sessions.begin() as session:
            keys.add(session, row)
            audit.note(session, Caller(project_id, None, frozenset(SCOPES)), "key.create", row.id, scopes=row.scopes)
    finally:
        if isinstance(database, str):
            dispose(sessions)
    return plain


async def authenticate(
    request: Request, context: ContextDep, _key: _KeyScheme = None, _cookie: _CookieScheme = None
) -> Caller:
    """Return the caller of this request. Raises Problem 401; 429 if it is one request too many.

    There is one 401 for every reason, which helps no guesser. The check runs once a request; routes that take a body
    run it before they read the body (``api.http.bounded``).
    """
    if not hasattr(request.state, "caller"):
        request.state.caller = await run_in_threadpool(_find_caller, request, context)
    caller: Caller = request.state.caller
    return caller


def _find_caller(request: Request, context: Context) -> Caller:
    authorization = request.headers.get("authorization")
    if authorization is None and SIGN_IN_COOKIE in request.cookies:
        with reading(context.sessions) as session:
            key, shown = _open_sign_in(session, request)
            _note_use(session, key)
    else:
        scheme, _, credentials = (authorization or "").partition(" ")
        key_id, digest = take_apart(credentials.strip() if scheme.lower() == "bearer" else "")
        with reading(context.sessions) as session:
            key, shown = open_key(session, key_id, digest), Shown(key_id, digest)
            _note_use(session, key)
    limit = key.requests_per_minute or context.settings.requests_per_minute
    advice = " To follow a job, use its event stream instead of polling."
    count_request(request, context, key.project_id, limit, "The project has sent", advice)
    return Caller(key.project_id, key.id, key.scopes, request.scope["request_id"], shown)


def _note_use(session: Session, key: keys.ValidKey) -> None:
    if not key.used_lately:
        with suppress(DatabaseReadOnly):  # what only reads goes on
            keys.note_use(session, key.id)


def take_apart(plain: str) -> tuple[str, bytes]:
    """Return (id, hash of the secret) of a well-formed key. Raises Problem 401 for other text, without the database."""
    match = _KEY.fullmatch(plain)
    if match is None:
        raise unauthorized()
    return match[1], hash_secret(match[2])


def open_key(session: Session, key_id: str, digest: bytes) -> keys.ValidKey:
    """Return the key, if a secret of this hash opens it. Raises Problem 401."""
    key = keys.find_valid(session, key_id)
    if key is None or not any(hmac.compare_digest(digest, secret) for secret in key.secrets_sha256):
        raise unauthorized()
    return key


def csrf_token(token: str) -> str:
    """Return the X-CSRF-Token for requests with the cookie ``token``: another site can neither read nor guess it."""
    return hashlib.sha256(b"csrf " + token.encode()).hexdigest()


def unauthorized() -> Problem:
    return Problem(
        401,
        "unauthorized",
        "This needs a valid API key.",
        hint="Send the header 'Authorization: Bearer bf_...'.",
        headers={"WWW-Authenticate": 'Bearer realm="bitfoundry"'},
    )


def _open_sign_in(session: Session, request: Request) -> tuple[keys.ValidKey, Shown]:
    token = request.cookies[SIGN_IN_COOKIE]
    valid = signins.find_valid(session, hash_secret(token))
    if valid is None:
        raise unauthorized()
    key, sign_in = valid
    header = request.headers.get("x-csrf-token", "").encode()
    if request.method not in SAFE_METHODS and not hmac.compare_digest(header, csrf_token(token).encode()):
        raise Problem(
            403,
            "csrf_token_missing",
            "A request that changes something and uses the sign-in cookie must send the CSRF token.",
            hint="Send `csrf_token` of GET /v1/sign-in as X-CSRF-Token, or use an API key instead of the cookie.",
        )
    return key, Shown(key.id, sign_in.secret_sha256, sign_in.token_sha256)


def require(scope: str) -> Callable[[Caller], Awaitable[Caller]]:
    """Return a dependency: the caller of a request, whose key must have ``scope``."""

    async def check(caller: Annotated[Caller, Depends(authenticate)]) -> Caller:
        check_scope(caller, scope)
        return caller

    return check


def check_scope(caller: Caller, scope: str) -> None:
    """Check that the caller has the scope. Raises Problem 403 that names it."""
    if scope not in caller.scopes:
        raise Problem(
            403,
            "insufficient_scope",
            f"This key lacks the scope '{scope}'.",
            hint="Ask an admin for a key with that scope (`bitfoundry keys create`).",
            errors=[
                {"parameter": "authorization", "detail": "a scope is missing", "code": "insufficient_scope"}
                | {"allowed": [scope]}
            ],
        )


Reader = Annotated[Caller, Depends(require(READ))]
Writer = Annotated[Caller, Depends(require(WRITE))]
Chatter = Annotated[Caller, Depends(require(CHAT))]
Admin = Annotated[Caller, Depends(require(ADMIN))]
Operator = Annotated[Caller, Depends(require(OPERATOR))]


def count_request(request: Request, context: Context, name: str, limit: int, who: str, advice: str = "") -> None:
    """Count a request of ``name``, which may have ``limit`` of them within a minute. Raises Problem 429."""
    rate = context.rates.count(name, limit)
    request.scope["answer_headers"].update(rate.headers)
    if rate.exceeded:
        raise Problem(
            429,
            "rate_limited",
            f"{who} more than {limit} requests within a minute.",
            hint=f"Retry in {rate.reset_s} s.{advice}",
            headers={"Retry-After": str(rate.reset_s)},
        )
