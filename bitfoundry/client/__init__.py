"""The service's Python client: ``from bitfoundry.client import Client``. It loads no torch and no web framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitfoundry.client.answers import Job
from bitfoundry.client.model_answers import Sweep
from bitfoundry.client.service import Client

if TYPE_CHECKING:
    from bitfoundry.client.async_client import AsyncClient

__all__ = ["AsyncClient", "Client", "Job", "Sweep"]


def __getattr__(name: str) -> Any:
    """Load ``AsyncClient`` on first use: most programs need no greenlets."""
    if name != "AsyncClient":
        raise AttributeError(f"module 'bitfoundry.client' has no attribute '{name}'")
    from bitfoundry.client.async_client import AsyncClient

    return AsyncClient
