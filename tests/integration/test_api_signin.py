"""Browsers: a key becomes a cookie; what changes something needs more than the cookie; when a sign-in ends."""

import hashlib
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, text, update

from api.http.security import SIGN_IN_COOKIE, create_key
from api.main import create_app
from api.settings import Settings
from api.store.engine import Sessions
from api.store.tables.accounts import SignIn

JOB = "job_" + "0" * 32


@pytest.fixture
def key(sessions: Sessions) -> str:
    return create_key(sessions, "page")


@pytest.fixture
def browser(settings: Settings, key: str) -> Iterator[TestClient]:
    """A client without any key; it keeps cookies."""
    with TestClient(create_app(settings)) as browser:
        yield browser


def sign_in(browser: TestClient, key: str) -> str:
    answer = browser.post("/v1/sign-in", json={"api_key": key})
    assert answer.status_code == 201, answer.text
    return answer.json()["csrf_token"]


def test_with_the_cookie_every_route_is_open(browser: TestClient, key: str) -> None:
    assert browser.get("/v1/jobs").status_code == 401
    answer = browser.post("/v1/sign-in", json={"api_key": key})
    assert answer.status_code == 201
    assert answer.json()["key"]["name"] == "page"
    assert key not in answer.text
    assert answer.headers["cache-control"] == "no-store"
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{SIGN_IN_COOKIE}=")
    for part in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"):
        assert part in cookie
    assert "Secure" not in cookie
    assert browser.get("/v1/jobs").status_code == 200
    again = browser.get("/v1/sign-in").json()
    assert (again["csrf_token"], again["key"]["id"]) == (answer.json()["csrf_token"], key.split("_")[1])


def test_over_tls_the_cookie_stays_there(settings: Settings, key: str) -> None:
    with TestClient(create_app(settings), base_url="https://quant.example.org") as browser:
        answer = browser.post("/v1/sign-in", json={"api_key": key})
    assert "Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize("token", [None, "", "0" * 64, "é"])
def test_a_change_needs_the_token_too(token: str | None, browser: TestClient, key: str) -> None:
    csrf = sign_in(browser, key)
    path, body = "/v1/keys", {"name": "x", "scopes": ["jobs:read"]}
    headers = {} if token is None else {"X-CSRF-Token": token.encode()}
    refused = browser.post(path, json=body, headers=headers)
    assert refused.status_code == 403
    assert refused.json()["code"] == "csrf_token_missing"
    assert browser.post(path, json=body, headers={"X-CSRF-Token": csrf}).status_code == 201


def test_a_key_in_the_header_counts_more_than_the_cookie(browser: TestClient, key: str) -> None:
    sign_in(browser, key)
    assert browser.get("/v1/jobs", headers={"Authorization": "Bearer nonsense"}).status_code == 401
    body = {"name": "x", "scopes": ["jobs:read"]}
    assert browser.post("/v1/keys", json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 201


def test_what_is_no_key_opens_nothing(browser: TestClient, key: str) -> None:
    for wrong in ("", "bf_", key + "x", key[:-1] + ("a" if key[-1] != "a" else "b")):
        answer = browser.post("/v1/sign-in", json={"api_key": wrong})
        assert answer.status_code == 401, wrong
        assert "set-cookie" not in answer.headers
    form = browser.post("/v1/sign-in", content=f'{{"api_key": "{key}"}}', headers={"Content-Type": "text/plain"})
    assert form.status_code == 415  # what a form of another site could send


def test_signing_out_ends_it_in_the_service(browser: TestClient, key: str) -> None:
    csrf = sign_in(browser, key)
    cookie = browser.cookies[SIGN_IN_COOKIE]
    assert browser.delete("/v1/sign-in", headers={"X-CSRF-Token": csrf}).status_code == 204
    assert SIGN_IN_COOKIE not in browser.cookies
    browser.cookies.set(SIGN_IN_COOKIE, cookie)
    assert browser.get("/v1/jobs").status_code == 401


def test_a_sign_in_ends_with_its_time(browser: TestClient, key: str, sessions: Sessions) -> None:
    sign_in(browser, key)
    with sessions.begin() as session:
        session.execute(update(SignIn).values(expires_at=func.clock_timestamp()))
    assert browser.get("/v1/jobs").status_code == 401
    sign_in(browser, key)
    with sessions.begin() as session:
        assert session.scalar(select(func.count()).select_from(SignIn)) == 1  # the old one is gone


@pytest.mark.slow
def test_a_sign_in_ends_with_its_key(browser: TestClient, key: str) -> None:
    csrf = {"X-CSRF-Token": sign_in(browser, key)}
    key_id = key.split("_")[1]
    assert browser.post(f"/v1/keys/{key_id}/rotate", json={"overlap_s": 60}, headers=csrf).status_code == 200
    assert browser.get("/v1/jobs").status_code == 200  # the secret that was shown still works
    assert browser.post(f"/v1/keys/{key_id}/rotate", headers=csrf).status_code == 200
    assert browser.get("/v1/jobs").status_code == 401


def test_the_store_and_the_audit_log_hold_no_cookie(browser: TestClient, key: str, sessions: Sessions) -> None:
    sign_in(browser, key)
    cookie = browser.cookies[SIGN_IN_COOKIE]
    with sessions.begin() as session:
        row = session.scalars(select(SignIn)).one()
        assert row.token_sha256 == hashlib.sha256(cookie.encode()).digest()
        entries = str(session.execute(text("SELECT * FROM audit_entry WHERE action = 'key.sign_in'")).all())
    assert key.split("_")[1] in entries
    assert cookie not in entries
    assert key not in entries
