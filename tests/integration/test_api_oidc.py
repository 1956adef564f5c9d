"""Sign-in through a real OpenID provider: who gets in, with what rights, and when it ends."""

import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from api.http.security import SIGN_IN_COOKIE, create_key
from api.main import create_app
from api.settings import Settings
from api.store.engine import Sessions
from api.store.ids import new_id
from api.store.tables.accounts import AuditEntry
from api.store.tables.jobs import ApiKey, Project
from tests.support.api import bearer
from tests.support.oidc_settings import REDIRECT_URI, refused, start, with_oidc
from tests.support.real_oidc import CLIENT_ID, SECRET, RealProvider

ACCOUNTS = {
    "ada": {"email": "ada@example.org", "email_verified": True, "groups": ["ml-team"]},
    "lea": {"email": "lea@example.org", "email_verified": True, "groups": ["leads", "ml-team"]},
    "olga": {"email": "olga@example.org", "email_verified": True, "groups": ["platform"]},
    "mallory": {"email": "boss@example.org", "email_verified": False, "groups": ["guests"]},
    "zoe": {"email": "zoe@example.org", "email_verified": True},
    "nemo": {"email": "nemo@example.org", "email_verified": True, "groups": ["lost"]},
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealProvider]:
    with RealProvider(tmp_path_factory.mktemp("oidc"), REDIRECT_URI, {}) as provider:
        yield provider


@pytest.fixture
def provider(running: RealProvider) -> RealProvider:
    running.accounts = dict(ACCOUNTS)
    running.set_claims("ada")
    return running


@pytest.fixture
def browser(settings: Settings, sessions: Sessions, provider: RealProvider, tmp_path: Path) -> Iterator[TestClient]:
    """A browser that has opened the sign-in page. There are the projects `default` and `search`."""
    with sessions.begin() as session:
        session.add(Project(id=new_id("prj"), name="search"))
    with TestClient(create_app(with_oidc(settings, tmp_path, provider.issuer, CLIENT_ID, SECRET))) as browser:
        yield browser


def sign_in(browser: TestClient, provider: RealProvider, person: str) -> dict[str, str]:
    """Returns the header of requests that change something."""
    answer = browser.post("/v1/sign-in/oidc/callback", json=provider.sign_in(start(browser), person))
    assert answer.status_code == 201, answer.text
    return {"X-CSRF-Token": answer.json()["csrf_token"]}


def use_cookie(browser: TestClient, name: str, value: str) -> None:
    """The browser has this cookie and no other one."""
    browser.cookies.clear()
    browser.cookies.set(name, value)


def test_a_person_signs_in(
    browser: TestClient, provider: RealProvider, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole flow at a certified provider. The cookie is as with an API key; the audit log says who."""
    caplog.set_level(logging.DEBUG)
    assert browser.get("/v1/sign-in/oidc").json() == {"name": "Example ID"}
    url = start(browser)
    query = parse_qs(urlsplit(url).query)
    assert query["redirect_uri"] == [REDIRECT_URI] and query["code_challenge_method"] == ["S256"]
    assert query["scope"] == ["openid email groups"] and query["response_type"] == ["code"]
    came_back = provider.sign_in(url, "ada")
    caplog.clear()  # this process was the browser, too, and the code is in the address that it went to
    answer = browser.post("/v1/sign-in/oidc/callback", json=came_back)
    assert answer.status_code == 201, answer.text
    shown = answer.json()
    assert shown["key"]["scopes"] == ["jobs:read", "jobs:write", "jobs:chat"]
    assert shown["key"]["member"]["name"] == "ada@example.org"
    assert [project["name"] for project in shown["projects"]] == ["default"]
    cookie = next(text for text in answer.headers.get_list("set-cookie") if text.startswith(SIGN_IN_COOKIE))
    for part in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"):
        assert part in cookie
    assert "bitfoundry_oidc" not in browser.cookies  # the attempt is over
    body = {"name": "x", "to": "y"}
    assert browser.get("/v1/jobs").status_code == 200
    assert browser.post("/v1/jobs", json=body).json()["code"] == "csrf_token_missing"
    assert browser.get("/v1/sign-in").json() | {"key": 0} == shown | {"key": 0}
    with sessions.begin() as session:
        entry = session.scalars(select(AuditEntry).where(AuditEntry.action == "key.sign_in")).one()
    assert (entry.detail["subject"], entry.detail["email"]) == ("ada", "ada@example.org")
    assert browser.delete("/v1/sign-in", headers={"X-CSRF-Token": shown["csrf_token"]}).status_code == 204
    assert browser.get("/v1/jobs").status_code == 401
    for secret in (SECRET, came_back["code"], browser.cookies.get(SIGN_IN_COOKIE) or "no cookie"):
        assert secret not in caplog.text


def test_a_code_works_once_and_in_its_browser_alone(
    browser: TestClient, provider: RealProvider, settings: Settings, tmp_path: Path
) -> None:
    """A login CSRF: the page of a victim gets the code of the attacker's own sign-in."""
    came_back = provider.sign_in(start(browser), "ada")
    attempt = browser.cookies["bitfoundry_oidc"]
    with TestClient(create_app(with_oidc(settings, tmp_path, provider.issuer, CLIENT_ID, SECRET))) as victim:
        refused(victim, came_back, "sign_in_not_started")
        start(victim)
        refused(victim, came_back, "sign_in_not_started")
    assert browser.post("/v1/sign-in/oidc/callback", json=came_back).status_code == 201
    use_cookie(browser, "bitfoundry_oidc", attempt)
    assert "invalid_grant" in refused(browser, came_back, "sign_in_refused")


def test_rights_follow_the_claims_at_each_sign_in(
    browser: TestClient, provider: RealProvider, sessions: Sessions
) -> None:
    """More, less, and none: what a sign-in finds is all there is, in each project, at once."""
    sign_in(browser, provider, "lea")
    shown = browser.get("/v1/sign-in").json()
    assert shown["key"]["scopes"] == ["jobs:read", "jobs:write", "jobs:chat", "admin"]
    assert [project["name"] for project in shown["projects"]] == ["default", "search"]
    member = browser.get("/v1/members").json()["data"][0]
    assert (member["name"], member["role"]) == ("lea@example.org", "admin")

    before = browser.cookies[SIGN_IN_COOKIE]
    provider.set_claims("lea", groups=["ml-team"])
    sign_in(browser, provider, "lea")
    shown = browser.get("/v1/sign-in").json()
    assert shown["key"]["scopes"] == ["jobs:read", "jobs:write", "jobs:chat"]
    assert shown["key"]["member"]["id"] == member["id"]  # the same person, not a second one
    assert [project["name"] for project in shown["projects"]] == ["default"]
    use_cookie(browser, SIGN_IN_COOKIE, before)
    assert browser.get("/v1/members").status_code == 403  # the sign-in of before has lost it, too

    provider.set_claims("lea", groups=["other-team"])
    browser.cookies.clear()
    detail = refused(browser, provider.sign_in(start(browser), "lea"), "no_grant")
    assert "'groups' has other-team" in detail and "lea@example.org" in detail
    use_cookie(browser, SIGN_IN_COOKIE, before)
    assert browser.get("/v1/jobs").status_code == 401
    with sessions.begin() as session:
        assert session.scalars(select(ApiKey).where(ApiKey.revoked_at.is_(None))).all() == []


@pytest.mark.parametrize(
    ("person", "missing"),
    [
        ("zoe", "'groups' is missing"),
        ("mallory", "'groups' has guests"),  # boss@example.org is not verified
        ("nemo", "the project 'gone' of the operator's rules does not exist"),
    ],
)
def test_whoever_has_no_grant_reads_what_is_missing(
    person: str, missing: str, browser: TestClient, provider: RealProvider
) -> None:
    assert missing in refused(browser, provider.sign_in(start(browser), person), "no_grant")


def test_a_person_changes_the_project(browser: TestClient, provider: RealProvider, sessions: Sessions) -> None:
    """With a new cookie and CSRF token: a tab that still shows the other project changes nothing."""
    csrf = sign_in(browser, provider, "lea")
    shown = browser.get("/v1/sign-in").json()
    before, other = browser.cookies[SIGN_IN_COOKIE], shown["projects"][1]
    change = {"project_id": other["id"]}
    assert browser.post("/v1/sign-in/project", json=change).json()["code"] == "csrf_token_missing"
    changed = browser.post("/v1/sign-in/project", json=change, headers=csrf)
    assert changed.status_code == 200, changed.text
    assert (changed.json()["key"]["project_id"], changed.json()["key"]["scopes"]) == (other["id"], ["jobs:read"])
    assert changed.json()["expires_at"] == shown["expires_at"]
    assert browser.get("/v1/projects").json()["data"][0]["name"] == "search"
    assert browser.post("/v1/sign-in/project", json=change, headers=csrf).json()["code"] == "csrf_token_missing"
    fresh = {"X-CSRF-Token": changed.json()["csrf_token"]}
    assert browser.post("/v1/sign-in/project", json={"project_id": "prj_" + "7" * 32}, headers=fresh).status_code == 404
    use_cookie(browser, SIGN_IN_COOKIE, before)
    assert browser.get("/v1/jobs").status_code == 401
    key = bearer(create_key(sessions, "k"))
    browser.cookies.clear()
    assert browser.post("/v1/sign-in/project", json=change, headers=key).status_code == 401


def test_the_key_of_a_person_has_no_other_use(browser: TestClient, provider: RealProvider, sessions: Sessions) -> None:
    """No secret, no second key, no other role, and nothing that outlives the sign-in."""
    csrf = sign_in(browser, provider, "lea")
    own = browser.get("/v1/sign-in").json()["key"]
    member = own["member"]["id"]
    assert own["expires_at"] is not None
    for answer in (
        browser.post(f"/v1/keys/{own['id']}/rotate", headers=csrf),
        browser.post(
            "/v1/keys", json={"name": "k", "member_id": member, "expires_at": own["expires_at"]}, headers=csrf
        ),
        browser.patch(f"/v1/members/{member}", json={"role": "viewer"}, headers=csrf),
    ):
        assert (answer.status_code, answer.json()["code"]) == (409, "member_of_provider"), answer.text
    lasting = browser.post("/v1/keys", json={"name": "k", "scopes": ["jobs:read"]}, headers=csrf)
    assert (lasting.status_code, lasting.json()["code"]) == (403, "expires_too_late")
    key = bearer(create_key(sessions, "admin"))
    assert browser.delete(f"/v1/members/{member}", headers=key).status_code == 204
    assert browser.get("/v1/jobs").status_code == 401
    sign_in(browser, provider, "lea")  # the provider still says so
    assert browser.get("/v1/sign-in").json()["key"]["member"]["id"] == member


def test_an_admin_takes_nothing_from_an_operator(
    browser: TestClient, provider: RealProvider, sessions: Sessions
) -> None:
    sign_in(browser, provider, "olga")
    own = browser.get("/v1/sign-in").json()["key"]
    assert own["scopes"][-1] == "operator"
    assert browser.get("/v1/workers").status_code == 200
    admin = bearer(create_key(sessions, "admin", ["jobs:read", "admin"]))
    answer = browser.delete(f"/v1/members/{own['member']['id']}", headers=admin)
    assert (answer.status_code, answer.json()["code"]) == (403, "insufficient_scope")


def test_new_keys_of_the_provider_are_found(browser: TestClient, provider: RealProvider) -> None:
    sign_in(browser, provider, "ada")
    provider.stop()
    away = browser.post("/v1/sign-in/oidc/callback", json={"code": "x", "state": "y"})
    assert away.json()["code"] == "sign_in_not_started"
    start(browser)  # its description is still known
    provider.start()
    sign_in(browser, provider, "ada")
    assert browser.get("/v1/jobs").status_code == 200
