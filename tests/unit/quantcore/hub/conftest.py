"""A stand-in of the Hub for one test."""

from collections.abc import Iterator

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.support.hub_server import HubServer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library waits seconds between its tries
        yield hub
        huggingface_hub.close_session()  # type: ignore[attr-defined]
