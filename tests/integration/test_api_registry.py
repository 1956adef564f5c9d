"""The model registry over HTTP, on the real database: versions, aliases, and who may move a protected one."""

import ipaddress
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.http.security import ADMIN, CHAT, READ, WRITE, create_key
from api.jobs.retention_task import RetentionTask
from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import leases
from tests.support.api import JOB, bearer, walk

MODELS = "/v1/registry/models"
REQUESTS = "/v1/registry/requests"
BOT = f"{MODELS}/support-bot"
SUMMARY = {
    "verdict": {"level": "good", "reason": "close"},
    "size_before_bytes": 20,
    "size_after_bytes": 5,
    "kl_mean": 0.02,
}
Headers = dict[str, str]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"webhook_networks": (ipaddress.ip_network("127.0.0.0/8"),)})


@pytest.fixture
def succeed(settings: Settings, sessions: Sessions, submit: Callable[..., str]) -> Callable[..., str]:
    """``succeed(days_ago=40)``: the id of a job that succeeded so long ago, with a folder of its own."""

    def make(days_ago: float = 0, **asked: Any) -> str:
        job_id = submit(**asked)
        folder = settings.artifacts_dir / job_id / "sha"
        folder.mkdir(parents=True)
        with sessions.begin() as session:
            lease = leases.claim(session, worker="w", lease_s=60)
            assert lease and lease.job_id == job_id
            result: dict[str, Any] = {"manifest_sha256": job_id[4:] * 2, "num_bytes": 5, "summary": SUMMARY}
            leases.succeed(session, lease, path=str(folder), **result)
            ended = text("UPDATE job SET finished_at = finished_at - :days * interval '1 day' WHERE id = :id")
            session.execute(ended, {"id": job_id, "days": days_ago})
        return job_id

    return make


@pytest.fixture
def bot(client: TestClient, succeed: Callable[..., str]) -> list[str]:
    """The jobs of the versions 1 and 2 of support-bot."""
    job_ids = [succeed(), succeed()]
    assert [add(client, job_id)["version"] for job_id in job_ids] == [1, 2]
    return job_ids


@pytest.fixture
def people(client: TestClient) -> dict[str, Headers]:
    """The headers of Ada and Grace, who are admins, and of Edith, an editor."""
    keys = {}
    for name, role in (("Ada", "admin"), ("Grace", "admin"), ("Edith", "editor")):
        answer = client.post("/v1/members", json={"name": name, "role": role})
        keys[name] = bearer(answer.json()["first_key"]["key"])
    return keys


def add(client: TestClient, job_id: str, name: str = "support-bot", **how: Any) -> dict[str, Any]:
    answer = client.post(f"{MODELS}/{name}/versions", json={"job_id": job_id}, **how)
    assert answer.status_code == 201, answer.text
    return answer.json()  # type: ignore[no-any-return]


def ask(client: TestClient, version: int | None = 2, alias: str = "production", **how: Any) -> dict[str, Any]:
    wanted = {"alias": alias, "version": version, "reason": "It is better."}
    answer = client.post(f"{BOT}/requests", json=wanted, **how)
    assert answer.status_code == 201, answer.text
    return answer.json()  # type: ignore[no-any-return]


def decide(client: TestClient, request: dict[str, Any], how: str, headers: Headers, **body: Any) -> Any:
    return client.post(f"{REQUESTS}/{request['id']}/{how}", json=body, headers=headers)


def code(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def aliases(client: TestClient) -> dict[str, int]:
    return {each["alias"]: each["version"] for each in client.get(BOT).json()["aliases"]}


def test_a_version_is_the_result_of_a_job(client: TestClient, succeed: Callable[..., str]) -> None:
    job_id = succeed(name="nightly")
    answer = client.post(f"{BOT}/versions", json={"job_id": job_id})
    made = answer.json()
    assert (answer.status_code, answer.headers["location"]) == (201, f"{BOT}/versions/1")
    shown = {name: made[name] for name in ("model", "version", "job_id", "name", "verdict", "bytes", "sha256")}
    assert shown == {"model": "support-bot", "version": 1, "job_id": job_id, "name": "nightly"} | {
        "verdict": "good", "bytes": 5, "sha256": job_id[4:] * 2,
    }  # fmt: skip
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert (made["sha256"], made["export"]) == (job["artifact"]["manifest_sha256"], job["export"])
    again = client.post(f"{BOT}/versions", json={"job_id": job_id})
    assert (again.status_code, again.json()) == (200, made)
    second = add(client, succeed())
    listed = client.get(f"{BOT}/versions", params={"limit": 1})
    assert listed.json() == {"data": [second], "has_more": True, "next_cursor": 2}
    assert client.get(listed.headers["link"].partition(">")[0][1:]).json()["data"] == [made]
    assert client.get(f"{BOT}/versions", headers={"If-None-Match": listed.headers["etag"]}).status_code == 200
    unchanged = {"If-None-Match": client.get(f"{BOT}/versions").headers["etag"]}
    assert client.get(f"{BOT}/versions", headers=unchanged).status_code == 304

    assert client.delete(f"{BOT}/versions/2").status_code == 204
    assert add(client, succeed())["version"] == 3  # no number is given twice
    entries = client.get("/v1/audit", params={"object_id": "support-bot@1"}).json()["data"]
    assert [(entry["action"], entry["detail"]) for entry in entries] == [("registry.add", {"job_id": job_id})]


def test_only_a_result_can_be_a_version(client: TestClient, submit: Callable[..., str]) -> None:
    answer = client.post(f"{BOT}/versions", json={"job_id": submit()})
    assert code(answer) == (409, "not_ready") and "queued" in answer.json()["detail"]
    assert code(client.post(f"{BOT}/versions", json={"job_id": JOB})) == (404, "job_not_found")
    assert code(client.post(f"{MODELS}/Support Bot/versions", json={"job_id": JOB}))[0] == 422
    assert client.get(MODELS).json()["data"] == []


def test_an_alias_points_to_one_version(client: TestClient, bot: list[str]) -> None:
    for version in (1, 2):
        answer = client.put(f"{BOT}/aliases/candidate", json={"version": version})
        assert answer.status_code == 200, answer.text
    [alias] = answer.json()["aliases"]
    assert (alias["alias"], alias["version"], alias["protected"]) == ("candidate", 2, False)
    assert client.get(f"{BOT}/versions/candidate").json()["job_id"] == bot[1]
    assert client.get(f"{BOT}/versions/2").json()["aliases"] == ["candidate"]
    missing = client.get(f"{BOT}/versions/prod")
    assert code(missing) == (404, "alias_not_found") and "candidate" in missing.json()["hint"]
    assert code(client.put(f"{BOT}/aliases/candidate", json={"version": 7})) == (404, "version_not_found")
    for alias_name in ("Candidate", "2", "a b"):
        assert client.put(f"{BOT}/aliases/{alias_name}", json={"version": 1}).status_code == 422
    used = client.delete(f"{BOT}/versions/2")
    assert code(used) == (409, "in_use") and "candidate" in used.json()["detail"]
    assert code(client.delete(BOT)) == (409, "in_use")
    assert client.delete(f"{BOT}/aliases/candidate").status_code == 204
    assert code(client.delete(f"{BOT}/aliases/candidate")) == (404, "alias_not_found")
    moves = client.get("/v1/audit", params={"object_id": "support-bot@candidate"}).json()["data"]
    assert [(move["detail"]["from_version"], move["detail"]["version"]) for move in moves] == [
        (2, None), (1, 2), (None, 1),
    ]  # fmt: skip
    assert client.delete(BOT).status_code == 204
    assert code(client.get(BOT)) == (404, "model_not_registered")
    assert client.get(f"/v1/jobs/{bot[0]}").status_code == 200


def test_models_are_listed_by_name(client: TestClient, succeed: Callable[..., str]) -> None:
    job_id = succeed()
    for name in ("b", "a", "c"):
        add(client, job_id, name)
    names, path = [], f"{MODELS}?limit=1"
    while path:
        page = client.get(path)
        names += [model["name"] for model in page.json()["data"]]
        path = page.headers.get("link", "").partition(">")[0][1:]
    assert names == ["a", "b", "c"]


def test_models_and_requests_have_the_verdict_of_their_version(
    client: TestClient, sessions: Sessions, bot: list[str], people: dict[str, Headers]
) -> None:
    judge = text("UPDATE job SET summary = jsonb_set(summary, '{verdict,level}', CAST(:level AS jsonb)) WHERE id = :id")
    with sessions.begin() as session:
        session.execute(judge, {"id": bot[0], "level": '"broken"'})
    add(client, bot[0], "another")

    def verdicts() -> dict[str, str | None]:
        return {each["name"]: each["latest_verdict"] for each in client.get(MODELS).json()["data"]}

    assert verdicts() == {"another": "broken", "support-bot": "good"}
    assert client.get(BOT).json()["latest_verdict"] == "good"
    old = ask(client, 1)
    assert old["verdict"] == "broken" == client.get(REQUESTS).json()["data"][0]["verdict"]
    assert decide(client, old, "approve", people["Ada"]).json()["verdict"] == "broken"
    removal = ask(client, None)
    assert removal["verdict"] is None
    with sessions.begin() as session:
        session.execute(text("UPDATE job SET summary = summary - 'verdict' WHERE id = :id"), {"id": bot[1]})
    assert verdicts() == {"another": "broken", "support-bot": None}
    assert client.delete(f"{MODELS}/another/versions/1").status_code == 204
    assert verdicts()["another"] is None  # it has no version


def test_another_member_approves(client: TestClient, bot: list[str], people: dict[str, Headers]) -> None:
    direct = client.put(f"{BOT}/aliases/production", json={"version": 1}, headers=people["Ada"])
    assert code(direct) == (409, "alias_protected")
    assert code(client.delete(f"{BOT}/aliases/production", headers=people["Ada"])) == (409, "alias_protected")
    request = ask(client, headers=people["Edith"])
    assert (request["from_version"], request["to_version"], request["state"]) == (None, 2, "pending")
    assert request["asked_by"]["member"]["name"] == "Edith" and aliases(client) == {}
    wanted = {"alias": "production", "version": 2, "reason": "It is better."}
    again = client.post(f"{BOT}/requests", json=wanted, headers=people["Edith"])
    assert (again.status_code, again.json()) == (200, request)
    other = client.post(f"{BOT}/requests", json=wanted | {"version": 1}, headers=people["Ada"])
    assert code(other) == (409, "request_pending") and request["id"] in other.json()["detail"]
    assert code(client.delete(f"{BOT}/versions/2")) == (409, "in_use")
    assert client.get(BOT).json()["num_pending"] == 1

    approved = decide(client, request, "approve", people["Grace"], comment="Tried it.")
    assert approved.status_code == 200, approved.text
    assert (approved.json()["state"], approved.json()["comment"]) == ("approved", "Tried it.")
    assert approved.json()["decided_by"]["member"]["name"] == "Grace"
    assert aliases(client) == {"production": 2}
    for how in ("approve", "refuse"):
        assert code(decide(client, request, how, people["Grace"])) == (409, "request_decided")
    entries = client.get("/v1/audit", params={"object_id": "support-bot@production"}).json()["data"]
    assert [(entry["action"], entry["member"]["name"]) for entry in entries] == [
        ("registry.move_alias", "Grace"), ("registry.approve", "Grace"), ("registry.request", "Edith"),
    ]  # fmt: skip
    same = client.post(f"{BOT}/requests", json=wanted)
    assert code(same) == (409, "nothing_to_move")

    removal = ask(client, None, headers=people["Ada"])
    assert (removal["from_version"], removal["to_version"]) == (2, None)
    assert decide(client, removal, "approve", people["Grace"]).status_code == 200
    assert aliases(client) == {}


def test_nobody_approves_what_they_asked_for(
    client: TestClient, sessions: Sessions, bot: list[str], people: dict[str, Headers]
) -> None:
    request = ask(client, headers=people["Ada"])
    ada = client.get("/v1/keys/self", headers=people["Ada"]).json()["member"]["id"]
    made = client.post("/v1/keys", json={"name": "laptop", "member_id": ada}, headers=people["Ada"])
    laptop = bearer(made.json()["key"])  # another key of the same person
    program = bearer(create_key(sessions, "pipeline", (READ, WRITE, CHAT, ADMIN)))
    for how in ("approve", "refuse"):
        assert code(decide(client, request, how, people["Ada"])) == (403, "own_request")
        assert code(decide(client, request, how, laptop)) == (403, "own_request")
        assert code(decide(client, request, how, program)) == (403, "member_required")
        assert code(decide(client, request, how, people["Edith"])) == (403, "insufficient_scope")
    assert code(decide(client, request, "withdraw", people["Grace"])) == (403, "not_your_request")
    grant = {"name": "x", "scopes": [ADMIN]}
    assert code(client.post("/v1/keys", json=grant, headers=people["Edith"])) == (403, "insufficient_scope")
    protected = {"aliases": []}
    unprotect = client.put("/v1/registry/protected-aliases", json=protected, headers=people["Edith"])
    assert code(unprotect) == (403, "insufficient_scope")
    assert aliases(client) == {}
    withdrawn = decide(client, request, "withdraw", laptop)
    assert withdrawn.json()["state"] == "withdrawn" and aliases(client) == {}
    asked = ask(client, headers=program)
    assert asked["asked_by"]["member"] is None
    refused = decide(client, asked, "refuse", people["Ada"], comment="Not before Monday.").json()
    assert (refused["state"], refused["comment"]) == ("refused", "Not before Monday.") and aliases(client) == {}


def test_of_two_approvals_at_once_one_wins(client: TestClient, bot: list[str], people: dict[str, Headers]) -> None:
    request = ask(client, headers=people["Edith"])
    ready, answers = threading.Barrier(2), []

    def approve(headers: Headers) -> None:
        ready.wait()
        answers.append(decide(client, request, "approve", headers))

    threads = [threading.Thread(target=approve, args=(people[name],)) for name in ("Ada", "Grace")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    entries = client.get("/v1/audit", params={"action": "registry.move_alias"}).json()["data"]
    assert len(entries) == 1 and aliases(client) == {"production": 2}


def test_a_request_holds_for_what_it_shows(client: TestClient, bot: list[str], people: dict[str, Headers]) -> None:
    """The alias was moved while it was not protected: the old version of the request is not the present one."""
    request = ask(client, headers=people["Edith"])
    names = "/v1/registry/protected-aliases"
    assert client.put(names, json={"aliases": []}, headers=people["Ada"]).json() == {"aliases": []}
    assert code(client.post(f"{BOT}/requests", json={"alias": "production", "version": 1, "reason": "x"}))[0] == 409
    assert client.put(f"{BOT}/aliases/production", json={"version": 1}).status_code == 200
    assert client.put(names, json={"aliases": ["production", "champion"]}).json() == {
        "aliases": ["champion", "production"]
    }
    assert client.get(BOT).json()["aliases"][0]["protected"] is True
    assert code(decide(client, request, "approve", people["Ada"])) == (409, "alias_changed")
    assert aliases(client) == {"production": 1}
    assert decide(client, request, "refuse", people["Ada"]).status_code == 200
    not_protected = client.post(f"{BOT}/requests", json={"alias": "candidate", "version": 1, "reason": "x"})
    assert code(not_protected) == (409, "alias_not_protected")


def test_requests_are_listed_newest_first(client: TestClient, bot: list[str], people: dict[str, Headers]) -> None:
    client.put("/v1/registry/protected-aliases", json={"aliases": ["production", "staging"]})
    first, second = ask(client, 1, "staging"), ask(client, headers=people["Edith"])
    decide(client, first, "refuse", people["Ada"])
    listed = client.get(REQUESTS, params={"limit": 1})
    assert [each["id"] for each in listed.json()["data"]] == [second["id"]] and listed.json()["has_more"]
    following = client.get(listed.headers["link"].partition(">")[0][1:]).json()["data"]
    assert [each["id"] for each in following] == [first["id"]]
    pending = client.get(REQUESTS, params={"state": "pending", "model": "support-bot"}).json()["data"]
    assert pending == [second] == [client.get(f"{REQUESTS}/{second['id']}").json()]
    assert client.get(REQUESTS, params={"model": "other"}).json()["data"] == []


def test_another_project_sees_nothing(
    client: TestClient, sessions: Sessions, bot: list[str], people: dict[str, Headers]
) -> None:
    request = ask(client, headers=people["Edith"])
    client.put(f"{BOT}/aliases/candidate", json={"version": 1})
    project = client.post("/v1/projects", json={"name": "other"}).json()["id"]
    other = bearer(create_key(sessions, "other", project_id=project))
    for path in (MODELS, REQUESTS):
        assert client.get(path, headers=other).json()["data"] == []
    bodies = {
        f"{MODELS}/{{name}}/versions": {"job_id": bot[0]}, f"{MODELS}/{{name}}/aliases/{{alias}}": {"version": 2},
        f"{MODELS}/{{name}}/requests": {"alias": "production", "version": 1, "reason": "x"},
    }  # fmt: skip
    things = {"name": "support-bot", "version": "2", "alias": "candidate", "request_id": request["id"]}
    assert isinstance(client.app, FastAPI)
    routes = [(method, path) for method, path in walk(client.app) if path.startswith("/v1/registry/") and "{" in path]
    assert len(routes) == 13
    for method, path in routes:
        answer = client.request(method, path.format(**things), json=bodies.get(path), headers=other)
        codes = ("model_not_registered", "job_not_found", "request_not_found")
        assert answer.status_code == 404 and answer.json()["code"] in codes, (method, path, answer.text)
    client.put("/v1/registry/protected-aliases", json={"aliases": []}, headers=other)
    assert client.get("/v1/registry/protected-aliases").json() == {"aliases": ["production"]}
    assert aliases(client) == {"candidate": 1}


def test_a_narrow_key_reads_and_no_more(client: TestClient, sessions: Sessions, bot: list[str]) -> None:
    reader = bearer(create_key(sessions, "reader", (READ,)))
    for path in (MODELS, BOT, f"{BOT}/versions", f"{BOT}/versions/1", REQUESTS, "/v1/registry/protected-aliases"):
        assert client.get(path, headers=reader).status_code == 200, path
    chatter = bearer(create_key(sessions, "chatter", (CHAT,)))
    assert code(client.get(BOT, headers=chatter)) == (403, "insufficient_scope")
    wanted = {"alias": "production", "version": 1, "reason": "x"}
    for method, path, body in (
        ("POST", f"{BOT}/versions", {"job_id": bot[0]}), ("PUT", f"{BOT}/aliases/candidate", {"version": 1}),
        ("DELETE", f"{BOT}/aliases/candidate", None), ("DELETE", f"{BOT}/versions/1", None), ("DELETE", BOT, None),
        ("POST", f"{BOT}/requests", wanted),
    ):  # fmt: skip
        assert code(client.request(method, path, json=body, headers=reader)) == (403, "insufficient_scope"), path


def test_a_version_keeps_its_job(
    client: TestClient, sessions: Sessions, settings: Settings, succeed: Callable[..., str]
) -> None:
    kept, gone = succeed(days_ago=40), succeed(days_ago=40)
    add(client, kept)
    refused = client.delete(f"/v1/jobs/{kept}")
    assert code(refused) == (409, "job_in_registry") and "support-bot@1" in refused.json()["detail"]
    due = client.post("/v1/retention/preview", json={"keep_days": 30}).json()["data"]
    assert [job["id"] for job in due] == [gone]
    client.put("/v1/retention", json={"keep_days": 30})
    RetentionTask(settings.model_copy(update={"keep_jobs_days": 30}), sessions).purge()
    assert client.get(f"/v1/jobs/{gone}").status_code == 404
    assert client.get(f"{BOT}/versions/1").json()["job_id"] == kept
    assert (settings.artifacts_dir / kept).is_dir()
    assert client.delete(f"{BOT}/versions/1").status_code == 204
    assert client.delete(f"/v1/jobs/{kept}").status_code == 204


def test_every_change_leaves_an_entry(client: TestClient, bot: list[str], people: dict[str, Headers]) -> None:
    client.put("/v1/registry/protected-aliases", json={"aliases": ["production"]})
    for how, who in (("withdraw", "Edith"), ("refuse", "Ada"), ("approve", "Ada")):
        decide(client, ask(client, 1, headers=people["Edith"]), how, people[who])
    client.put(f"{BOT}/aliases/candidate", json={"version": 1})
    client.delete(f"{BOT}/aliases/candidate")
    client.delete(f"{BOT}/versions/2")
    decide(client, ask(client, None, headers=people["Edith"]), "approve", people["Ada"])
    client.delete(BOT)
    entries = client.get("/v1/audit", params={"limit": 100}).json()["data"][::-1]
    found = [(entry["action"].removeprefix("registry."), entry["object_id"].partition("@")[2]) for entry in entries
             if entry["action"].startswith("registry.")]  # fmt: skip
    asked = ("request", "production")
    approved = [asked, ("approve", "production"), ("move_alias", "production")]
    assert found == [
        ("add", "1"), ("add", "2"), ("protect", ""), asked, ("withdraw", "production"), asked, ("refuse", "production"),
        *approved, ("move_alias", "candidate"), ("move_alias", "candidate"), ("remove", "2"), *approved, ("remove", ""),
    ]  # fmt: skip


def test_webhooks_tell_what_happened(
    client: TestClient, sessions: Sessions, succeed: Callable[..., str], people: dict[str, Headers]
) -> None:
    events = [f"model.{event}" for event in ("version_added", "alias_requested", "alias_moved", "alias_refused")]
    hook = client.post(  # nobody listens there: what is queued is seen
        "/v1/webhooks", json={"url": "http://127.0.0.1:9/", "event_types": events}
    ).json()
    job_id = succeed()
    add(client, job_id)
    decide(client, ask(client, 1, headers=people["Edith"]), "refuse", people["Ada"])
    decide(client, ask(client, 1, headers=people["Edith"]), "approve", people["Ada"])
    sent = client.get(f"/v1/webhooks/{hook['id']}/deliveries").json()["data"][::-1]
    assert [each["event_type"] for each in sent] == [events[0], events[1], events[3], events[1], events[2]]
    assert sent[0]["data"]["job_id"] == job_id
    moved = sent[-1]["data"]
    shown = {name: moved[name] for name in ("model", "alias", "from_version", "version", "by", "reason")}
    assert shown == {"model": "support-bot", "alias": "production", "from_version": None, "version": 1} | {
        "by": "Ada", "reason": "It is better.",
    }  # fmt: skip
