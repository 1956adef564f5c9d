"""The settings of a service that signs people in through an OpenID provider, and its requests."""

import json
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from pydantic import SecretStr

from api.settings import Settings

PUBLIC_URL = "https://bitfoundry.example.org"
REDIRECT_URI = f"{PUBLIC_URL}/ui/sign-in"
GRANTS = (
    {"claim": "groups", "value": "ml-team", "project": "default", "role": "editor"},
    {"claim": "groups", "value": "leads", "project": "default", "role": "admin"},
    {"claim": "groups", "value": "leads", "project": "search", "role": "viewer"},
    {"claim": "groups", "value": "platform", "project": "default", "role": "operator"},
    {"claim": "email", "value": "boss@example.org", "project": "default", "role": "admin"},
    {"claim": "groups", "value": "lost", "project": "gone", "role": "viewer"},
)


def with_oidc(settings: Settings, folder: Path, issuer: str, client_id: str, secret: str, **changes: Any) -> Settings:
    file = folder / "oidc.json"
    config = {"name": "Example ID", "issuer": issuer, "client_id": client_id, "grants": GRANTS}
    file.write_text(json.dumps(config | {"scopes": ["openid", "email", "groups"]} | changes))
    chosen = {"oidc_file": file, "oidc_client_secret": SecretStr(secret), "public_url": PUBLIC_URL}
    return settings.model_copy(update=chosen)


def start(browser: TestClient) -> str:
    """The provider's address; the browser has the cookie of the attempt."""
    answer = browser.post("/v1/sign-in/oidc")
    assert answer.status_code == 200, answer.text
    return str(answer.json()["authorization_url"])


def refused(browser: TestClient, came_back: dict[str, str], code: str, status: int = 403) -> str:
    """What the person reads who is not let in."""
    answer = browser.post("/v1/sign-in/oidc/callback", json=came_back)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert "bitfoundry_sign_in" not in browser.cookies
    assert "Traceback" not in answer.text and answer.json()["hint"]
    return str(answer.json()["detail"])
