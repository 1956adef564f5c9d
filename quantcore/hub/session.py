"""The clients of the Hugging Face Hub: huggingface_hub's own, with a limit on every wait. It has none by itself."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from quantcore.config.time_limits import HUB_S, HUB_TRANSFER_S

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub import HfApi


def hub_api(token: str | None = None) -> HfApi:
    """Return a client of the Hub. Without ``token`` it uses that of this machine's user."""
    from huggingface_hub import HfApi

    limit_waits()
    return HfApi(token=token)


@cache
def limit_waits() -> None:
    """Make all calls of huggingface_hub in this process end in time. Call it before any."""
    from huggingface_hub import set_client_factory

    set_client_factory(make_client)


def make_client() -> httpx2.Client:
    """Return the client that huggingface_hub makes, with our limits."""
    import httpx2
    from huggingface_hub.utils._http import default_client_factory

    client = default_client_factory()
    client.timeout = httpx2.Timeout(HUB_TRANSFER_S, connect=HUB_S, pool=HUB_S)
    return client
