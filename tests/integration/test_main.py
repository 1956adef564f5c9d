"""The application as a whole."""

import gc
import weakref

from fastapi.testclient import TestClient

from api.http.security import create_key
from api.main import create_app
from api.settings import Settings
from api.store.engine import Sessions


def test_an_app_that_was_closed_leaves_the_memory(settings: Settings, sessions: Sessions) -> None:
    """FastAPI's caches keep thousands of endpoints. One that was made for an app would keep that as well: megabytes."""
    key = create_key(sessions, "test")

    def use_one() -> weakref.ref[object]:
        app = create_app(settings)
        with TestClient(app, headers={"Authorization": f"Bearer {key}"}) as client:
            for path in ("/v1/jobs", "/docs", "/openapi.json", "/ui/", "/healthz/ready"):
                assert client.get(path).status_code == 200
        return weakref.ref(app)

    used = use_one()
    gc.collect()
    assert used() is None
