"""Read-only links to a run's report: what they open, and everything that they do not."""

import datetime as dt
import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.http import security
from api.http.security import create_key
from api.main import create_app
from api.settings import Settings
from api.shares import viewing
from api.store.engine import Sessions
from tests.support.api import JOB, bearer
from tests.support.reports import report
from tests.support.results import succeed_with
from tests.support.service import Server

DAY_S = 24 * 3600
NAME = "<img src=x onerror=alert(1)>"
HIDDEN = "/srv/hidden"


@pytest.fixture
def succeed(settings: Settings, sessions: Sessions, submit: Callable[..., str]) -> Callable[..., str]:
    """``succeed(files)``: the id of a succeeded job with these files in its artifact."""

    def make(files: dict[str, bytes]) -> str:
        job_id = submit()
        succeed_with(files, job_id, settings, sessions)
        return job_id

    return make


@pytest.fixture
def job_id(succeed: Callable[..., str]) -> str:
    """A succeeded job whose report has paths of the server and a hostile model name."""
    content = report() | {
        "model": {"path": f"{HIDDEN}/{NAME}", "model_type": "llama"},
        "calibration": {"source": f"{HIDDEN}/chats.jsonl", "num_samples": 8},
        "warnings": [f"{HIDDEN}/chats.jsonl is short"],
    }
    return succeed({"report.json": json.dumps(content).encode(), "model.safetensors": b"weights"})


def share(client: Any, job_id: str, **asked: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/jobs/{job_id}/shares", json=asked)
    assert answer.status_code == 201, answer.text
    return answer.json()  # type: ignore[no-any-return]


def opened(client: TestClient, url: str) -> Any:
    """The answer to somebody who has the link and nothing else."""
    return client.get(url, headers={"Authorization": ""})


def token_of(made: dict[str, Any]) -> str:
    return str(made["url"]).rpartition("/")[2]


def test_the_link_shows_the_report_and_nothing_else(client: TestClient, job_id: str) -> None:
    made = share(client, job_id)
    shown, data = opened(client, made["url"]), opened(client, f"{made['url']}/report.json")
    assert (shown.status_code, data.status_code) == (200, 200)
    assert shown.headers["content-type"].startswith("text/html")
    dates = re.search(r"<p class=\"skipped\">A run, finished on (\S+)\. This link expires on (\S+)\.</p>", shown.text)
    assert dates and dt.date.fromisoformat(dates[2]) - dt.date.fromisoformat(dates[1]) >= dt.timedelta(days=7)
    assert "<h2>Quality</h2>" in shown.text and "&lt;img src=x" in shown.text and "<img" not in shown.text
    assert data.json()["calibration"] == {"source": "chats.jsonl", "num_samples": 8}
    assert data.json()["warnings"] == ["chats.jsonl is short"]
    for answer in (shown, data):
        assert HIDDEN not in answer.text and "/models/" not in answer.text
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-robots-tag"] == "noindex"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "script" not in policy
    for path in ("/model.safetensors", "/report.html", "/artifacts/model.safetensors", "/log", "/%2e%2e/x"):
        assert opened(client, made["url"] + path).status_code == 404
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert client.request(method, made["url"], headers={"Authorization": ""}).status_code == 405
    for place in (f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/artifacts/report.json"):
        assert client.get(place, headers=bearer(token_of(made))).status_code == 401


def test_a_link_that_opens_nothing_says_no_more(client: TestClient, sessions: Sessions, job_id: str) -> None:
    """Whatever the reason is: unknown, no token at all, revoked, over, or the job was deleted."""
    revoked, over, deleted = (share(client, job_id) for _ in range(3))
    answers = []

    def look(url: str) -> None:
        for path in ("", "/report.json"):
            answer = opened(client, url + path)
            problem = {name: value for name, value in answer.json().items() if name not in ("instance", "request_id")}
            headers = {name: answer.headers[name] for name in ("referrer-policy", "x-robots-tag", "cache-control")}
            answers.append((answer.status_code, problem, headers))

    assert client.delete(f"/v1/jobs/{job_id}/shares/{revoked['id']}").status_code == 204
    assert client.delete(f"/v1/jobs/{job_id}/shares/{revoked['id']}").status_code == 404
    look(revoked["url"])
    with sessions.begin() as session:
        ended = "UPDATE share SET expires_at = clock_timestamp() - interval '1 s' WHERE id = :id"
        session.execute(text(ended), {"id": over["id"]})
    look(over["url"])
    assert [each["id"] for each in client.get(f"/v1/jobs/{job_id}/shares").json()["data"]] == [deleted["id"]]
    assert opened(client, deleted["url"]).status_code == 200
    assert client.delete(f"/v1/jobs/{job_id}").status_code == 204
    look(deleted["url"])
    look(f"/v1/shared/{'x' * 43}")
    look("/v1/shared/x")
    assert answers == [answers[0]] * len(answers)
    status, problem, headers = answers[0]
    assert (status, problem["code"], headers["x-robots-tag"]) == (404, "share_not_found", "noindex")


def test_in_a_browser_a_link_that_opens_nothing_is_a_page(
    client: TestClient, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is opened too often. Who asks for JSON gets JSON."""
    in_browser = {"Authorization": "", "Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    dead = f"/v1/shared/{'x' * 43}"
    answer = client.get(dead, headers=in_browser)
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "<h1>This link does not open a report.</h1>" in answer.text
    assert "expired or been revoked, or its run was deleted. Ask the sender for a new link." in answer.text
    assert answer.headers["x-robots-tag"] == "noindex" and "script" not in answer.headers["content-security-policy"]
    for accepted, path in (("application/json", ""), ("*/*", ""), (in_browser["Accept"], "/report.json")):
        problem = client.get(dead + path, headers=in_browser | {"Accept": accepted})
        assert problem.json()["code"] == "share_not_found", accepted
    monkeypatch.setattr(viewing, "REQUESTS_PER_MINUTE", 1)
    url = share(client, job_id)["url"]
    shown, refused = (client.get(url, headers=in_browser) for _ in range(2))
    assert (shown.status_code, refused.status_code) == (200, 429)
    assert "<p>Retry in" in refused.text and int(refused.headers["retry-after"]) > 0


def test_the_token_is_kept_nowhere(
    client: TestClient, sessions: Sessions, job_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    made = share(client, job_id)
    token = token_of(made)
    assert opened(client, made["url"]).status_code == 200
    for path in (f"/v1/jobs/{job_id}/shares", f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/events", "/v1/audit"):
        assert token not in client.get(path).text
    with sessions.begin() as session:
        rows = "".join(str(row) for row in session.execute(text("SELECT to_jsonb(s) FROM share s")))
    assert token not in rows and hashlib.sha256(token.encode()).hexdigest() in rows
    ours = [record for record in caplog.records if not record.name.startswith("http")]  # the test's own client
    assert token not in "".join(record.getMessage() for record in ours)


def test_the_server_writes_no_token(server: Server, sessions: Sessions, job_id: str, capfd: Any) -> None:
    with server.connect() as http:
        made = share(http, job_id)
    assert made["url"].startswith(server.url)
    for path in ("", "/report.json", "/nothing"):
        httpx2.get(made["url"] + path, trust_env=False)
    printed = capfd.readouterr()
    assert token_of(made) not in printed.out + printed.err


def test_how_long_it_lasts(client: TestClient, job_id: str) -> None:
    made = share(client, job_id)
    times = [dt.datetime.fromisoformat(made[name]) for name in ("created_at", "expires_at")]
    assert abs((times[1] - times[0]).total_seconds() - 7 * DAY_S) < 60
    assert share(client, job_id, expires_in_s=90 * DAY_S)["expires_at"] > made["expires_at"]
    for wrong in (59, 90 * DAY_S + 1, "7d", None):
        refused = client.post(f"/v1/jobs/{job_id}/shares", json={"expires_in_s": wrong})
        assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "#/expires_in_s")


def test_links_are_listed_and_audited(client: TestClient, job_id: str, sessions: Sessions) -> None:
    made = share(client, job_id, expires_in_s=3600)
    [listed] = client.get(f"/v1/jobs/{job_id}/shares").json()["data"]
    assert listed == {name: value for name, value in made.items() if name != "url"}
    assert listed["created_by"] == "test"
    client.delete(f"/v1/jobs/{job_id}/shares/{made['id']}")
    entries = client.get("/v1/audit", params={"object_id": job_id}).json()["data"]
    assert [(entry["action"], entry["detail"]) for entry in entries] == [
        ("share.revoke", {"share_id": made["id"]}),
        ("share.create", {"share_id": made["id"], "expires_in_s": 3600}),
    ]
    reader = bearer(create_key(sessions, "r", scopes=[security.READ]))
    assert client.get(f"/v1/jobs/{job_id}/shares", headers=reader).status_code == 200
    assert client.post(f"/v1/jobs/{job_id}/shares", headers=reader, json={}).status_code == 403


def test_a_job_has_so_many_links(client: TestClient, job_id: str, sessions: Sessions) -> None:
    for _ in range(20):
        share(client, job_id)
    full = client.post(f"/v1/jobs/{job_id}/shares")
    assert (full.status_code, full.json()["code"]) == (409, "too_many_shares")
    with sessions.begin() as session:
        session.execute(text("UPDATE share SET expires_at = clock_timestamp()"))
    share(client, job_id)
    with sessions.begin() as session:
        assert session.scalar(text("SELECT count(*) FROM share")) == 1  # those that are over were deleted


def test_a_link_that_is_opened_too_often_waits(
    client: TestClient, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes nothing of the limit of its project."""
    monkeypatch.setattr(viewing, "REQUESTS_PER_MINUTE", 3)
    first, second = share(client, job_id)["url"], share(client, job_id)["url"]
    assert [opened(client, first).status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = opened(client, first)
    assert refused.json()["code"] == "rate_limited" and int(refused.headers["retry-after"]) > 0
    assert opened(client, second).status_code == 200


def test_what_has_no_report_is_not_shared(
    client: TestClient, submit: Callable[..., str], succeed: Callable[..., str]
) -> None:
    old = json.dumps(report() | {"schema_version": 1}).encode()
    for files in ({"model.safetensors": b"x"}, {"report.json": old}):
        refused = client.post(f"/v1/jobs/{succeed(files)}/shares")
        assert (refused.status_code, refused.json()["code"]) == (409, "no_report")
    early = client.post(f"/v1/jobs/{submit()}/shares")
    assert (early.status_code, early.json()["code"]) == (409, "not_ready")
    assert client.post(f"/v1/jobs/{JOB}/shares").json()["code"] == "job_not_found"


def test_the_link_begins_with_the_public_address(settings: Settings, sessions: Sessions, job_id: str) -> None:
    named = settings.model_copy(update={"public_url": "https://bitfoundry.example.org"})
    with TestClient(create_app(named), headers=bearer(create_key(sessions, "k"))) as client:
        made = share(client, job_id)
        assert made["url"].startswith("https://bitfoundry.example.org/v1/shared/")
        assert opened(client, f"/v1/shared/{token_of(made)}").status_code == 200


def test_the_commands(
    server: Server, job_id: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    from bitfoundry.commands import main as cli

    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)

    def command(line: str, status: int = 0) -> Any:
        capsys.readouterr()
        assert cli.run(line.split()) == status
        return capsys.readouterr()

    printed = command(f"share {job_id} --expires 36h").out.strip()
    assert httpx2.get(printed, trust_env=False).status_code == 200
    [listed] = json.loads(command(f"shares {job_id} --json").out)
    times = [dt.datetime.fromisoformat(listed[name]) for name in ("created_at", "expires_at")]
    assert abs((times[1] - times[0]).total_seconds() - 36 * 3600) < 60
    assert json.loads(command(f"unshare {job_id} {listed['id']} --json").out) == {"deleted": listed["id"]}
    assert httpx2.get(printed, trust_env=False).status_code == 404
    made = json.loads(command(f"share {job_id} --json").out)
    assert made["url"] and made["id"][:12] in command(f"shares {job_id}").out
    assert "90d" in command(f"share {job_id} --expires 7weeks", status=2).err
    assert "expires_in_s" in command(f"share {job_id} --expires 91d", status=1).err
