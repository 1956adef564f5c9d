"""Members of a project over HTTP, on the real database: people, their roles, and the keys that follow from them."""

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text
from sqlalchemy.orm import Session

from api.http import security
from api.http.security import ADMIN, CHAT, READ, WRITE, create_key
from api.keys.grants import check_not_locked_out
from api.main import create_app
from api.settings import Settings
from api.store.accounts.audit import Caller
from api.store.engine import Sessions
from tests.support.api import JOB, bearer, body

EVERYTHING = [READ, WRITE, CHAT, ADMIN]


def add(client: TestClient, name: str, role: str, **how: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a new member and the headers of the first key."""
    answer = client.post("/v1/members", json={"name": name, "role": role}, **how)
    assert answer.status_code == 201, answer.text
    return answer.json(), bearer(answer.json()["first_key"]["key"])


def keys_of(client: TestClient, member: dict[str, Any], **how: Any) -> list[dict[str, Any]]:
    every = client.get("/v1/keys", **how).json()["data"]
    return [key for key in every if key["member"] and key["member"]["id"] == member["id"]]


@pytest.fixture
def small(client: TestClient) -> tuple[dict[str, Any], dict[str, str]]:
    """A project with one member, an admin whose key alone can manage it: the member, the headers."""
    project = client.post("/v1/projects", json={"name": "small"}).json()["id"]
    wanted = {"name": "first", "scopes": EVERYTHING, "project_id": project}
    first = client.post("/v1/keys", json=wanted).json()
    member, headers = add(client, "Ada", "admin", headers=bearer(first["key"]))
    assert client.post(f"/v1/keys/{first['id']}/revoke", headers=headers).status_code == 200
    return member, headers


def test_a_member_from_the_first_day_to_the_last(client: TestClient, make_model: Callable[..., Path]) -> None:
    answer = client.post("/v1/members", json={"name": "Ada", "role": "editor"})
    made, key = answer.json(), answer.json()["first_key"]
    assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
    assert (key["name"], key["scopes"]) == ("Ada", [READ, WRITE, CHAT])
    headers, whose = bearer(key["key"]), {"id": made["id"], "name": "Ada"}
    assert client.get("/v1/keys/self", headers=headers).json()["member"] == whose
    job = client.post("/v1/jobs", json=body(make_model()), headers=headers).json()
    assert job["submitted_by"] == {"key_id": key["id"], "name": "Ada"}
    [shown] = client.get("/v1/members").json()["data"]
    assert (shown["id"], shown["role"], shown["num_keys"]) == (made["id"], "editor", 1)
    assert made["last_used_at"] is None and shown["last_used_at"]
    secret = key["key"].removeprefix(key["prefix"])
    for path in ("/v1/members", "/v1/keys", "/v1/audit"):
        assert secret not in client.get(path).text, path

    renamed = client.patch(f"/v1/members/{made['id']}", json={"name": "Ada L."}).json()
    assert (renamed["name"], renamed["role"]) == ("Ada L.", "editor")
    assert client.post("/v1/keys", json={"name": "laptop", "member_id": made["id"]}).status_code == 201
    assert client.get("/v1/members").json()["data"][0]["num_keys"] == 2

    assert client.delete(f"/v1/members/{made['id']}").status_code == 204
    assert client.get("/v1/jobs", headers=headers).status_code == 401
    assert client.get("/v1/members").json()["data"] == []
    ended = keys_of(client, made)
    assert len(ended) == 2 and all(key["revoked_at"] for key in ended)
    for method in ("PATCH", "DELETE"):
        gone = client.request(method, f"/v1/members/{made['id']}", json={"role": "viewer"})
        assert (gone.status_code, gone.json()["code"]) == (404, "member_not_found")
    entries = client.get("/v1/audit").json()["data"]
    [submission] = [entry for entry in entries if entry["key_id"] == key["id"]]
    assert (submission["object_id"], submission["member"]) == (job["id"], whose | {"name": "Ada L."})
    assert next(entry for entry in entries if entry["action"] == "member.remove")["member"] is None
    things = {made["id"], *(key["id"] for key in ended)}
    assert [entry["action"] for entry in entries if entry["object_id"] in things] == [
        "key.revoke", "key.revoke", "member.remove", "key.create", "member.edit", "key.create", "member.add",
    ]  # fmt: skip
    again, _ = add(client, "Ada L.", "viewer")  # the name is free
    assert again["id"] != made["id"]


def test_a_name_is_there_once(client: TestClient) -> None:
    add(client, "Ada", "viewer")
    grace, _ = add(client, "Grace", "viewer")
    for taken in (
        client.post("/v1/members", json={"name": "Ada", "role": "admin"}),
        client.patch(f"/v1/members/{grace['id']}", json={"name": "Ada"}),
    ):
        assert (taken.status_code, taken.json()["code"]) == (409, "name_taken")
    assert client.patch(f"/v1/members/{grace['id']}", json={"name": "Grace"}).status_code == 200
    assert [each["name"] for each in client.get("/v1/members").json()["data"]] == ["Ada", "Grace"]
    for wrong in (
        {"name": "", "role": "viewer"},
        {"name": "x", "role": "operator"},
        {"name": "a\nb", "role": "viewer"},
    ):
        assert client.post("/v1/members", json=wrong).status_code == 422, wrong


@pytest.mark.parametrize("role", security.ROLES)
def test_a_role_opens_what_it_says(role: str, client: TestClient) -> None:
    _, headers = add(client, "Ada", role)
    opened = {
        READ: client.get("/v1/jobs", headers=headers),
        WRITE: client.post("/v1/jobs", json={}, headers=headers),
        CHAT: client.post(f"/v1/jobs/{JOB}/chat", headers=headers),
        ADMIN: client.get("/v1/members", headers=headers),
    }
    assert {scope for scope, answer in opened.items() if answer.status_code != 403} == {*security.ROLES[role]}


def test_a_new_role_holds_from_the_next_request_on(client: TestClient, settings: Settings) -> None:
    """For a key, and for a browser that was signed in with it."""
    member, headers = add(client, "Ada", "editor")
    place = f"/v1/members/{member['id']}"
    with TestClient(create_app(settings)) as browser:
        signed_in = browser.post("/v1/sign-in", json={"api_key": member["first_key"]["key"]}).json()
        assert signed_in["key"]["member"]["name"] == "Ada"
        token = {"X-CSRF-Token": signed_in["csrf_token"]}
        asked = lambda: [  # noqa: E731
            client.post("/v1/jobs", json={}, headers=headers).status_code,
            browser.post("/v1/jobs", json={}, headers=token).status_code,
        ]
        assert asked() == [422, 422]
        assert client.patch(place, json={"role": "viewer"}).json()["role"] == "viewer"
        assert asked() == [403, 403]
        assert client.get("/v1/jobs", headers=headers).status_code == 200
        assert client.patch(place, json={"role": "admin"}).json()["role"] == "admin"
        assert asked() == [422, 422]
        assert client.get("/v1/members", headers=headers).status_code == 200
        assert browser.get("/v1/sign-in").status_code == 200
        assert client.delete(place).status_code == 204
        assert browser.get("/v1/sign-in").status_code == 401


def test_a_key_of_a_member_stays_within_the_role(client: TestClient, small: tuple[Any, dict[str, str]]) -> None:
    member, _ = add(client, "Ada", "editor")
    wanted = {"name": "k", "member_id": member["id"]}
    assert client.post("/v1/keys", json=wanted).json()["scopes"] == [READ, WRITE, CHAT]
    assert client.post("/v1/keys", json=wanted | {"scopes": [READ]}).json()["scopes"] == [READ]
    beyond = client.post("/v1/keys", json=wanted | {"scopes": [READ, ADMIN]})
    assert (beyond.status_code, beyond.json()["code"]) == (422, "scope_not_in_role")
    assert beyond.json()["errors"][0]["allowed"] == [READ, WRITE, CHAT]
    none = client.post("/v1/keys", json={"name": "k"})
    assert (none.status_code, none.json()["errors"][0]["pointer"]) == (422, "#/scopes")
    client.delete(f"/v1/members/{member['id']}")
    for stranger in (wanted, wanted | {"member_id": small[0]["id"]}):  # removed; of another project
        refused = client.post("/v1/keys", json=stranger)
        assert (refused.status_code, refused.json()["code"]) == (404, "member_not_found")
    assert len(keys_of(client, member)) == 3


def test_a_narrow_key_never_gains_by_a_new_role(client: TestClient) -> None:
    member, _ = add(client, "Ada", "admin")
    wanted = {"name": "narrow", "member_id": member["id"], "scopes": [READ, ADMIN]}
    narrow = client.post("/v1/keys", json=wanted).json()["id"]
    for role, whole, part in (
        ("editor", [READ, WRITE, CHAT], [READ]),
        ("admin", EVERYTHING, [READ]),
        ("admin", EVERYTHING, [READ]),
    ):
        assert client.patch(f"/v1/members/{member['id']}", json={"role": role}).status_code == 200
        scopes = {key["id"]: key["scopes"] for key in keys_of(client, member)}
        assert scopes == {member["first_key"]["id"]: whole, narrow: part}, role


def test_nobody_gives_a_role_with_more_than_he_has(client: TestClient, sessions: Sessions) -> None:
    lacking = bearer(create_key(sessions, "k", scopes=[READ, CHAT, ADMIN]))
    viewer, _ = add(client, "Ada", "viewer", headers=lacking)
    editor, _ = add(client, "Grace", "editor")
    for refused in (
        client.post("/v1/members", json={"name": "x", "role": "editor"}, headers=lacking),
        client.patch(f"/v1/members/{viewer['id']}", json={"role": "editor"}, headers=lacking),
        client.post("/v1/keys", json={"name": "x", "member_id": editor["id"]}, headers=lacking),
    ):
        assert (refused.status_code, refused.json()["code"]) == (403, "insufficient_scope")
        assert refused.json()["errors"][0]["allowed"] == [WRITE]
    assert [each["role"] for each in client.get("/v1/members").json()["data"]] == ["viewer", "editor"]
    assert [key["scopes"] for key in keys_of(client, viewer)] == [[READ]]
    client.post(f"/v1/keys/{viewer['first_key']['id']}/revoke")  # without a key the role is refused as well
    refused = client.patch(f"/v1/members/{viewer['id']}", json={"role": "editor"}, headers=lacking)
    assert refused.json()["code"] == "insufficient_scope"
    # to narrow is not to give
    assert client.patch(f"/v1/members/{editor['id']}", json={"role": "viewer"}, headers=lacking).status_code == 200


def test_nobody_gives_a_role_for_longer_than_his_own_key_lasts(client: TestClient) -> None:
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    ending = client.post("/v1/keys", json={"name": "k", "scopes": EVERYTHING, "expires_at": soon}).json()
    headers = bearer(ending["key"])
    lasting, _ = add(client, "Ada", "viewer")
    for refused in (
        client.post("/v1/members", json={"name": "x", "role": "viewer"}, headers=headers),
        client.patch(f"/v1/members/{lasting['id']}", json={"role": "editor"}, headers=headers),
    ):
        assert (refused.status_code, refused.json()["code"]) == (403, "expires_too_late")
    assert [key["scopes"] for key in keys_of(client, lasting)] == [[READ]]
    short = {"name": "Grace", "role": "viewer", "expires_at": soon}
    made = client.post("/v1/members", json=short, headers=headers)
    assert datetime.fromisoformat(made.json()["first_key"]["expires_at"]) == datetime.fromisoformat(soon)
    widened = client.patch(f"/v1/members/{made.json()['id']}", json={"role": "editor"}, headers=headers)
    assert widened.status_code == 200, widened.text
    past = client.post("/v1/members", json=short | {"name": "x", "expires_at": "2020-01-01T00:00:00Z"})
    assert (past.status_code, past.json()["errors"][0]["pointer"]) == (422, "#/expires_at")


def test_the_last_admin_stays(client: TestClient, sessions: Sessions, small: tuple[Any, dict[str, str]]) -> None:
    """Whoever could not be replaced is neither removed nor narrowed, and keeps the key. Expired keys do not count."""
    member, headers = small
    place, key = f"/v1/members/{member['id']}", f"/v1/keys/{member['first_key']['id']}"
    other, _ = add(client, "Grace", "admin", headers=headers)
    with sessions.begin() as session:
        session.execute(
            text("UPDATE api_key SET expires_at = clock_timestamp() WHERE id = :id"), {"id": other["first_key"]["id"]}
        )
    before = client.get("/v1/audit", headers=headers).json()["data"]
    for refused in (
        client.delete(place, headers=headers),
        client.patch(place, json={"role": "editor"}, headers=headers),
        client.post(f"{key}/revoke", headers=headers),
    ):
        assert (refused.status_code, refused.json()["code"]) == (409, "last_admin")
        assert "locked out" in refused.json()["detail"]
    assert client.get("/v1/audit", headers=headers).json()["data"] == before
    assert client.patch(place, json={"name": "Ada L.", "role": "admin"}, headers=headers).status_code == 200
    assert client.post("/v1/keys", json={"name": "k", "scopes": [ADMIN]}, headers=headers).status_code == 201
    assert client.delete(place, headers=headers).status_code == 204
    assert client.get("/v1/members", headers=headers).status_code == 401


@pytest.mark.parametrize("method", ["POST", "PATCH", "DELETE"])
def test_admins_who_end_each_other_at_once_leave_one(
    method: str, client: TestClient, small: tuple[Any, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By revoking keys, changing roles and removing members, even if both had made their change before they check."""
    admins = [small, add(client, "Grace", "admin", headers=small[1])]
    client.get("/v1/members", headers=admins[1][1])  # its use is noted: that would wait for the row of the key
    changed, codes = threading.Barrier(2), {}

    def check_together(session: Session, caller: Caller) -> None:
        with suppress(threading.BrokenBarrierError):
            changed.wait(timeout=1)  # the other one comes in this time, unless it waits for this one to end
        check_not_locked_out(session, caller)

    for module in ("keys", "members"):
        monkeypatch.setattr(f"api.{module}.endpoints.check_not_locked_out", check_together)

    def end(which: int) -> None:
        victim = admins[1 - which][0]
        place = f"/v1/keys/{victim['first_key']['id']}/revoke" if method == "POST" else f"/v1/members/{victim['id']}"
        narrow = {"role": "editor"} if method == "PATCH" else None
        codes[which] = client.request(method, place, json=narrow, headers=admins[which][1]).status_code

    threads = [threading.Thread(target=end, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [left] = [which for which in (0, 1) if client.get("/v1/members", headers=admins[which][1]).status_code == 200]
    assert codes[left] in (200, 204) and codes[1 - left] in (401, 403, 409)


def test_a_key_that_is_made_during_a_change_of_role_has_the_new_one(client: TestClient) -> None:
    """Of all orders in which both can happen, none leaves a key with more than the role."""
    for number in range(5):
        member, _ = add(client, f"number {number}", "admin")
        start = threading.Barrier(2)

        def narrow(member: Any = member, start: Any = start) -> None:
            start.wait()
            client.patch(f"/v1/members/{member['id']}", json={"role": "viewer"})

        thread = threading.Thread(target=narrow)
        thread.start()
        start.wait()
        client.post("/v1/keys", json={"name": "k", "member_id": member["id"]})
        thread.join()
        assert [key["scopes"] for key in keys_of(client, member)] == [[READ], [READ]]
