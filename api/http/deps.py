"""The dependencies of endpoints. All of them are made once in ``create_app`` and live as long as the app.

There is no session dependency on purpose: an endpoint opens ``with sessions.begin()`` itself, so that the commit has
happened before the response is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from celery import Celery
from fastapi import Depends, Request

from api.http.errors import Problem
from api.http.event_stream import Feed
from api.http.rate_limit import RateLimiter
from api.http.turns import Turns
from api.oidc.provider import Provider
from api.readers import Readers
from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue.maintenance import Maintenance
from api.store.vault import Vault


@dataclass(frozen=True)
class Context:
    """The parts of the app that endpoints use. Files of data and models have turns of their own."""

    settings: Settings
    sessions: Sessions
    celery: Celery
    upkeep: Maintenance
    feed: Feed
    rates: RateLimiter
    readers: Readers
    provider: Provider | None
    turns: Turns = field(default_factory=Turns)
    model_turns: Turns = field(default_factory=Turns)

    def require_vault(self) -> Vault:
        """Return the vault that seals secrets. Raises Problem 409 if the operator has set no key."""
        vault = self.settings.vault
        if vault is None:
            raise Problem(
                409,
                "encryption_not_configured",
                "This service cannot store secrets: no encryption key is set.",
                hint="The operator must set BITFOUNDRY_SECRET_KEY_FILE (see docs/how-to/accounts.md).",
            )
        return vault


async def get_context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


ContextDep = Annotated[Context, Depends(get_context)]


async def get_sessions(context: ContextDep) -> Sessions:
    return context.sessions


SessionsDep = Annotated[Sessions, Depends(get_sessions)]
