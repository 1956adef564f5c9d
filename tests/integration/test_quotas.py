"""What a project may have at once, and where it is seen."""

import ipaddress
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import text

from api.http.security import READ, create_key
from api.http.stream_permits import StreamPermits
from api.main import create_app
from api.settings import Settings
from api.store.accounts import projects
from api.store.accounts.projects import QUOTAS, QuotaExceeded
from api.store.engine import Sessions
from bitfoundry.commands import main as cli
from tests.support.api import bearer, limit, refused_for
from tests.support.service import Server
from tests.support.waiting import wait_until

ROWS = b"".join(b'{"text": "row %d of some that are long enough"}\n' % number for number in range(8))
HOOK = {"url": "http://127.0.0.1:9/", "event_types": ["job.failed"]}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"webhook_networks": (ipaddress.ip_network("127.0.0.0/8"),)})


def make_dataset(client: TestClient) -> Any:
    return client.post("/v1/datasets", files={"file": ("rows.jsonl", ROWS)})


def make_upload(client: TestClient) -> Any:
    return client.post("/v1/uploads", json={"filename": "rows.jsonl"})


def make_webhook(client: TestClient) -> Any:
    return client.post("/v1/webhooks", json=HOOK)


MAKE: dict[str, tuple[Callable[[TestClient], Any], str]] = {
    "max_datasets": (make_dataset, "/v1/datasets"),
    "max_uploads": (make_upload, "/v1/uploads"),
    "max_webhooks": (make_webhook, "/v1/webhooks"),
}


def usage_of(client: TestClient | httpx2.Client, **how: Any) -> dict[str, tuple[int, int | None]]:
    answer = client.get("/v1/usage", **how)
    assert answer.status_code == 200, answer.text
    return {each["quota"]: (each["used"], each["limit"]) for each in answer.json()["quotas"]}


@pytest.mark.parametrize("quota", MAKE)
def test_what_is_used_up_is_refused_until_there_is_room(quota: str, client: TestClient) -> None:
    make, place = MAKE[quota]
    limit(client, **{quota: 2})
    first, _ = (make(client) for _ in range(2))
    assert first.status_code == 201, first.text
    assert usage_of(client)[quota] == (2, 2)
    refused = make(client)
    assert refused_for(refused, quota)
    assert "2 used, 2 allowed" in refused.json()["detail"] and QUOTAS[quota].room in refused.json()["hint"]
    assert client.delete(f"{place}/{first.json()['id']}").status_code == 204
    assert usage_of(client)[quota] == (1, 2)
    assert make(client).status_code == 201
    limit(client, **{quota: None})
    assert make(client).status_code == 201
    assert usage_of(client)[quota] == (3, QUOTAS[quota].default)


@pytest.mark.parametrize("quota", MAKE)
def test_many_at_once_do_not_pass(quota: str, client: TestClient) -> None:
    limit(client, **{quota: 2})
    start, codes = threading.Barrier(5), []

    def send() -> None:
        start.wait()
        codes.append(MAKE[quota][0](client).status_code)

    threads = [threading.Thread(target=send) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [201] * 2 + [429] * 3
    assert usage_of(client)[quota] == (2, 2)


def test_bytes_of_datasets(client: TestClient, settings: Settings) -> None:
    limit(client, max_dataset_bytes=len(ROWS) + 10)
    assert make_dataset(client).status_code == 201
    refused = make_dataset(client)
    assert refused_for(refused, "max_dataset_bytes")
    assert f"needs {len(ROWS)} more" in refused.json()["detail"]
    assert usage_of(client)["max_dataset_bytes"] == (len(ROWS), len(ROWS) + 10)


def test_more_than_the_limit_is_not_said_to_be_a_part_of_it(client: TestClient) -> None:
    """A limit may fall, and a job may go back to the queue when its worker drains: it read "4 of 3 are used"."""
    limit(client, max_webhooks=2)
    for _ in range(2):
        assert make_webhook(client).status_code == 201
    limit(client, max_webhooks=1)
    refused = make_webhook(client)
    assert refused_for(refused, "max_webhooks")
    problem = refused.json()
    assert problem["detail"] == "The project has no room in its quota max_webhooks: 2 used, 1 allowed."
    assert problem["errors"][0]["detail"] == "2 used, 1 allowed"


def test_uploads_that_are_over_do_not_count(client: TestClient, sessions: Sessions) -> None:
    limit(client, max_uploads=1)
    assert make_upload(client).status_code == 201
    assert refused_for(make_upload(client), "max_uploads")
    with sessions.begin() as session:
        session.execute(text("UPDATE upload SET expires_at = clock_timestamp()"))
    assert make_upload(client).status_code == 201


def test_without_a_limit_of_its_own_a_project_has_the_default(client: TestClient) -> None:
    shown = usage_of(client)
    assert shown == {name: (0, quota.default) for name, quota in QUOTAS.items()}
    assert [name for name, (_, most) in shown.items() if most is not None] == [
        "max_uploads",
        "max_streams",
        "max_webhooks",
    ]
    for _ in range(QUOTAS["max_webhooks"].default or 0):
        assert make_webhook(client).status_code == 201
    assert refused_for(make_webhook(client), "max_webhooks")


@pytest.mark.slow
def test_streams_of_all_processes_count_together(
    server: Server, settings: Settings, sessions: Sessions, submit: Callable[..., str]
) -> None:
    job_id = submit()
    stream = f"/v1/jobs/{job_id}/events/stream"
    logs = f"/v1/jobs/{job_id}/logs/stream"
    headers = bearer(server.key)
    with TestClient(create_app(settings), headers=headers) as second, server.connect() as client:
        limit(second, max_streams=2)
        other = second.post("/v1/projects", json={"name": "other", "max_streams": 0}).json()["id"]
        key = second.post("/v1/keys", json={"name": "k", "scopes": [READ], "project_id": other}).json()["key"]
        assert usage_of(second, headers=bearer(key))["max_streams"] == (0, 0)
        with client.stream("GET", stream) as answer:
            first = answer.iter_lines()  # which must be kept: its end closes the stream
            assert next(first).startswith("retry")
            with client.stream("GET", logs) as another:
                kept = another.iter_lines()
                assert next(kept).startswith("retry")
                for asked in (client, second):
                    assert usage_of(asked)["max_streams"] == (2, 2)
                    assert refused_for(asked.get(stream), "max_streams")
                    assert refused_for(asked.get(logs), "max_streams")
            del kept
            wait_until(lambda: usage_of(second)["max_streams"][0] == 1)
            with client.stream("GET", logs) as again:
                assert next(again.iter_lines()).startswith("retry")
        wait_until(lambda: usage_of(second)["max_streams"][0] == 0)


def test_streams_without_a_broker_and_with_one_that_forgets(broker_url: str) -> None:
    away = StreamPermits("redis+socket:///nowhere/valkey.sock")
    assert away.acquire("prj", 2, num_here=1)
    with pytest.raises(QuotaExceeded):
        away.acquire("prj", 2, num_here=2)
    assert away.count("prj", num_here=2) == 2
    permits = StreamPermits(broker_url)
    held = [permits.acquire("prj_forgotten", 2, 0) for _ in range(2)]
    with pytest.raises(QuotaExceeded):
        permits.acquire("prj_forgotten", 2, 0)
    assert permits._broker is not None
    permits._broker.flushdb()
    assert permits.count("prj_forgotten", 0) == 0
    permits.renew({"prj_forgotten": held})
    assert permits.count("prj_forgotten", 0) == 2
    permits.release("prj_forgotten", held[0])
    assert permits.count("prj_forgotten", 0) == 1
    permits.close()


def test_metrics_of_quotas(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(client, max_webhooks=7)
    make_webhook(client)
    shown = client.get("/metrics").text
    of_default = 'project="default",quota='
    assert f'bitfoundry_quota_used{{{of_default}"max_webhooks"}} 1.0' in shown
    assert f'bitfoundry_quota_limit{{{of_default}"max_webhooks"}} 7.0' in shown
    assert len(re.findall(r"^bitfoundry_quota_used\{", shown, flags=re.MULTILINE)) == len(QUOTAS)
    monkeypatch.setattr("api.http.metrics.MAX_PROJECTS", 2)
    for number in range(3):
        client.post("/v1/projects", json={"name": f"p{number}"})
    shown = client.get("/metrics").text
    assert len(re.findall(r"^bitfoundry_quota_used\{", shown, flags=re.MULTILINE)) == 2 * len(QUOTAS)


def test_the_commands(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITFOUNDRY_URL", server.url)
    monkeypatch.setenv("BITFOUNDRY_API_KEY", server.key)
    monkeypatch.setenv("COLUMNS", "300")

    def say(*arguments: str) -> str:
        assert cli.run([*arguments]) == 0
        return capsys.readouterr().out

    given = [f"--{name.replace('_', '-')}={number}" for number, name in enumerate(QUOTAS, start=11)]
    edited = json.loads(say("projects", "edit", projects.DEFAULT, *given, "--json"))
    assert [edited[name] for name in QUOTAS] == [*range(11, 11 + len(QUOTAS))]
    shown = json.loads(say("usage", "--json"))
    assert [(each["quota"], each["used"], each["limit"]) for each in shown] == [
        (name, 0, number) for number, name in enumerate(QUOTAS, start=11)
    ]
    assert re.search(r"max_webhooks\s+0\s+18\s+webhooks", say("usage"))
    assert "max_webhooks=18" in say("projects", "list")
    cleared = json.loads(say("projects", "edit", projects.DEFAULT, "--max-webhooks=-1", "--json"))
    assert cleared["max_webhooks"] is None and cleared["max_streams"] is not None


def test_whoever_may_not_read_sees_no_usage(client: TestClient, sessions: Sessions) -> None:
    assert client.get("/v1/usage", headers=bearer(create_key(sessions, "k", scopes=["admin"]))).status_code == 403


def test_a_project_without_a_broker_counts_here(
    settings: Settings, sessions: Sessions, submit: Callable[..., str]
) -> None:
    """Neither the limit nor the usage makes a request wait or fail."""
    away = settings.model_copy(update={"broker_url": SecretStr("redis+socket:///nowhere/valkey.sock")})
    key = create_key(sessions, "k")
    with TestClient(create_app(away), headers=bearer(key)) as client:
        limit(client, max_streams=0)
        assert refused_for(client.get(f"/v1/jobs/{submit()}/events/stream"), "max_streams")
        assert usage_of(client)["max_streams"] == (0, 0)
