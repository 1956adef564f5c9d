"""The service from Python: ``from bitfoundry.client import Client``. Light: no torch, no web framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitfoundry.client.answers import Job, Sweep
from bitfoundry.client.service import Client

if TYPE_CHECKING:
    from bitfoundry.client.async_client import AsyncClient

__all__ = ["AsyncClient", "Client", "Job", "Sweep"]


def __getattr__(name: str) -> Any:
    """Load ``AsyncClient`` when it is asked for: most programs do without greenlets."""
    if name != "AsyncClient":
        raise AttributeError(f"module 'bitfoundry.client' has no attribute '{name}'")
    from bitfoundry.client.async_client import AsyncClient

    return AsyncClient
