"""Projects, keys, quotas, limits and the audit log over HTTP, on the real database."""

import hashlib
import ipaddress
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from api.http import security
from api.http.security import ADMIN, CHAT, OPERATOR, READ, WRITE, create_key
from api.main import create_app
from api.settings import Settings
from api.store.accounts import projects, shares
from api.store.engine import Sessions
from api.store.ids import new_id
from api.store.queue import leases, workers
from api.store.tables.chats import Chat
from tests.support.api import JOB, SHARED_ROUTES, bearer, limit, refused_for, walk

MakeModel = Callable[..., Path]
Submit = Callable[..., str]


def body(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"model": {"path": str(folder)}, "config": {"preset": "int8_dynamic"}, **changes}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"webhook_networks": (ipaddress.ip_network("127.0.0.0/8"),)})


@pytest.fixture
def other(client: TestClient) -> dict[str, str]:
    """The headers of a key that may do everything in a project of its own."""
    project = client.post("/v1/projects", json={"name": "other"}).json()
    made = client.post(
        "/v1/keys", json={"name": "k", "scopes": [READ, WRITE, CHAT, ADMIN], "project_id": project["id"]}
    ).json()
    return bearer(made["key"])


@pytest.fixture
def things(client: TestClient, make_model: MakeModel, sessions: Sessions) -> dict[str, str]:
    """One of each thing of the default project: path parameter -> id."""
    job = client.post("/v1/jobs", json=body(make_model())).json()
    sweep = {"job": body(make_model("b")), "matrix": {"/config/preset": ["fp8"]}}
    key = client.post("/v1/keys", json={"name": "k", "scopes": [READ]}).json()
    assert client.put("/v1/hub-tokens/team", json={"token": "hf_first"}).status_code == 200
    hook = client.post("/v1/webhooks", json=EXAMPLES["/v1/webhooks"]).json()["id"]
    rows = b"".join(b'{"text": "row %d of some"}\n' % number for number in range(8))
    dataset = client.post("/v1/datasets", files={"file": ("rows.jsonl", rows)}).json()
    upload = client.post("/v1/uploads", json={"filename": "rows.jsonl"}).json()
    with sessions.begin() as session:
        workers.beat(session, workers.Registration("host:1:0", "host", 1, memory_bytes=1), devices=[], live_s=60)
        soon = datetime.now(UTC) + timedelta(hours=1)
        chat = Chat(id=new_id("chat"), job_id=job["id"], project_id=projects.DEFAULT, max_new_tokens=1,
                    needs_memory_bytes=1, seq=1, waits_until=soon)  # fmt: skip
        session.add(chat)
        share = shares.add(session, job["id"], None, b"hash", 60)
    return {
        "worker_id": "host:1:0",
        "webhook_id": hook,
        "delivery_id": client.post(f"/v1/webhooks/{hook}/test").json()["id"],
        "name": "team",
        "job_id": job["id"],
        "chat_id": chat.id,
        "share_id": share.id,
        "sweep_id": client.post("/v1/sweeps", json=sweep).json()["id"],
        "path": "x",
        "key_id": key["id"],
        "member_id": client.post("/v1/members", json=EXAMPLES["/v1/members"]).json()["id"],
        "project_id": projects.DEFAULT,
        "dataset_id": dataset["id"],
        "upload_id": upload["id"],
        "number": "1",
    }


# one project never sees another


def test_a_thing_of_another_project_is_not_there(
    client: TestClient, other: dict[str, str], things: dict[str, str]
) -> None:
    """Every route with an id in it, the way that it was answered for the owner, and then for somebody else."""
    assert isinstance(client.app, FastAPI)
    routes = [(method, path) for method, path in walk(client.app) if "{" in path and path not in SHARED_ROUTES]
    assert len(routes) >= 20
    for method, path in sorted(routes, key=lambda route: route[0] == "DELETE"):
        if path.startswith((REGISTRY, "/v1/local-runs")):
            continue  # test_api_registry; local runs are no project's: test_api_local_runs
        place = path.format(**things)
        if path.endswith("/stream") or method == "PUT":
            continue  # a stream of a job that waits has no end: below; what is put is one's own
        asked = {"params": {"base": things["job_id"]} if path.endswith("/change") else None, "json": EXAMPLES.get(path)}
        foreign = client.request(method, place, headers=other | {"If-Match": "*"}, **asked)
        operators = path.startswith("/v1/workers") or (method, path) == ("PATCH", "/v1/projects/{project_id}")
        expected = (403,) if operators else (404,)
        assert foreign.status_code in expected, (method, path, foreign.text)
        own = client.request(method, place, headers={"If-Match": "*"}, **asked)
        assert own.status_code not in (401, 403, 404), (method, path, own.text)
    stream = client.get(f"/v1/jobs/{things['job_id']}/events/stream", headers=other)
    assert (stream.status_code, stream.json()["code"]) == (404, "job_not_found")


REGISTRY = "/v1/registry/"
EXAMPLES = {
    "/v1/chats/{chat_id}/turns": {"prompt": "x"},
    "/v1/jobs/{job_id}": {"priority": 3},
    "/v1/projects/{project_id}": {"max_running": 4},
    "/v1/hub-tokens/{name}": {"token": "hf_something"},
    "/v1/webhooks": {"url": "http://127.0.0.1:9/", "event_types": ["job.failed"]},
    "/v1/members": {"name": "Ada", "role": "editor"},
    "/v1/members/{member_id}": {"role": "viewer"},
    "/v1/webhooks/{webhook_id}": {"event_types": ["job.succeeded"]},
    "/v1/uploads/{upload_id}/complete": {"sha256": "0" * 64},
}


def test_lists_and_counts_are_the_projects_own(
    client: TestClient, other: dict[str, str], make_model: MakeModel
) -> None:
    sweep = {"job": body(make_model()), "matrix": {"/config/preset": ["fp8", "int8"]}}
    sweep_id = client.post("/v1/sweeps", json=sweep).json()["id"]
    assert client.get("/v1/jobs/summary").json()["total"] == 2
    assert client.get("/v1/jobs/summary", headers=other).json()["total"] == 0
    assert client.get("/v1/jobs", headers=other).json()["data"] == []
    assert client.get("/v1/jobs", params={"sweep": sweep_id}, headers=other).json()["data"] == []
    mine = client.post("/v1/jobs", json=body(make_model("c")), headers=other).json()
    assert [job["id"] for job in client.get("/v1/jobs", headers=other).json()["data"]] == [mine["id"]]
    assert mine["id"] not in client.get("/v1/jobs").text
    [own] = client.get("/v1/keys", headers=other).json()["data"]
    assert own["id"] == client.get("/v1/keys/self", headers=other).json()["id"]
    assert [each["name"] for each in client.get("/v1/projects", headers=other).json()["data"]] == ["other"]
    assert [each["name"] for each in client.get("/v1/projects").json()["data"]] == ["default", "other"]
    first = client.get("/v1/jobs", params={"limit": 1}).json()["next_cursor"]
    foreign = client.get("/v1/jobs", params={"limit": 1, "cursor": first}, headers=other)
    assert (foreign.status_code, foreign.json()["code"]) == (422, "invalid_cursor")


def test_what_was_there_before_projects_belongs_to_the_default_one(sessions: Sessions, postgres_url: str) -> None:
    from api.store import migrate

    migrate.downgrade(postgres_url, "0008")
    try:
        with sessions.begin() as session:
            session.execute(
                text("INSERT INTO api_key (id, name, secret_sha256, scopes) VALUES ('k', 'old', :h, :s)"),
                {"h": hashlib.sha256(b"x").digest(), "s": [READ, WRITE]},
            )
            session.execute(text("INSERT INTO sweep (id, matrix) VALUES ('swp_old', '{}')"))
            columns = "(id, submitted_by, labels, model, config, calibration, export, sweep_id)"
            values = "('job_old', 'k', '{}', '{}', '{}', '{}', '{}', 'swp_old')"
            session.execute(text(f"INSERT INTO job {columns} VALUES {values}"))
    finally:
        migrate.upgrade(postgres_url)
    with sessions.begin() as session:
        for table in ("api_key", "sweep", "job"):
            found = session.execute(text(f"SELECT project_id FROM {table}")).scalars().all()
            assert found == [projects.DEFAULT], table
        assert session.scalar(text("SELECT version FROM job")) == 1  # nothing moved for a client that polls


# keys


def test_a_key_from_its_making_to_its_end(client: TestClient, sessions: Sessions) -> None:
    answer = client.post("/v1/keys", json={"name": "ci", "scopes": [WRITE, READ]})
    made = answer.json()
    assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
    assert answer.headers["location"] == f"/v1/keys/{made['id']}"
    assert made["key"].startswith(made["prefix"]) and made["scopes"] == [READ, WRITE]
    first, secret = bearer(made["key"]), made["key"].removeprefix(made["prefix"])
    assert client.get("/v1/jobs", headers=first).status_code == 200
    for path in ("/v1/keys", f"/v1/keys/{made['id']}", "/v1/keys/self", "/v1/audit"):
        shown = client.get(path).text
        assert secret not in shown, path
    with sessions.begin() as session:
        rows = "".join(str(row) for row in session.execute(text("SELECT to_jsonb(k) FROM api_key k")))
    assert secret not in rows and hashlib.sha256(secret.encode()).hexdigest() in rows

    second = bearer(client.post(f"/v1/keys/{made['id']}/rotate", json={"overlap_s": 60}).json()["key"])
    for headers in (first, second):
        assert client.get("/v1/jobs", headers=headers).status_code == 200
    with sessions.begin() as session:
        session.execute(text("UPDATE api_key SET previous_until = clock_timestamp() WHERE previous_until IS NOT NULL"))
    assert [client.get("/v1/jobs", headers=headers).status_code for headers in (first, second)] == [401, 200]
    third = bearer(client.post(f"/v1/keys/{made['id']}/rotate").json()["key"])
    assert [client.get("/v1/jobs", headers=headers).status_code for headers in (second, third)] == [401, 200]

    revoked = client.post(f"/v1/keys/{made['id']}/revoke").json()
    assert revoked["revoked_at"]
    assert client.post(f"/v1/keys/{made['id']}/revoke").json() == revoked
    assert client.get("/v1/jobs", headers=third).status_code == 401
    again = client.post(f"/v1/keys/{made['id']}/rotate")
    assert (again.status_code, again.json()["code"]) == (409, "key_revoked")


def test_a_key_ends_at_its_time(client: TestClient, sessions: Sessions) -> None:
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    made = client.post("/v1/keys", json={"name": "k", "scopes": [READ], "expires_at": soon}).json()
    assert datetime.fromisoformat(made["expires_at"]) == datetime.fromisoformat(soon)
    assert client.get("/v1/jobs", headers=bearer(made["key"])).status_code == 200
    with sessions.begin() as session:
        session.execute(text("UPDATE api_key SET expires_at = clock_timestamp() WHERE name = 'k'"))
    assert client.get("/v1/jobs", headers=bearer(made["key"])).status_code == 401
    late = client.post("/v1/keys", json={"name": "k", "scopes": [READ], "expires_at": "2020-01-01T00:00:00Z"})
    assert (late.status_code, late.json()["errors"][0]["pointer"]) == (422, "#/expires_at")
    naive = client.post("/v1/keys", json={"name": "k", "scopes": [READ], "expires_at": "2030-01-01T00:00:00"})
    assert naive.status_code == 422


def test_use_is_noted_once_a_minute(client: TestClient, sessions: Sessions) -> None:
    made = client.post("/v1/keys", json={"name": "k", "scopes": [READ]}).json()
    assert made["last_used_at"] is None
    seen = set()
    for _ in range(3):
        seen.add(client.get("/v1/keys/self", headers=bearer(made["key"])).json()["last_used_at"])
    assert len(seen) == 1 and None not in seen
    with sessions.begin() as session:
        session.execute(text("UPDATE api_key SET last_used_at = clock_timestamp() - interval '61 s' WHERE name = 'k'"))
    seen.add(client.get("/v1/keys/self", headers=bearer(made["key"])).json()["last_used_at"])
    assert len(seen) == 2


def test_nobody_gives_more_than_he_has(client: TestClient, other: dict[str, str], sessions: Sessions) -> None:
    """An admin is no operator, not of another project either; and takes over no operator's key."""
    admin = bearer(create_key(sessions, "admin", scopes=[ADMIN]))
    operator = client.post("/v1/keys", json={"name": "op", "scopes": [OPERATOR, ADMIN]}).json()
    foreign = client.get("/v1/projects", headers=other).json()
    assert client.get("/v1/projects", headers=admin).json()["code"] == "insufficient_scope"
    [project] = [each["id"] for each in foreign["data"]]
    for refused in (
        client.post("/v1/keys", json={"name": "k", "scopes": [OPERATOR]}, headers=admin),
        client.post("/v1/keys", json={"name": "k", "scopes": [READ], "project_id": project}, headers=admin),
        client.post(f"/v1/keys/{operator['id']}/rotate", headers=admin),
        client.post(f"/v1/keys/{operator['id']}/revoke", headers=admin),
        client.post("/v1/projects", json={"name": "mine"}, headers=admin),
        client.patch(f"/v1/projects/{projects.DEFAULT}", json={"max_running": None}, headers=admin),
        client.get("/v1/audit", params={"project_id": "all"}, headers=admin),
    ):
        assert (refused.status_code, refused.json()["code"]) == (403, "insufficient_scope")
        assert refused.json()["errors"][0]["allowed"] == [OPERATOR]
    assert client.post("/v1/keys", json={"name": "k", "scopes": [ADMIN]}, headers=admin).status_code == 201


@pytest.mark.parametrize("scope", [READ, WRITE, OPERATOR])
def test_a_key_gives_no_scope_that_it_lacks(scope: str, client: TestClient, sessions: Sessions) -> None:
    """Neither by making a key nor by rotating one: the new secret is in the answer."""
    lacking = bearer(create_key(sessions, "k", scopes=[each for each in security.SCOPES if each != scope]))
    more = client.post("/v1/keys", json={"name": "more", "scopes": [ADMIN, scope]}).json()["id"]
    foreign = client.post("/v1/projects", json={"name": "foreign"}).json()["id"]
    for refused in (
        client.post("/v1/keys", json={"name": "k", "scopes": [ADMIN, scope]}, headers=lacking),
        client.post("/v1/keys", json={"name": "k", "scopes": [scope], "project_id": foreign}, headers=lacking),
        client.post(f"/v1/keys/{more}/rotate", headers=lacking),
    ):
        assert (refused.status_code, refused.json()["code"]) == (403, "insufficient_scope")
        assert refused.json()["errors"][0]["allowed"] == [scope]
    [still] = [each for each in client.get("/v1/keys").json()["data"] if each["id"] == more]
    assert still["rotated_at"] is None
    if scope != OPERATOR:  # to end is not to give
        assert client.post(f"/v1/keys/{more}/revoke", headers=lacking).status_code == 200


def test_a_key_gives_no_longer_life_than_its_own(client: TestClient) -> None:
    soon, later = (datetime.now(UTC) + timedelta(hours=hours) for hours in (1, 2))
    wanted = {"name": "k", "scopes": [ADMIN]}
    ending = client.post("/v1/keys", json=wanted | {"expires_at": soon.isoformat()}).json()
    headers = bearer(ending["key"])
    lasting = client.post("/v1/keys", json=wanted).json()["id"]
    for refused in (
        client.post("/v1/keys", json=wanted, headers=headers),
        client.post("/v1/keys", json=wanted | {"expires_at": later.isoformat()}, headers=headers),
        client.post(f"/v1/keys/{lasting}/rotate", headers=headers),
    ):
        assert (refused.status_code, refused.json()["code"]) == (403, "expires_too_late")
    assert client.post("/v1/keys", json=wanted | {"expires_at": soon.isoformat()}, headers=headers).status_code == 201
    assert client.post(f"/v1/keys/{ending['id']}/rotate", headers=headers).status_code == 200


@pytest.mark.parametrize("scope", security.SCOPES)
def test_a_missing_scope_is_named(scope: str, client: TestClient, sessions: Sessions) -> None:
    place = {
        READ: "/v1/jobs", WRITE: "/v1/jobs", CHAT: f"/v1/jobs/{JOB}/chat", ADMIN: "/v1/keys", OPERATOR: "/v1/projects",
    }[scope]  # fmt: skip
    lacking = bearer(create_key(sessions, "k", scopes=[each for each in security.SCOPES if each != scope]))
    method = "GET" if scope in (READ, ADMIN) else "POST"
    refused = client.request(method, place, headers=lacking)
    assert (refused.status_code, refused.json()["errors"][0]["allowed"]) == (403, [scope])
    assert scope in refused.json()["detail"]
    enough = bearer(create_key(sessions, "k", scopes=[scope]))
    assert client.request(method, place, headers=enough).status_code in (200, 404, 422)


# quotas and rates


def test_waiting_jobs_have_a_quota(client: TestClient, make_model: MakeModel, other: dict[str, str]) -> None:
    limit(client, max_waiting=2)
    asked = body(make_model())
    first, second = (client.post("/v1/jobs", json=asked).json()["id"] for _ in range(2))
    client.post(f"/v1/jobs/{first}/pause")
    assert refused_for(client.post("/v1/jobs", json=asked), "max_waiting")  # a pause makes no room
    assert refused_for(client.post("/v1/sweeps", json={"job": asked, "matrix": {"/priority": [1]}}), "max_waiting")
    assert client.post("/v1/jobs", json=asked, headers=other).status_code == 202
    client.post(f"/v1/jobs/{second}/cancel")
    assert client.post("/v1/jobs", json=asked).status_code == 202
    assert refused_for(client.post(f"/v1/jobs/{second}/retry"), "max_waiting")
    assert client.get(f"/v1/projects/{projects.DEFAULT}").json()["usage"]["num_waiting"] == 2
    limit(client, max_waiting=None)
    assert client.post(f"/v1/jobs/{second}/retry").status_code == 202


def test_a_sweep_that_does_not_fit_is_not_begun(client: TestClient, make_model: MakeModel) -> None:
    limit(client, max_waiting=2)
    sweep = {"job": body(make_model()), "matrix": {"/priority": [1, 2, 3]}}
    assert refused_for(client.post("/v1/sweeps", json=sweep), "max_waiting")
    assert client.get("/v1/jobs/summary").json()["total"] == 0


def test_many_at_once_do_not_pass_the_quota(client: TestClient, make_model: MakeModel) -> None:
    limit(client, max_waiting=3)
    asked = body(make_model())
    start, codes = threading.Barrier(8), []

    def send() -> None:
        start.wait()
        codes.append(client.post("/v1/jobs", json=asked).status_code)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [202] * 3 + [429] * 5


def test_stored_bytes_have_a_quota(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    asked = body(make_model())
    job_id = client.post("/v1/jobs", json=asked).json()["id"]
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
        assert lease
        leases.succeed(session, lease, manifest_sha256="m", path="/p", num_bytes=1000, summary={})
    limit(client, max_stored_bytes=1000)
    assert refused_for(client.post("/v1/jobs", json=asked), "max_stored_bytes")
    assert client.get(f"/v1/projects/{projects.DEFAULT}").json()["usage"]["stored_bytes"] == 1000
    client.delete(f"/v1/jobs/{job_id}")
    assert client.post("/v1/jobs", json=asked).status_code == 202


def test_running_jobs_have_a_quota(client: TestClient, other: dict[str, str], make_model: MakeModel,
                                   sessions: Sessions) -> None:  # fmt: skip
    """What does not fit waits, whatever its priority; other projects go by."""
    limit(client, max_running=1)
    asked = body(make_model(), priority=9)
    for _ in range(3):
        client.post("/v1/jobs", json=asked)
    foreign = client.post("/v1/jobs", json=asked | {"priority": 0}, headers=other).json()["id"]

    def claim() -> str | None:
        with sessions.begin() as session:
            lease = leases.claim(session, worker="w", lease_s=60)
        return lease and lease.job_id

    first = claim()
    assert first and first != foreign
    assert claim() == foreign
    assert claim() is None
    [next_one, *_] = client.get("/v1/jobs", params={"state": "queued"}).json()["data"]
    with sessions.begin() as session:
        workers.beat(session, workers.Registration("w", "h", 1, memory_bytes=10**12), devices=[], live_s=60)
    waiting = client.get(f"/v1/jobs/{next_one['id']}").json()["waiting_reason"]
    assert waiting == "the project has reached its limit of running jobs (1)"
    limit(client, max_running=2)
    assert claim()
    assert claim() is None


def test_many_claimers_do_not_pass_the_quota(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    limit(client, max_running=2)
    asked = body(make_model())
    for _ in range(6):
        client.post("/v1/jobs", json=asked)
    start, claimed = threading.Barrier(6), []

    def claim() -> None:
        start.wait()
        with sessions.begin() as session:
            claimed.append(leases.claim(session, worker="w", lease_s=60))

    threads = [threading.Thread(target=claim) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(lease is not None for lease in claimed) == 2


def test_requests_are_counted_and_end(client: TestClient, other: dict[str, str]) -> None:
    limit(client, requests_per_minute=40)
    allowed = client.get("/v1/jobs")
    assert allowed.headers["ratelimit-policy"] == '"requests";q=40;w=60'
    left = int(allowed.headers["ratelimit"].split("r=")[1].split(";")[0])
    for _ in range(2 * 40):  # a window may end on the way: then there is a second one to use up
        answer = client.get("/v1/presets")
        if answer.status_code == 429:
            break
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (429, "rate_limited")
    assert answer.headers["ratelimit"].startswith('"requests";r=0;t=')
    assert answer.headers["retry-after"] == answer.headers["ratelimit"].split("t=")[1]
    assert 0 < left < 40
    assert client.get("/v1/jobs", headers=other).status_code == 200
    assert client.get("/healthz/live").status_code == 200
    assert "ratelimit" not in client.get("/healthz/live").headers


def test_the_services_own_limit_is_for_projects_without_one(settings: Settings, sessions: Sessions) -> None:
    few = settings.model_copy(update={"requests_per_minute": 7})
    with TestClient(create_app(few), headers=bearer(create_key(sessions, "k"))) as client:
        answer = client.get("/v1/jobs")
        assert answer.headers["ratelimit-policy"] == '"requests";q=7;w=60'
        assert client.get("/v1/jobs", headers={"If-None-Match": answer.headers["etag"]}).headers["ratelimit"]


def test_processes_count_together_and_alone_without_a_broker(
    settings: Settings, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    key = bearer(create_key(sessions, "k"))
    few = settings.model_copy(update={"requests_per_minute": 10})
    with TestClient(create_app(few), headers=key) as first, TestClient(create_app(few), headers=key) as second:
        began = time.monotonic()
        statuses = [client.get("/v1/presets").status_code for _ in range(8) for client in (first, second)]
        usual_s = time.monotonic() - began
    assert statuses == [200] * 10 + [429] * 6
    away = few.model_copy(update={"broker_url": SecretStr("redis+socket:///nowhere/valkey.sock")})
    with TestClient(create_app(away), headers=key) as alone:
        began = time.monotonic()
        answers = [alone.get("/v1/presets").status_code for _ in range(25)]  # a minute may end on the way
        assert answers[0] == 200 and set(answers) == {200, 429}
        assert time.monotonic() - began < 5 + 10 * usual_s
    assert caplog.text.count("counted by each process for itself") == 1  # and not asked again at every request


# the audit log

EVERY_CHANGE = {
    ("POST", "/v1/jobs"): "job.submit",
    ("PATCH", "/v1/jobs/{job_id}"): "job.edit",
    ("POST", "/v1/jobs/{job_id}/clone"): "job.submit",
    ("POST", "/v1/jobs/{job_id}/pause"): "job.pause",
    ("POST", "/v1/jobs/{job_id}/resume"): "job.resume",
    ("POST", "/v1/jobs/{job_id}/cancel"): "job.cancel",
    ("POST", "/v1/jobs/{job_id}/retry"): "job.retry",
    ("POST", "/v1/sweeps"): "sweep.submit",
    ("POST", "/v1/sweeps/{sweep_id}/cancel"): "sweep.cancel",
    ("POST", "/v1/projects"): "project.create",
    ("PATCH", "/v1/projects/{project_id}"): "project.edit",
    ("POST", "/v1/keys"): "key.create",
    ("POST", "/v1/keys/{key_id}/rotate"): "key.rotate",
    ("POST", "/v1/keys/{key_id}/revoke"): "key.revoke",
    ("POST", "/v1/members"): "member.add",
    ("PATCH", "/v1/members/{member_id}"): "member.edit",
    ("DELETE", "/v1/members/{member_id}"): "member.remove",
    ("PUT", "/v1/hub-tokens/{name}"): "hub_token.put",
    ("DELETE", "/v1/hub-tokens/{name}"): "hub_token.delete",
    ("POST", "/v1/chats/{chat_id}/turns"): "chat.ask",
    ("DELETE", "/v1/chats/{chat_id}"): "chat.end",
    ("DELETE", "/v1/jobs/{job_id}"): "job.delete",
    ("POST", "/v1/workers/{worker_id}/drain"): "worker.drain",
    ("POST", "/v1/workers/{worker_id}/uncordon"): "worker.uncordon",
    ("POST", "/v1/webhooks"): "webhook.create",
    ("PATCH", "/v1/webhooks/{webhook_id}"): "webhook.edit",
    ("POST", "/v1/webhooks/{webhook_id}/test"): "webhook.test",
    ("POST", "/v1/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver"): "webhook.redeliver",
    ("DELETE", "/v1/webhooks/{webhook_id}"): "webhook.delete",
}
NO_CHANGE = {("POST", "/v1/plans"), ("POST", "/v1/retention/preview")}
ELSEWHERE = {  # test_publishing, test_shares, test_chats, test_api_signin, test_api_oidc, test_retention
    ("POST", "/v1/jobs/{job_id}/shares"), ("DELETE", "/v1/jobs/{job_id}/shares/{share_id}"),
    ("POST", "/v1/jobs/{job_id}/chat"),
    ("POST", "/v1/jobs/{job_id}/publish"), ("POST", "/v1/sign-in"), ("DELETE", "/v1/sign-in"),
    ("POST", "/v1/sign-in/oidc"), ("POST", "/v1/sign-in/oidc/callback"), ("POST", "/v1/sign-in/project"),
    ("PUT", "/v1/retention"), ("POST", "/v1/retention/run"),
}  # fmt: skip
UPLOAD = "/v1/uploads/{upload_id}"
OF_DATASETS = {  # what makes a dataset, or ends one: below. Parts of one that is not whole yet are no change
    ("POST", "/v1/datasets"), ("DELETE", "/v1/datasets/{dataset_id}"), ("POST", f"{UPLOAD}/complete"),
    ("POST", "/v1/uploads"), ("PUT", f"{UPLOAD}/parts/{{number}}"), ("DELETE", UPLOAD),
}  # fmt: skip


def test_every_change_leaves_an_entry(client: TestClient, things: dict[str, str], make_model: MakeModel) -> None:
    assert isinstance(client.app, FastAPI)
    walked = [route for route in walk(client.app) if not route[1].startswith(REGISTRY)]  # test_api_registry
    changing = {route for route in walked if route[0] != "GET"}
    assert changing == EVERY_CHANGE.keys() | NO_CHANGE | ELSEWHERE | OF_DATASETS
    asked = body(make_model("asked"))
    bodies = {"/v1/jobs": asked, "/v1/sweeps": {"job": asked, "matrix": {"/priority": [1]}}} | EXAMPLES
    bodies |= {"/v1/projects": {"name": "new"}, "/v1/keys": {"name": "k", "scopes": [READ]}}
    bodies |= {"/v1/members": {"name": "Grace", "role": "admin"}}
    own = client.get("/v1/keys/self").json()["id"]
    for (method, path), action in EVERY_CHANGE.items():
        if action == "job.delete":
            client.post(f"/v1/jobs/{things['job_id']}/cancel")
        answer = client.request(method, path.format(**things), json=bodies.get(path), headers={"If-Match": "*"})
        assert answer.is_success, (method, path, answer.text)
        found = client.get("/v1/audit", params={"project_id": "all", "action": action, "limit": 1}).json()["data"][0]
        assert (found["action"], found["key_id"]) == (action, own), (method, path)
        assert found["request_id"] == answer.headers["x-request-id"], (method, path)
        places = {"hub_token": "name", "webhook": "webhook_id", "worker": "worker_id", "chat": "chat_id"}
        places |= {"member": "member_id"}
        place = places.get(action.partition(".")[0])
        if place and action not in ("webhook.create", "member.add"):
            assert found["object_id"] == things[place]
        else:
            assert found["object_id"] == (answer.json()["id"] if answer.content else things["job_id"])
        assert datetime.now(UTC) - datetime.fromisoformat(found["at"]) < timedelta(minutes=1)


def test_datasets_leave_entries(client: TestClient, things: dict[str, str], other: dict[str, str]) -> None:
    rows = b'{"text": "one"}\n{"text": "two"}\n'
    digest = hashlib.sha256(rows).hexdigest()
    part = f"/v1/uploads/{things['upload_id']}/parts/1"
    assert client.put(part, params={"sha256": digest}, content=rows, headers=other).status_code == 404
    assert client.put(part, params={"sha256": digest}, content=rows).status_code == 200
    made = client.post(f"/v1/uploads/{things['upload_id']}/complete", json={"sha256": digest})
    assert made.status_code == 201, made.text
    assert client.delete(f"/v1/datasets/{made.json()['id']}").status_code == 204
    entries = client.get("/v1/audit", params={"limit": 100}).json()["data"]
    of_datasets = [entry for entry in entries if entry["action"].startswith("dataset.")]
    assert [(entry["action"], entry["object_id"]) for entry in of_datasets] == [
        ("dataset.delete", made.json()["id"]), ("dataset.upload", made.json()["id"]),
        ("dataset.upload", things["dataset_id"]),
    ]  # fmt: skip
    assert client.get("/v1/datasets", headers=other).json()["data"] == []
    asked = {"model": {"path": "/x"}, "config": {"preset": "fp8"}, "calibration": {"source": things["dataset_id"]}}
    refused = client.post("/v1/plans", json=asked, headers=other)
    assert (refused.status_code, refused.json()["code"]) == (422, "dataset_not_found")


def test_what_was_refused_leaves_none(client: TestClient, make_model: MakeModel) -> None:
    job_id = client.post("/v1/jobs", json=body(make_model())).json()["id"]
    before = client.get("/v1/audit").json()["data"]
    assert before and client.post(f"/v1/jobs/{job_id}/resume").status_code == 409
    assert client.post("/v1/jobs", json={}).status_code == 422
    assert client.get("/v1/audit").json()["data"] == before


def test_the_log_page_by_page_and_only_ones_own(client: TestClient, other: dict[str, str]) -> None:
    for number in range(5):
        client.post("/v1/keys", json={"name": str(number), "scopes": [READ]})
    names = []
    page = client.get("/v1/audit", params={"action": "key.create", "limit": 2})
    while True:
        names += [entry["detail"].get("name") for entry in page.json()["data"]]
        if not page.json()["has_more"]:
            break
        page = client.get(page.headers["link"].split(";")[0].strip("<>"))
    assert names == ["4", "3", "2", "1", "0", None]  # the last one is the operator's own, on the machine
    foreign = client.get("/v1/audit", headers=other).json()["data"]
    assert [entry["action"] for entry in foreign] == ["key.create", "project.create"]
    assert client.get("/v1/audit", params={"cursor": "x"}).status_code == 422


@pytest.mark.parametrize("change", ["UPDATE audit_entry SET action = 'nothing'", "DELETE FROM audit_entry"])
def test_the_log_is_only_added_to(change: str, sessions: Sessions) -> None:
    create_key(sessions, "k")
    with pytest.raises(IntegrityError, match="only added to"), sessions.begin() as session:
        session.execute(text(change))
