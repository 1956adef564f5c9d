"""The service's Python client: ``from bitfoundry.client import Client``. It loads no torch and no web framework."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitfoundry.client.answers import Job
    from bitfoundry.client.async_client import AsyncClient
    from bitfoundry.client.model_answers import Sweep
    from bitfoundry.client.service import Client

__all__ = ["AsyncClient", "Client", "Job", "Sweep"]

_MODULES = {"AsyncClient": "async_client", "Client": "service", "Job": "answers", "Sweep": "model_answers"}


def __getattr__(name: str) -> Any:
    """Load a class on first use: the commands start faster, and most programs need no greenlets."""
    if name not in _MODULES:
        raise AttributeError(f"module 'bitfoundry.client' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
