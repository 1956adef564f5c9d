"""An OpenID provider that lies, is slow or is gone, and browsers that are led astray: nobody gets in by it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from joserfc.jwk import OctKey
from sqlalchemy import func, select

from api.http.security import SIGN_IN_COOKIE
from api.main import create_app
from api.oidc import provider as oidc_provider
from api.settings import Settings
from api.store.engine import Sessions
from api.store.tables.accounts import SignIn
from api.store.tables.jobs import Member
from tests.support import lying_oidc
from tests.support.lying_oidc import CLIENT_ID, KEY, LyingProvider
from tests.support.oidc_settings import refused, start, with_oidc

SECRET = "the-secret-of-the-client"
HUGE = b'{"issuer": "' + b"x" * (oidc_provider.MAX_ANSWER_BYTES + 1) + b'"}'
FIRST = "/.well-known/openid-configuration"
PUBLIC_KEY = OctKey.import_key(json.dumps(KEY.as_dict(private=False)).encode())


@pytest.fixture
def liar() -> Iterator[LyingProvider]:
    with lying_oidc.serve() as provider:
        yield provider


@pytest.fixture
def browser(settings: Settings, sessions: Sessions, liar: LyingProvider, tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(create_app(with_oidc(settings, tmp_path, liar.issuer, CLIENT_ID, SECRET))) as browser:
        yield browser


def nobody_is_in(sessions: Sessions) -> bool:
    with sessions.begin() as session:
        return not any(session.scalar(select(func.count()).select_from(table)) for table in (SignIn, Member))


def test_the_truth_opens(browser: TestClient, liar: LyingProvider) -> None:
    """So the lies below are refused for what they are."""
    assert browser.post("/v1/sign-in/oidc/callback", json=liar.visit(start(browser))).status_code == 201


NOW = int(time.time())
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "another issuer": ({"claims": {"iss": "https://evil.example.org"}}, "iss"),
    "no issuer": ({"claims": {"iss": None}}, "iss"),
    "another audience": ({"claims": {"aud": "other-client"}}, "aud"),
    "another authorized party": ({"claims": {"aud": [CLIENT_ID, "other"], "azp": "other"}}, "azp"),
    "no authorized party": ({"claims": {"aud": [CLIENT_ID, "other"]}}, "azp"),
    "another nonce": ({"claims": {"nonce": "0" * 64}}, "nonce"),
    "no nonce": ({"claims": {"nonce": None}}, "nonce"),
    "expired": ({"claims": {"exp": NOW - 3600}}, "expired"),
    "no end": ({"claims": {"exp": None}}, "exp"),
    "an end that is no number": ({"claims": {"exp": True}}, "exp"),
    "from the future": ({"claims": {"iat": NOW + 36000, "exp": NOW + 72000}}, "future"),
    "no subject": ({"claims": {"sub": None}}, "sub"),
    "an empty subject": ({"claims": {"sub": ""}}, "sub"),
    "a subject with a line break": ({"claims": {"sub": "ada\nsigned in: boss"}}, "sub"),
    "another access token": ({"claims": {"at_hash": "AAAAAAAAAAAAAAAAAAAAAA"}}, "at_hash"),
    "another key": ({"key": lying_oidc.OTHER_KEY}, "bad_signature"),
    "an unknown key": ({"header": {"alg": "RS256", "kid": "two"}}, "kid"),
    "alg none": ({"make_token": lying_oidc.unsigned}, "none"),
    "the public key as a secret": ({"header": {"alg": "HS256", "kid": "one"}, "key": PUBLIC_KEY}, "HS256"),
    "an algorithm that was not announced": ({"header": {"alg": "PS256", "kid": "one"}}, "PS256"),
    "no token": ({"make_token": lambda claims: "x"}, "ID token"),
    "no claims": ({"make_token": lambda claims: lying_oidc.sign({}, {"alg": "RS256"}, KEY)}, "iss"),
    "only symmetric algorithms": ({"metadata": {"id_token_signing_alg_values_supported": ["HS256"]}}, "RS256"),
    "no algorithms": ({"metadata": {"id_token_signing_alg_values_supported": None}}, "RS256"),
    "no keys": ({"answers": {"/keys": (200, b'{"keys": []}')}}, "key"),
    "keys that are none": ({"answers": {"/keys": (200, b'{"keys": [1]}')}}, "keys"),
    "a huge answer": ({"answers": {"/keys": (200, HUGE)}}, "larger than"),
    "no JSON": ({"answers": {"/token": (200, b"<html>")}}, "no JSON"),
    "JSON without an end": ({"answers": {"/token": (200, b"[" * 100_000)}}, "no JSON"),
    "a redirect": ({"answers": {"/token": (302, b"http://127.0.0.1:1/")}}, "302"),
    "an error": ({"answers": {"/token": (400, b'{"error": "invalid_client"}')}}, "invalid_client"),
    "another person's userinfo": (
        {"claims": {"groups": None}, "answers": {"/me": (200, b'{"sub": "eve"}')}},
        "somebody",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_opens_nothing(
    lie: str, browser: TestClient, liar: LyingProvider, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    changes, why = LIES[lie]
    for name, value in changes.items():
        setattr(liar, name, value)
    detail = refused(browser, liar.visit(start(browser)), "sign_in_refused")
    assert why in detail and "Example ID" in detail and len(detail) < 600
    assert nobody_is_in(sessions)
    assert SECRET not in caplog.text and SECRET not in detail and "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"metadata": {"issuer": "https://evil.example.org"}}, "evil.example.org"),
        ({"metadata": {"issuer": None}}, "None"),
        ({"metadata": {"authorization_endpoint": "javascript:alert(1)"}}, "authorization_endpoint"),
        ({"metadata": {"token_endpoint": "http://internal.example.org/token"}}, "token_endpoint"),
        ({"metadata": {"jwks_uri": ["x"]}}, "jwks_uri"),
        ({"metadata": {"jwks_uri": "file:///etc/passwd"}}, "jwks_uri"),
        ({"answers": {FIRST: (404, b"nothing here")}}, "404"),
        ({"answers": {FIRST: (200, HUGE)}}, "larger than"),
        ({"answers": {FIRST: (200, b"[]")}}, "no JSON object"),
    ],
)
def test_a_browser_is_sent_nowhere_that_the_provider_should_not_name(
    changes: dict[str, Any], why: str, browser: TestClient, liar: LyingProvider
) -> None:
    for name, value in changes.items():
        setattr(liar, name, value)
    answer = browser.post("/v1/sign-in/oidc")
    assert (answer.status_code, answer.json()["code"]) == (403, "sign_in_refused"), answer.text
    assert why in answer.json()["detail"]
    assert not browser.cookies


@pytest.mark.parametrize("path", [FIRST, "/token", "/keys"])
def test_who_drips_is_waited_for_once(
    path: str, browser: TestClient, liar: LyingProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then, for ever: the limit is for all of an answer."""
    came_back = {} if path == FIRST else liar.visit(start(browser))
    monkeypatch.setattr(oidc_provider, "OIDC_S", 0.5)
    liar.drips_at = path
    where = "/v1/sign-in/oidc" + ("/callback" if came_back else "")
    answer = browser.post(where, json=came_back or None)
    assert (answer.status_code, answer.json()["code"]) == (503, "provider_unavailable"), answer.text
    assert "within" in answer.json()["detail"] and answer.headers["retry-after"]


def test_a_provider_that_is_gone_stops_nobody_with_a_key(
    settings: Settings, sessions: Sessions, tmp_path: Path
) -> None:
    gone = with_oidc(settings, tmp_path, "http://127.0.0.1:1", CLIENT_ID, SECRET)
    with TestClient(create_app(gone)) as browser:
        answer = browser.post("/v1/sign-in/oidc")
        assert (answer.status_code, answer.json()["code"]) == (503, "provider_unavailable")
        assert browser.get("/v1/sign-in/oidc").json() == {"name": "Example ID"}
        assert browser.post("/v1/sign-in", json={"api_key": "bf_x"}).status_code == 401


def test_a_forged_return_asks_the_provider_nothing(
    browser: TestClient, liar: LyingProvider, sessions: Sessions
) -> None:
    """Links with a code of somebody else, with and without an attempt of this browser; and the text of an error."""
    refused(browser, {"code": "c", "state": ""}, "sign_in_not_started")
    came_back = liar.visit(start(browser))
    number = liar.num_requests
    for state in ("", "0" * 64, came_back["state"][:-1], came_back["state"] + "0", "é"):
        refused(browser, {"code": "c", "state": state}, "sign_in_not_started")
        refused(browser, {"error": "visit evil.example.org", "state": state}, "sign_in_not_started")
    assert "another issuer" in refused(browser, came_back | {"iss": "https://evil.example.org"}, "sign_in_refused")
    state = {"state": came_back["state"]}
    assert "access_denied" in refused(browser, state | {"error": "access_denied"}, "sign_in_refused")
    assert "<b>" not in refused(browser, state | {"error": "a\n<b>"}, "sign_in_refused")
    assert liar.num_requests == number
    form = browser.post(
        "/v1/sign-in/oidc/callback", content=json.dumps(came_back), headers={"Content-Type": "text/plain"}
    )
    assert form.status_code == 415  # what a form of another site could send
    assert nobody_is_in(sessions)


def test_a_sign_in_never_keeps_a_cookie_that_was_there(browser: TestClient, liar: LyingProvider) -> None:
    """A session fixation: the cookie of a sign-in is made by the service, at each sign-in anew."""
    browser.cookies.set(SIGN_IN_COOKIE, "planted", domain="testserver.local", path="/")
    assert browser.post("/v1/sign-in/oidc/callback", json=liar.visit(start(browser))).status_code == 201
    first = browser.cookies[SIGN_IN_COOKIE]
    assert browser.post("/v1/sign-in/oidc/callback", json=liar.visit(start(browser))).status_code == 201
    assert len({"planted", first, browser.cookies[SIGN_IN_COOKIE]}) == 3


def test_the_cookie_of_an_attempt_stays_in_its_browser(settings: Settings, liar: LyingProvider, tmp_path: Path) -> None:
    secure = with_oidc(settings, tmp_path, liar.issuer, CLIENT_ID, SECRET)
    with TestClient(create_app(secure), base_url="https://quant.example.org") as browser:
        cookie = browser.post("/v1/sign-in/oidc").headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=strict", "Secure", "Max-Age=600"):
        assert part in cookie
    token = cookie.partition("=")[2].partition(";")[0]
    assert token not in (liar.nonce, liar.code_challenge)


def test_two_people_with_one_email_are_two_members(browser: TestClient, liar: LyingProvider) -> None:
    """The subject is who somebody is; an email says nothing."""
    first = browser.post("/v1/sign-in/oidc/callback", json=liar.visit(start(browser))).json()["key"]["member"]
    liar.claims = {"sub": "eve"}
    second = browser.post("/v1/sign-in/oidc/callback", json=liar.visit(start(browser))).json()["key"]["member"]
    assert first["id"] != second["id"]
    assert first["name"] == "ada@example.org" != second["name"]


def test_without_a_provider_there_is_no_such_sign_in(client: TestClient) -> None:
    del client.headers["Authorization"]
    assert client.get("/v1/sign-in/oidc").json() == {"name": None}
    for path, body in (("", None), ("/callback", {"code": "c", "state": "s"})):
        answer = client.post(f"/v1/sign-in/oidc{path}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (404, "oidc_not_configured")
