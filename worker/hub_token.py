"""The token for the Hub that a job or a publication uses. It is hidden in whatever the worker writes."""

from __future__ import annotations

from typing import Protocol

from huggingface_hub import get_token

from api.settings import Settings
from api.store.accounts import hub_tokens
from worker.redaction import Redactor


class Sealed(Protocol):
    """A lease of something that may name one of its project's tokens, which the lease brings sealed."""

    @property
    def project_id(self) -> str: ...

    @property
    def sealed_hub_token(self) -> bytes | None: ...


def find_hub_token(settings: Settings, lease: Sealed, name: str | None, redactor: Redactor) -> str | None:
    """Return the token called ``name``; without a name the service's own, None if it has none.

    Raises ModelError ``hub_token_not_found``.
    """
    if name is None:
        token = get_token()  # HF_TOKEN, or the file of `hf auth login`: the engine cannot read that itself
    else:
        token = hub_tokens.unseal(settings.vault, lease.sealed_hub_token, lease.project_id, name)
    if token is not None:
        redactor.hide(token)
    return token
