"""Logs and phases: from the store, with whole workers where it matters."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.jobs import logs as routes
from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import leases, logs, phases, remaining
from api.store.queue.events import NewEvent
from api.store.queue.leases import Lease, LeaseLost
from api.store.tables.jobs import Job
from tests.support.attempts import write
from tests.support.service import WorkerProcess

Submit = Callable[..., str]


def start(sessions: Sessions, submit: Submit) -> tuple[str, Lease]:
    job_id = submit()
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
    assert lease
    return job_id, lease


def texts(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [line["text"] for line in answer.json()["data"]]


def test_tail_level_and_pages(client: TestClient, sessions: Sessions, submit: Submit) -> None:
    job_id, lease = start(sessions, submit)
    write(sessions, lease, "debug: a", "info: b", "warning: c", "error: d")
    write(sessions, lease, "info: e")
    url = f"/v1/jobs/{job_id}/logs"
    assert texts(client.get(url)) == [*"abcde"]
    assert texts(client.get(f"{url}?tail=2")) == ["d", "e"]
    assert texts(client.get(f"{url}?level=warning")) == ["c", "d"]
    assert texts(client.get(f"{url}?level=info&tail=3")) == ["c", "d", "e"]
    assert texts(client.get(f"{url}?after=3")) == ["d", "e"]
    page = client.get(f"{url}?limit=2").json()
    assert ([line["seq"] for line in page["data"]], page["has_more"]) == ([1, 2], True)
    assert page["data"][0].keys() == {"seq", "at", "attempt", "level", "text"}
    assert client.get(f"{url}?after=5").json() == {"data": [], "has_more": False}
    for wrong in ("tail=0", "level=loud", "tail=1&after=1", "after=-1", "limit=5000"):
        assert client.get(f"{url}?{wrong}").status_code == 422, wrong
    assert client.get(f"/v1/jobs/job_{'0' * 32}/logs").status_code == 404


def test_download_is_the_whole_log_as_text(
    client: TestClient, sessions: Sessions, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "PAGE", 3)
    job_id, lease = start(sessions, submit)
    write(sessions, lease, *(f"info: line {number}" for number in range(10)), "error: the end")
    answer = client.get(f"/v1/jobs/{job_id}/logs/download")
    assert answer.headers["content-type"].startswith("text/plain")
    assert f'filename="{job_id}.log"' in answer.headers["content-disposition"]
    lines = answer.text.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        *(f"attempt 1 info line {number}" for number in range(10)),
        "attempt 1 error the end",
    ]
    assert client.get(f"/v1/jobs/{job_id}/logs/download?level=error").text.count("\n") == 1
    assert client.get(f"/v1/jobs/job_{'0' * 32}/logs/download").status_code == 404


def test_a_log_grows_to_its_limit_and_keeps_the_newest(
    client: TestClient, sessions: Sessions, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_LINES", 4)
    job_id, lease = start(sessions, submit)
    for number in range(7):
        write(sessions, lease, f"info: {number}")
    answer = client.get(f"/v1/jobs/{job_id}/logs")
    assert texts(answer) == ["3", "4", "5", "6"]
    assert [line["seq"] for line in answer.json()["data"]] == [4, 5, 6, 7]


def test_a_stale_worker_writes_no_log_and_a_log_moves_no_etag(
    client: TestClient, sessions: Sessions, submit: Submit
) -> None:
    job_id, lease = start(sessions, submit)
    tag = client.get(f"/v1/jobs/{job_id}").headers["etag"]
    write(sessions, lease, "info: a")
    assert client.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": tag}).status_code == 304
    with sessions.begin() as session:
        session.execute(text("UPDATE job SET fence = fence + 1"))
    with pytest.raises(LeaseLost):
        write(sessions, lease, "info: stale")
    assert texts(client.get(f"/v1/jobs/{job_id}/logs")) == ["a"]


def test_phases_with_their_times(client: TestClient, sessions: Sessions, submit: Submit) -> None:
    job_id, lease = start(sessions, submit)
    progress = {"phase": "quantize", "done": 3, "total": 30, "unit": "block", "eta_s": 27.5}
    story = [
        ([NewEvent("phase_started", {"phase": "plan"})], {"phase": "plan"}),
        # what waited and what comes now are written together: the last progress belongs to the phase before
        (
            [
                NewEvent("progress", {"phase": "plan", "done": 1, "total": 1, "unit": "model"}),
                NewEvent("phase_started", {"phase": "quantize"}),
            ],
            {"phase": "quantize", "progress": None},
        ),
        ([NewEvent("progress", progress)], {"progress": progress}),
    ]
    for happened, columns in story:
        with sessions.begin() as session:
            leases.record(session, lease, happened=happened, columns=columns)
    job = client.get(f"/v1/jobs/{job_id}").json()
    plan, quantize = job["phases"]
    assert (plan["state"], plan["ended_at"], plan["done"]) == ("done", quantize["started_at"], 1)
    assert plan["started_at"] < plan["ended_at"]
    shown = {"name": "quantize", "state": "running", "ended_at": None, "done": 3, "total": 30, "unit": "block"}
    assert quantize == {**shown, "started_at": quantize["started_at"]}
    assert job["progress"]["eta_s"] == 27.5
    with sessions.begin() as session:
        leases.release(session, lease)
    assert [phase["state"] for phase in client.get(f"/v1/jobs/{job_id}").json()["phases"]] == ["done", "stopped"]
    with sessions.begin() as session:
        assert leases.claim(session, worker="w", lease_s=60)
    assert client.get(f"/v1/jobs/{job_id}").json()["phases"] == []


def test_no_secret_is_stored_and_the_workers_disk_keeps_no_log(
    client: TestClient,
    sessions: Sessions,
    make_model: Callable[..., Path],
    start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Job],
    settings: Settings,
) -> None:
    """The canary is in the worker's environment (see conftest) and a key is in the text: neither gets anywhere."""
    start_worker()
    said = "ERROR canary-in-the-environment hf_abcdefABCDEF0123456789 https://me:pw@host/x done"
    model = make_model(log=said)
    answer = client.post("/v1/jobs", json={"model": {"path": str(model)}, "config": {"preset": "fp8"}})
    job_id = answer.json()["id"]
    wait_for(job_id, "succeeded")
    [line] = client.get(f"/v1/jobs/{job_id}/logs?level=error").json()["data"]
    assert (line["text"], line["level"], line["attempt"]) == ("ERROR *** *** https://***@host/x done", "error", 1)
    [warning] = client.get(f"/v1/jobs/{job_id}/events", params={"kind": "warning"}).json()["data"]
    assert warning["data"]["message"] == "ERROR *** *** https://***@host/x done"
    with sessions.begin() as session:
        for table in ("job", "attempt", "event", "log_line", "artifact"):
            for [row] in session.execute(text(f"SELECT to_jsonb({table})::text FROM {table}")):
                assert "canary" not in row and "hf_abc" not in row and "me:pw" not in row
    assert list(settings.data_dir.rglob("*.log")) == []


def test_what_is_left_of_the_whole_job(client: TestClient, sessions: Sessions, submit: Submit) -> None:
    """From jobs of the same kind of work, those of the same model first; nothing without one, or for other work."""

    def run(model: str, seconds: dict[str, float], **fields: Any) -> str:
        """Store a job that has succeeded, with phases of so many seconds."""
        job_id = submit(model, **fields)
        with sessions.begin() as session:
            lease = leases.claim(session, worker="w", lease_s=60)
            assert lease is not None
            leases.succeed(session, lease, manifest_sha256="0" * 64, path=model, num_bytes=1, summary={})
            at, story = datetime(2026, 11, 26, tzinfo=UTC), list[dict[str, Any]]()
            for name, took_s in seconds.items():
                story = phases.enter(story, name, at)
                at += timedelta(seconds=took_s)
            session.get_one(Job, job_id).phases = phases.leave(story, phases.DONE, at)
        return job_id

    evaluation = {"evaluation": {"num_windows": 3}}
    run("/other/work", {"quantize": 60, "verify": 6000})
    run("/another/model", {"quantize": 60, "verify": 30}, **evaluation)
    job_id = submit("/a/model", **evaluation)
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
        assert lease is not None
        leases.record(session, lease, happened=[NewEvent("phase_started", {"phase": "quantize"})], columns={})
    assert client.get(f"/v1/jobs/{job_id}").json()["eta_s"] is None
    progress = {"phase": "quantize", "done": 10, "total": 30, "unit": "block", "eta_s": 80.0}
    with sessions.begin() as session:
        leases.record(session, lease, happened=[NewEvent("progress", progress)], columns={"progress": progress})
    shown = client.get(f"/v1/jobs/{job_id}")
    assert shown.json()["eta_s"] == 80 + 2 * 30
    assert {job["id"]: job["eta_s"] for job in client.get("/v1/jobs").json()["data"]}[job_id] == 140
    run("/a/model", {"quantize": 60, "verify": 15}, **evaluation)
    again = client.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": shown.headers["etag"]})
    assert (again.status_code, again.json()["eta_s"]) == (200, 80 + 2 * 15)
    with sessions.begin() as session:
        job = session.get_one(Job, job_id)
        for model, spec, expected_s in (
            (job.model, job.spec, 75.0),
            ({"path": "/unknown"}, job.spec, None),
            (job.model, job.spec | {"goal": {"runtime": "vllm", "device": "24GB"}}, None),
        ):
            assert remaining.expect(session, job.project_id, model, spec, None) == (expected_s, None)
        leases.release(session, lease)
    assert client.get(f"/v1/jobs/{job_id}").json()["eta_s"] is None
