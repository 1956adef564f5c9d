"""Whole workers, as processes of their own, with a stub engine: they are killed, stopped, drained, cut off."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import select, text

from api.http.security import create_key
from api.main import create_app
from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import events
from api.store.tables.jobs import Artifact, Job, Outbox
from tests.support.api import post
from tests.support.attempts import outcomes
from tests.support.params import with_rare
from tests.support.service import WorkerProcess, is_alive, wait_for_empty, wait_gone
from tests.support.waiting import give_time, wait_until
from worker.supervisor import Supervisor

MakeModel = Callable[..., Path]
Submit = Callable[..., str]
StartWorker = Callable[..., WorkerProcess]
StartHere = Callable[..., Supervisor]
WaitFor = Callable[..., Job]
ReadPids = Callable[..., list[list[int]]]


def patient(settings: Settings, **changes: Any) -> Settings:
    """Settings under which only a message from the broker makes things quick."""
    return settings.model_copy(update={"poll_s": 60, **changes})


def test_a_job_from_the_request_to_the_download(
    client: TestClient, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor, settings: Settings
) -> None:
    start_worker()
    job_id = post(client, make_model(environment=str(settings.data_dir / "environment.json")))
    wait_for(job_id, "succeeded")
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert (job["attempt"], job["phase"], job["error"]) == (1, "export", None)
    assert (job["summary"]["size_after_bytes"], job["summary"]["note"]) == (19000, "stub\ufffd")  # it was NUL
    assert job["started_at"] < job["finished_at"]
    folder = Path(job["artifact"]["path"])
    assert folder == settings.data_dir / "artifacts" / job_id / job["artifact"]["manifest_sha256"]

    listing = client.get(f"/v1/jobs/{job_id}/artifacts").json()["data"]
    assert {file["path"] for file in listing} == {"model.safetensors", "sub/report.json", "MANIFEST.json"}
    assert sum(file["bytes"] for file in listing) == job["artifact"]["bytes"]
    assert client.get(f"/v1/jobs/{job_id}/artifacts/sub/report.json").json() == {"summary": {}}

    story = client.get(f"/v1/jobs/{job_id}/events").json()["data"]
    assert [event["seq"] for event in story] == list(range(1, len(story) + 1))
    kinds = [event["kind"] for event in story]
    assert kinds[:3] == ["state_changed", "state_changed", "phase_started"]
    assert kinds[-2:] == ["completed", "state_changed"]
    assert kinds.count("layer_quantized") == 20
    assert story[-1]["data"] == {"state": "succeeded", "attempt": 1, "outcome": "succeeded"}

    wait_for_empty(settings.work_dir)
    lines = client.get(f"/v1/jobs/{job_id}/logs").json()["data"]
    texts = [line["text"] for line in lines]
    assert [text for text in texts if text.startswith("worker: ")] == [
        "worker: phase quantize began", "worker: phase export began", "worker: the engine ended with status 0",
    ]  # fmt: skip
    assert "stub engine starts" in texts  # the two come through pipes of their own
    assert [phase["name"] for phase in job["phases"]] == ["quantize", "export"]
    assert {phase["state"] for phase in job["phases"]} == {"done"}
    environment = json.loads((settings.data_dir / "environment.json").read_text())
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "canary" not in str(environment)
    assert not {"DATABASE_URL", "BROKER_URL", "BITFOUNDRY_DATA_DIR"} & environment.keys()


def test_kill_9_of_a_worker(
    sessions: Sessions,
    make_model: MakeModel,
    submit: Submit,
    start_worker: StartWorker,
    start_here: StartHere,
    wait_for: WaitFor,
    read_pids: ReadPids,
    settings: Settings,
    tmp_path: Path,
) -> None:
    """Its engine dies with it, grandchildren included; a second worker takes the job up again and ends it well."""
    job_id = submit(make_model(mode="slow_once", pids=str(tmp_path / "pids")))
    first = start_worker()
    wait_for(job_id, "running", phase="quantize")
    [pids] = read_pids(tmp_path / "pids")
    assert all(map(is_alive, pids))
    [orphaned] = settings.work_dir.iterdir()
    first.kill()
    wait_gone(pids)
    with sessions.begin() as session:  # without the wait for the end of the lease
        session.execute(text("UPDATE job SET lease_expires_at = clock_timestamp()"))
    start_here()
    job = wait_for(job_id, "succeeded")
    lost = job.lost_count  # 1; more if the second worker, too, is starved for longer than its lease
    assert lost >= 1 and (job.attempt, job.failure_count) == (lost + 1, 0)
    assert outcomes(sessions, job_id) == [*["lost"] * lost, "succeeded"]
    with sessions.begin() as session:
        states = [
            e.data["state"] for e in events.read(session, job_id, after=0, limit=999) if e.kind == "state_changed"
        ]
    assert states == [*["queued", "running"] * (lost + 1), "succeeded"]
    third = start_worker()  # its start clears away what the first one left
    wait_until(lambda: not orphaned.exists())
    assert third.process.poll() is None


@pytest.mark.slow
def test_a_worker_that_was_stopped_too_long_writes_nothing(
    sessions: Sessions, make_model: MakeModel, submit: Submit, start_worker: StartWorker, wait_for: WaitFor,
    read_pids: ReadPids, tmp_path: Path,
) -> None:  # fmt: skip
    job_id = submit(make_model(mode="slow_once", pids=str(tmp_path / "pids")))
    frozen = start_worker()
    wait_for(job_id, "running", phase="quantize")
    [pids] = read_pids(tmp_path / "pids")
    frozen.suspend(sessions)
    start_worker()
    wait_for(job_id, "succeeded")
    with sessions.begin() as session:
        before = session.execute(text("SELECT to_jsonb(job) FROM job")).all()
    frozen.process.send_signal(signal.SIGCONT)
    wait_gone(pids)
    give_time(0.5)
    with sessions.begin() as session:
        assert session.execute(text("SELECT to_jsonb(job) FROM job")).all() == before
        assert len(session.scalars(select(Artifact)).all()) == 1
    assert frozen.process.poll() is None  # and it goes on with its life


@pytest.mark.parametrize("mode", with_rare(["slow", "ignores_sigterm"], ["slow"]))
def test_cancel_ends_the_engine_and_all_it_started(
    mode: str, client: TestClient, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor,
    read_pids: ReadPids, tmp_path: Path, settings: Settings,
) -> None:  # fmt: skip
    start_worker()
    job_id = post(client, make_model(mode=mode, pids=str(tmp_path / "pids")))
    wait_for(job_id, "running", phase="quantize")
    [pids] = read_pids(tmp_path / "pids")
    assert client.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelling"
    wait_for(job_id, "cancelled")
    wait_gone(pids, timeout_s=20)  # by itself the engine would go on for two minutes
    wait_for_empty(settings.work_dir)  # after the row, so that a cancel is not told late


def test_drain_gives_the_job_back_uncharged(
    sessions: Sessions, make_model: MakeModel, submit: Submit, start_worker: StartWorker, start_here: StartHere,
    wait_for: WaitFor, read_pids: ReadPids, tmp_path: Path,
) -> None:  # fmt: skip
    job_id = submit(make_model(mode="slow_once", pids=str(tmp_path / "pids")))
    worker = start_worker()
    wait_for(job_id, "running", phase="quantize")
    [pids] = read_pids(tmp_path / "pids")
    started = time.monotonic()
    assert worker.drain() == 0
    assert time.monotonic() - started < 60  # the engine would go on for two minutes
    wait_gone(pids, timeout_s=20)
    job = wait_for(job_id, "queued")
    assert (job.failure_count, job.lost_count) == (0, 0)
    assert outcomes(sessions, job_id) == ["drained"]
    start_here()
    assert wait_for(job_id, "succeeded").attempt == 2


@pytest.mark.slow
def test_losing_every_connection_loses_no_job(
    client: TestClient, sessions: Sessions, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    start_worker()
    job_id = post(client, make_model(mode="steady"))
    wait_for(job_id, "running", phase="quantize")
    with sessions.begin() as session:
        others = "pid <> pg_backend_pid() AND datname = current_database() AND backend_type = 'client backend'"
        ended = session.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")).all()
    assert len(ended) >= 2
    job = wait_for(job_id, "succeeded")
    assert (job.attempt, job.lost_count, job.failure_count) == (1, 0, 0)
    story = client.get(f"/v1/jobs/{job_id}/events").json()["data"]
    assert [event["kind"] for event in story].count("layer_quantized") == 20


def test_a_result_that_misses_a_limit_is_kept_apart(
    client: TestClient, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor, settings: Settings
) -> None:
    start_worker()
    model = {"path": str(make_model(mode="rejects"))}
    asked = client.post("/v1/jobs", json={"model": model, "config": {"preset": "fp8"}, "gate": "fail"})
    job = wait_for(asked.json()["id"], "failed")
    assert job.error is not None
    assert (job.error["code"], job.error["message"]) == ("gate_failed", "G8, gate fail")
    [kept] = (settings.artifacts_dir / job.id).iterdir()
    assert kept.name.startswith("rejected-") and str(kept) in job.error["detail"]
    assert (kept / "MANIFEST.json").is_file()
    assert client.get(f"/v1/jobs/{job.id}/artifacts").json()["code"] == "not_ready"
    assert client.delete(f"/v1/jobs/{job.id}").status_code == 204
    assert not (settings.artifacts_dir / job.id).exists()


@pytest.mark.slow
def test_failures_crashes_and_damaged_output(
    make_model: MakeModel, submit: Submit, start_worker: StartWorker, wait_for: WaitFor, sessions: Sessions,
    settings: Settings,
) -> None:  # fmt: skip
    modes = ("fails", "fails_retryable", "killed", "tamper")
    ids = {mode: submit(make_model(mode, mode=mode)) for mode in modes}
    elsewhere = submit("/etc")
    start_worker()

    job = wait_for(ids["fails"], "failed")
    assert job.error is not None
    assert {name: job.error[name] for name in ("code", "message", "hint", "retryable")} == {
        "code": "nonfinite_weights",
        "message": "NaN in a",
        "hint": "Give another.",
        "retryable": False,
    }
    assert outcomes(sessions, ids["fails"]) == ["failed"]

    job = wait_for(ids["fails_retryable"], "failed")
    assert outcomes(sessions, ids["fails_retryable"]) == ["retry", "retry", "failed"]

    job = wait_for(ids["killed"], "failed")
    assert job.error is not None
    assert job.error["code"] == "engine_crashed"
    assert "SIGKILL" in job.error["message"]
    assert "stub engine starts" in job.error["detail"]
    assert outcomes(sessions, ids["killed"]) == ["retry", "failed"]

    job = wait_for(ids["tamper"], "failed")
    assert job.error is not None
    assert job.error["code"] == "artifact_corrupt"
    assert not (settings.artifacts_dir / ids["tamper"]).exists()

    job = wait_for(elsewhere, "failed")
    assert job.error is not None
    assert job.error["code"] == "path_not_allowed"
    wait_for_empty(settings.work_dir)


@pytest.mark.slow
def test_a_job_of_a_newer_service_is_refused_not_misread(
    make_model: MakeModel, submit: Submit, start_worker: StartWorker, wait_for: WaitFor, sessions: Sessions,
    client: TestClient,
) -> None:  # fmt: skip
    """Its spec has an option that this worker does not know: the job says so, and the worker goes on with others."""
    newer, usual = submit(make_model("newer"), priority=9), submit(make_model("usual"))
    with sessions.begin() as session:
        job = session.get(Job, newer)
        assert job is not None
        job.spec = job.spec | {"an_option_of_tomorrow": 1}
    start_worker()
    job = wait_for(newer, "failed")
    assert job.error is not None and job.error["code"] == "unsupported_job"
    assert "an_option_of_tomorrow" in job.error["message"] and "Upgrade this worker" in job.error["hint"]
    wait_for(usual, "succeeded")
    assert client.get(f"/v1/jobs/{newer}").json()["state"] == "failed"


def test_a_message_wakes_the_worker_at_once(
    settings: Settings, sessions: Sessions, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    slow_poll = patient(settings)
    worker = start_worker(slow_poll)
    model = make_model()
    key = create_key(sessions, "k")
    with TestClient(create_app(slow_poll), headers={"Authorization": f"Bearer {key}"}) as client:
        wait_for(post(client, model), "succeeded")  # also waits for the worker's start
        wait_for(post(client, model), "succeeded", timeout_s=slow_poll.poll_s / 2)
    with sessions.begin() as session:
        assert session.scalars(select(Outbox)).all() == []
    assert worker.drain() == 0


@pytest.mark.slow
def test_losing_every_message_costs_a_poll(
    settings: Settings, sessions: Sessions, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor,
    broker_url: str, client: TestClient,
) -> None:  # fmt: skip
    model = make_model()
    ids = [post(client, model) for _ in range(5)]

    def the_relay_has_sent_them_all() -> bool:
        with sessions.begin() as session:
            return not session.scalars(select(Outbox)).all()

    wait_until(the_relay_has_sent_them_all)
    broker = redis.Redis(unix_socket_path=broker_url.removeprefix("redis+socket://"))
    assert 1 <= broker.llen("bitfoundry") <= 5  # those that came together are one
    assert all(b"job_" not in message for message in broker.lrange("bitfoundry", 0, -1))
    broker.flushall()
    broker.close()
    start_worker()
    for job_id in ids:
        wait_for(job_id, "succeeded")


@pytest.mark.slow
def test_without_a_broker_jobs_are_taken_and_done(
    settings: Settings, sessions: Sessions, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    away = settings.model_copy(update={"broker_url": SecretStr("redis+socket:///nowhere/valkey.sock")})
    key = create_key(sessions, "k")
    worker = start_worker(away)
    with TestClient(create_app(away), headers={"Authorization": f"Bearer {key}"}) as client:
        started = time.monotonic()
        job_id = post(client, make_model())
        assert time.monotonic() - started < 5
        wait_for(job_id, "succeeded")
        wait_for(post(client, make_model("second")), "succeeded")  # found by polling: the worker is idle now
    with sessions.begin() as session:
        assert len(session.scalars(select(Outbox)).all()) == 2  # kept for better times
    assert worker.drain() == 0


@pytest.mark.slow
def test_the_workers_parent_leaves_torch_unloaded(
    make_model: MakeModel, submit: Submit, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    worker = start_worker()
    wait_for(submit(make_model()), "succeeded")
    mapped = Path(f"/proc/{worker.process.pid}/maps").read_text()
    assert "libtorch" not in mapped
    assert os.getpid() != worker.process.pid
