"""Signed-in browsers as rows. A row holds hashes only: whoever reads the table cannot sign in with it."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from api.store.accounts import keys
from api.store.accounts.audit import Shown
from api.store.accounts.keys import ValidKey
from api.store.tables.accounts import SignIn
from api.store.tables.jobs import ApiKey


def add(session: Session, token_sha256: bytes, key_id: str, secret_sha256: bytes, lasts_s: float) -> datetime:
    """Sign in with the key, opened with the secret of that hash, for ``lasts_s`` seconds. Returns the end.

    Sign-ins that are over are deleted at this occasion.
    """
    now = func.clock_timestamp()
    session.execute(delete(SignIn).where(SignIn.expires_at <= now))
    row = SignIn(
        token_sha256=token_sha256,
        api_key_id=key_id,
        secret_sha256=secret_sha256,
        expires_at=now + timedelta(seconds=lasts_s),
    )
    session.add(row)
    session.flush()
    session.refresh(row)
    return row.expires_at


def find_valid(session: Session, token_sha256: bytes) -> tuple[ValidKey, SignIn] | None:
    """Return (the key, the row) of a sign-in that is not over, if its key still opens with the same secret."""
    wanted = select(SignIn).where(SignIn.token_sha256 == token_sha256, SignIn.expires_at > func.clock_timestamp())
    row = session.scalar(wanted)
    key = keys.find_valid(session, row.api_key_id) if row else None
    if row is None or key is None or row.secret_sha256 not in key.secrets_sha256:
        return None
    return key, row


def find_open(session: Session, shown: Collection[Shown]) -> dict[Shown, frozenset[str]]:
    """Return those of ``shown`` that would still open a request, and the scopes that they open. Two queries at most."""
    valid = keys.find_all_valid(session, {credential.key_id for credential in shown})
    tokens = {credential.sign_in_sha256 for credential in shown if credential.sign_in_sha256 is not None}
    alive: set[bytes | None] = {None}  # a key shown by itself needs no sign-in
    if tokens:
        wanted = select(SignIn.token_sha256).where(SignIn.token_sha256.in_(tokens))
        alive.update(session.scalars(wanted.where(SignIn.expires_at > func.clock_timestamp())))
    return {
        credential: key.scopes
        for credential in shown
        if (key := valid.get(credential.key_id))
        and credential.secret_sha256 in key.secrets_sha256
        and credential.sign_in_sha256 in alive
    }


def switch(session: Session, token_sha256: bytes, new_token_sha256: bytes, key: ApiKey) -> None:
    """Continue a sign-in with another key of the same person, and with a new token. Its end stays the same."""
    session.execute(
        update(SignIn)
        .where(SignIn.token_sha256 == token_sha256)
        .values(token_sha256=new_token_sha256, api_key_id=key.id, secret_sha256=key.secret_sha256)
    )


def remove(session: Session, token_sha256: bytes) -> None:
    session.execute(delete(SignIn).where(SignIn.token_sha256 == token_sha256))
