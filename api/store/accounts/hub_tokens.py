"""Hub tokens as rows: sealed, used by name, never shown."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.store.tables.accounts import HubToken
from api.store.vault import CannotOpen, Vault
from quantcore.errors import ModelError


def _about(project_id: str, name: str) -> str:
    """Return the place that a sealed token is bound to: it opens in its own row only."""
    return f"hub_token {project_id} {name}"


def put(session: Session, vault: Vault, project_id: str, name: str, token: str) -> HubToken:
    """Store the token under this name, in place of the one that was there."""
    sealed = vault.seal(token, _about(project_id, name))
    row = insert(HubToken).values(project_id=project_id, name=name, sealed=sealed)
    replaced = {"sealed": sealed, "updated_at": func.clock_timestamp()}
    keyed = row.on_conflict_do_update(index_elements=[HubToken.project_id, HubToken.name], set_=replaced)
    return session.scalars(keyed.returning(HubToken), execution_options={"populate_existing": True}).one()


def find_all(session: Session, project_id: str) -> Sequence[HubToken]:
    return session.scalars(select(HubToken).where(HubToken.project_id == project_id).order_by(HubToken.name)).all()


def find_sealed(session: Session, project_id: str, name: str) -> bytes | None:
    token = session.get(HubToken, (project_id, name))
    return None if token is None else token.sealed


def unseal(vault: Vault | None, sealed: bytes | None, project_id: str, name: str) -> str:
    """Return the token in plain text. Raises ModelError ``hub_token_not_found``."""
    why = "there is no token with this name"
    if sealed is not None and vault is None:
        why = "this process has no BITFOUNDRY_SECRET_KEY_FILE to decrypt it"
    elif sealed is not None and vault is not None:
        try:
            return vault.open(sealed, _about(project_id, name))
        except CannotOpen as error:
            why = str(error)
    raise ModelError(
        f"The project's Hub token '{name}' cannot be used: {why}.",
        code="hub_token_not_found",
        hint=f"Store one under this name: `bitfoundry hub-tokens put {name}`.",
        field="/model/hub_token",
    )


def remove(session: Session, project_id: str, name: str) -> bool:
    """Remove a token. Returns False if there is no token with this name."""
    gone = delete(HubToken).where(HubToken.project_id == project_id, HubToken.name == name)
    return session.scalar(gone.returning(HubToken.name)) is not None
