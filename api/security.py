"""Bearer keys: ``bf_<id>_<secret>``. The secret has 256 random bits, so a plain SHA-256 of it is safe to store."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import Depends, Header

from api.deps import SessionsDep
from api.errors import Problem
from api.store import keys
from api.store.engine import Sessions, connect, dispose
from api.store.tables import ApiKey

READ = "jobs:read"
WRITE = "jobs:write"
SCOPES = (READ, WRITE)

_KEY = re.compile(r"bf_([0-9a-f]{12})_([0-9A-Za-z_-]{43})")


def create_key(database: Sessions | str, name: str, scopes: Sequence[str] = SCOPES) -> str:
    """A new key, in plain text: this is the only time that anybody sees it. ``database`` may be a URL."""
    unknown = set(scopes) - set(SCOPES)
    if unknown:
        raise ValueError(f"unknown scopes {sorted(unknown)}; there are {', '.join(SCOPES)}")
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    sessions = connect(database, pool_size=1) if isinstance(database, str) else database
    try:
        with sessions.begin() as session:
            keys.add(session, ApiKey(id=key_id, name=name, secret_sha256=_hash(secret), scopes=list(scopes)))
    finally:
        if isinstance(database, str):
            dispose(sessions)
    return f"bf_{key_id}_{secret}"


def authenticate(sessions: SessionsDep, authorization: Annotated[str | None, Header()] = None) -> ApiKey:
    """The valid key of this request, or 401. One answer for every reason: it helps no guesser."""
    scheme, _, credentials = (authorization or "").partition(" ")
    match = _KEY.fullmatch(credentials.strip())
    if scheme.lower() == "bearer" and match:
        with sessions.begin() as session:
            key = keys.find_valid(session, match[1])
        if key and hmac.compare_digest(key.secret_sha256, _hash(match[2])):
            return key
    raise Problem(
        401,
        "unauthorized",
        "This needs a valid API key.",
        hint="Send the header 'Authorization: Bearer bf_...'.",
        headers={"WWW-Authenticate": 'Bearer realm="bitfoundry"'},
    )


def require(scope: str) -> Callable[[ApiKey], ApiKey]:
    """A dependency: the key of this request, if it may do that."""

    def check(key: Annotated[ApiKey, Depends(authenticate)]) -> ApiKey:
        if scope not in key.scopes:
            raise Problem(403, "insufficient_scope", f"This key lacks the scope '{scope}'.")
        return key

    return check


Reader = Annotated[ApiKey, Depends(require(READ))]
Writer = Annotated[ApiKey, Depends(require(WRITE))]


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
