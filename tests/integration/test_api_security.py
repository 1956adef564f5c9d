"""Who may do what, and what never leaves."""

import hashlib
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import text
from starlette.routing import BaseRoute

from api.http import security
from api.http.security import create_key
from api.main import create_app
from api.settings import Settings
from api.store.engine import Sessions
from tests.support.api import DOORS, JOB, OPEN_ROUTES, PLACES, SHARED_ROUTES, bearer, walk


def test_every_route_but_the_open_ones_wants_a_key(client: TestClient) -> None:
    app = client.app
    assert isinstance(app, FastAPI)
    client.headers.pop("Authorization")
    walked = list(walk(app))
    assert len(walked) >= 25
    for method, path in walked:
        answer = client.request(method, path.format(**PLACES))
        if (method, path) in DOORS:  # without a body, and without a provider
            assert answer.status_code in (404, 422) and "set-cookie" not in answer.headers, path
        elif path in OPEN_ROUTES:
            assert answer.status_code == 200, path
        elif path in SHARED_ROUTES:
            assert (answer.status_code, answer.json()["code"]) == (404, "share_not_found"), path
        else:
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.json()["code"] == "unauthorized"


def test_the_openapi_document_names_every_route(client: TestClient) -> None:
    """So the walk above has walked everything."""

    def leaves(routes: list[BaseRoute], prefix: str = "") -> Iterator[str]:
        for route in routes:
            path = prefix + getattr(route, "path", "")
            children = getattr(route, "routes", None)
            if children:
                yield from leaves(children, prefix)
            elif hasattr(route, "endpoint"):
                yield path

    app = client.app
    assert isinstance(app, FastAPI)
    documented = {path for _, path in walk(app)} | {"/openapi.json", "/docs", "/"}  # which leads to the dashboard
    assert {path.replace("{path:path}", "{path}") for path in leaves(app.routes)} <= documented


NO_KEYS = (
    "",
    "Bearer",
    "Bearer ",
    "Bearer x",
    "Basic {key}",
    "{key}",
    "Bearer {key}x",
    "Bearer bf_{id}_" + "A" * 43,
    "Bearer bf_000000000000_{secret}",
    "Bearer {key} {key}",
    "Bearer bf_{id}_",
    "Bearer é",
)


def test_keys_that_are_not_keys(subtests: pytest.Subtests, client: TestClient, sessions: Sessions) -> None:
    key = create_key(sessions, "k")
    _, key_id, secret = key.split("_", 2)
    for header in NO_KEYS:
        with subtests.test(header):
            value = header.format(key=key, id=key_id, secret=secret)
            assert client.get("/v1/presets", headers={"Authorization": value.encode()}).status_code == 401


def test_revoked_and_expired_keys(client: TestClient, sessions: Sessions) -> None:
    for column in ("revoked_at", "expires_at"):
        key = create_key(sessions, "k")
        assert client.get("/v1/presets", headers=bearer(key)).status_code == 200
        with sessions.begin() as session:
            session.execute(
                text(f"UPDATE api_key SET {column} = clock_timestamp() - interval '1 s' WHERE id = :id"),
                {"id": key.split("_")[1]},
            )
        assert client.get("/v1/presets", headers=bearer(key)).status_code == 401


def test_whoever_may_only_read_changes_nothing(client: TestClient, sessions: Sessions) -> None:
    reader = bearer(create_key(sessions, "reader", scopes=[security.READ]))
    assert isinstance(client.app, FastAPI)
    harmless = ("/v1/plans", "/v1/retention/preview", "/v1/sign-in", "/v1/sign-in/project")  # of a cookie's own
    harmless += tuple(path for _, path in DOORS)
    changing = [(method, path) for method, path in walk(client.app) if method != "GET" and path not in harmless]
    assert len(changing) >= 10
    for method, path in changing:
        answer = client.request(method, path.format(**PLACES), headers=reader)
        assert (answer.status_code, answer.json()["code"]) == (403, "insufficient_scope"), (method, path)


def test_scopes(client: TestClient, sessions: Sessions) -> None:
    reader = bearer(create_key(sessions, "reader", scopes=[security.READ]))
    assert client.get("/v1/jobs", headers=reader).status_code == 200
    for method, path in (("POST", "/v1/jobs"), ("POST", f"/v1/jobs/{JOB}/cancel")):
        answer = client.request(method, path, headers=reader)
        assert (answer.status_code, answer.json()["code"]) == (403, "insufficient_scope")
    writer = bearer(create_key(sessions, "writer", scopes=[security.WRITE]))
    assert client.get("/v1/jobs", headers=writer).status_code == 403
    with pytest.raises(ValueError, match="unknown scopes"):
        create_key(sessions, "k", scopes=["root"])


def test_only_the_hash_of_a_key_is_stored(sessions: Sessions, postgres_url: str) -> None:
    key = create_key(postgres_url, "by url")
    secret = key.split("_", 2)[2]
    with sessions.begin() as session:
        [row] = session.execute(text("SELECT * FROM api_key")).all()
    assert row.secret_sha256 == hashlib.sha256(secret.encode()).digest()
    assert secret not in repr(row)


def test_errors_and_logs_keep_secrets(client: TestClient, settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    canary = "hf_CANARYcanaryCANARYcanary"
    caplog.set_level(logging.DEBUG)
    for request in (
        {"model": {"path": "/x", "token": canary}, "config": {"preset": "fp8"}},
        {"model": {"id": canary + "/../x"}, "config": {"preset": "fp8"}},
        {"model": canary, "config": canary},
    ):
        answer = client.post("/v1/jobs", json=request, headers={"Authorization": client.headers["Authorization"]})
        assert answer.status_code == 422
        assert canary not in answer.text
    assert canary not in caplog.text
    assert client.headers["Authorization"] not in caplog.text
    assert settings.database_url.get_secret_value() not in repr(settings)


def test_a_database_that_is_away_is_503(broker_url: str, settings: Settings) -> None:
    away = settings.model_copy(
        update={"database_url": type(settings.database_url)("postgresql+psycopg://x@/x?host=/x")}
    )
    with TestClient(create_app(away), headers=bearer("bf_000000000000_" + "A" * 43)) as client:
        answer = client.get("/v1/jobs")
        assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
        assert int(answer.headers["retry-after"]) > 0
        assert "/x" not in answer.json()["detail"]
        assert client.get("/healthz/live").status_code == 200
        ready = client.get("/healthz/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "failed")


def test_a_bug_is_a_problem_without_a_traceback(settings: Settings, sessions: Sessions) -> None:
    app = create_app(settings)

    @app.get("/bug")
    def bug() -> None:
        raise RuntimeError("the password is 1234")

    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.get("/bug")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert answer.json()["request_id"].startswith("req_")
    assert "1234" not in answer.text


def test_readiness_is_degraded_without_a_broker(settings: Settings, sessions: Sessions) -> None:
    away = settings.model_copy(update={"broker_url": type(settings.broker_url)("redis+socket:///nowhere/valkey.sock")})
    with TestClient(create_app(away)) as client:
        ready = client.get("/healthz/ready")
    assert (ready.status_code, ready.json()) == (
        200,
        {"status": "degraded", "database": "ok", "broker": "unreachable", "schema": "current"}
        | {"disk": "ok", "sandbox": "off", "memory_limits": [], "integrity": {"damaged": 0, "missing": 0, "orphan": 0}},
    )
    with TestClient(create_app(settings)) as client:
        assert client.get("/healthz/ready").json()["status"] == "ok"


def test_the_api_leaves_torch_and_the_worker_unloaded() -> None:
    program = (
        "import sys, api.main; print(sorted({'torch', 'torch._C', 'worker', 'transformers'} & sys.modules.keys()))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
