"""What clients ask of running jobs, with whole workers and a stub engine: pause, resume, an end after some seconds."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text, update

from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import events, workers
from api.store.states import State
from api.store.tables.jobs import Job
from tests.support.api import post
from tests.support.attempts import outcomes
from tests.support.params import with_rare
from tests.support.service import WorkerProcess, is_alive, wait_for_empty, wait_gone
from tests.support.waiting import give_time, wait_until
from worker.supervisor import Supervisor, remove_stale_attempts

MakeModel = Callable[..., Path]
Submit = Callable[..., str]
StartWorker = Callable[..., WorkerProcess]
StartHere = Callable[..., Supervisor]
WaitFor = Callable[..., Job]
ReadPids = Callable[..., list[list[int]]]


@pytest.mark.parametrize("mode", with_rare(["slow_once", "ignores_sigterm"], ["ignores_sigterm"]))
def test_pause_ends_the_engine_and_resume_starts_it_again(
    mode: str, client: TestClient, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor,
    read_pids: ReadPids, tmp_path: Path, settings: Settings, sessions: Sessions,
) -> None:  # fmt: skip
    start_worker()
    job_id = post(client, make_model(mode=mode, pids=str(tmp_path / "pids")))
    wait_for(job_id, "running", phase="quantize")
    [pids] = read_pids(tmp_path / "pids")
    assert all(map(is_alive, pids))
    assert client.post(f"/v1/jobs/{job_id}/pause").json()["state"] == "pausing"
    wait_for(job_id, "paused")
    wait_gone(pids, timeout_s=20)  # by itself the engine would go on for two minutes
    wait_for_empty(settings.work_dir)
    give_time(3 * settings.poll_s)  # nobody takes it
    assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "paused"
    if mode == "ignores_sigterm":
        assert client.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelled"
        return
    assert client.post(f"/v1/jobs/{job_id}/resume").json()["state"] == "queued"
    job = wait_for(job_id, "succeeded")
    assert (job.attempt, job.failure_count, job.lost_count) == (2, 0, 0)
    assert outcomes(sessions, job_id) == ["paused", "succeeded"]


@pytest.mark.slow
def test_a_pause_of_a_job_whose_worker_dies_is_kept(
    client: TestClient, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor, sessions: Sessions
) -> None:
    worker = start_worker()
    job_id = post(client, make_model(mode="slow_once"))
    wait_for(job_id, "running", phase="quantize")
    worker.kill()
    assert client.post(f"/v1/jobs/{job_id}/pause").json()["state"] == "pausing"
    start_worker()
    wait_for(job_id, "paused")
    client.post(f"/v1/jobs/{job_id}/resume")
    wait_for(job_id, "succeeded")
    assert outcomes(sessions, job_id) == ["lost", "succeeded"]


@pytest.mark.parametrize("how", with_rare(["pause", "drain", "kill"], ["drain", "kill"]))
def test_an_attempt_finds_what_the_one_before_it_kept(
    how: str, client: TestClient, make_model: MakeModel, start_worker: StartWorker, start_here: StartHere,
    wait_for: WaitFor, settings: Settings, sessions: Sessions,
) -> None:  # fmt: skip
    worker = start_worker()
    job_id = post(client, make_model(mode="goes_on"))
    wait_until_kept(settings)
    if how == "pause":
        client.post(f"/v1/jobs/{job_id}/pause")
        wait_for(job_id, "paused")
        wait_until(lambda: [path.name for path in settings.work_dir.iterdir()] == [f"{job_id}.resume"])
        client.post(f"/v1/jobs/{job_id}/resume")
    else:
        worker.kill() if how == "kill" else worker.drain()
        start_worker()
    wait_for(job_id, "succeeded")
    with sessions.begin() as session:
        said = [event.data["message"] for event in events.read(session, job_id, after=0, limit=999)
                if event.kind == "warning"]  # fmt: skip
    assert said == ["half of the work"]
    start_here()
    wait_for_empty(settings.work_dir)


def test_a_retry_of_a_failed_job_finds_what_was_kept(
    client: TestClient, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor, settings: Settings,
    sessions: Sessions,
) -> None:  # fmt: skip
    start_worker()
    job_id = post(client, make_model(mode="goes_on"), limits={"max_runtime_s": 1})
    job = wait_for(job_id, "failed")
    assert job.error is not None and job.error["code"] == "max_runtime_exceeded" and job.finished_at is not None
    wait_until(lambda: [path.name for path in settings.work_dir.iterdir()] == [f"{job_id}.resume"])
    kept_until = datetime.fromisoformat(client.get(f"/v1/jobs/{job_id}").json()["progress_kept_until"])
    assert kept_until - job.finished_at == timedelta(days=1)
    start_worker()  # its start clears away what no job will take
    give_time(3 * settings.poll_s)
    assert client.post(f"/v1/jobs/{job_id}/retry").json()["progress_kept_until"] is None
    wait_for(job_id, "succeeded")
    with sessions.begin() as session:
        said = [event.data for event in events.read(session, job_id, after=0, limit=999) if event.kind == "warning"]
    assert [data["message"] for data in said] == ["half of the work"]


@pytest.mark.parametrize(("age_s", "has_room", "stays"), [(0, True, True), (90_000, True, False), (0, False, False)])
def test_what_a_failed_job_saved_is_kept_for_a_day_and_while_there_is_room(
    age_s: int, has_room: bool, stays: bool, sessions: Sessions, submit: Submit, make_model: MakeModel,
    settings: Settings,
) -> None:  # fmt: skip
    job_id = submit(make_model())
    values = {
        "state": State.FAILED, "attempt": 1, "error": {"code": "worker_lost", "retryable": True},
        "finished_at": datetime.now(UTC) - timedelta(seconds=age_s),
    }  # fmt: skip
    folders = [settings.work_dir / f"{job_id}.resume", settings.work_dir / f"{job_id}.7" / "resume"]
    for folder in folders:
        folder.mkdir(parents=True)
    with sessions.begin() as session:
        session.execute(text("ALTER TABLE job DISABLE TRIGGER USER"))
        session.execute(update(Job).values(values))
        remove_stale_attempts(session, settings, has_room=has_room)
        session.rollback()
    assert [folder.exists() for folder in folders] == [stays, stays]


@pytest.mark.slow
def test_nothing_is_kept_of_a_job_that_ended(
    client: TestClient, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor, settings: Settings
) -> None:
    worker = start_worker()
    model = make_model(mode="goes_on")
    cancelled = post(client, model)
    wait_until_kept(settings)
    client.post(f"/v1/jobs/{cancelled}/cancel")
    wait_for(cancelled, "cancelled")
    wait_for_empty(settings.work_dir)
    paused = post(client, model)
    wait_until_kept(settings)
    client.post(f"/v1/jobs/{paused}/pause")
    wait_for(paused, "paused")
    client.post(f"/v1/jobs/{paused}/cancel")
    assert list(settings.work_dir.iterdir()) != []
    worker.drain()
    start_worker()  # its start clears away what no job will take
    wait_for_empty(settings.work_dir)


def wait_until_kept(settings: Settings) -> None:
    wait_until(lambda: list(settings.work_dir.glob("*/resume/kept")))


@pytest.mark.slow
def test_a_job_that_runs_too_long_is_ended(
    client: TestClient, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor, read_pids: ReadPids,
    tmp_path: Path,
) -> None:  # fmt: skip
    start_worker()
    model = make_model(mode="slow", pids=str(tmp_path / "pids"))
    job_id = post(client, model, limits={"max_runtime_s": 1})
    job = wait_for(job_id, "failed")
    assert job.error is not None
    assert (job.error["code"], job.error["retryable"]) == ("max_runtime_exceeded", True)
    assert "retry it" in job.error["hint"]
    [pids] = read_pids(tmp_path / "pids")
    wait_gone(pids, timeout_s=20)  # by itself the engine would go on for two minutes


@pytest.mark.slow
def test_a_live_worker_is_known_until_it_leaves(
    client: TestClient, sessions: Sessions, make_model: MakeModel, start_worker: StartWorker, settings: Settings
) -> None:
    def live() -> list[int]:
        with sessions.begin() as session:
            return [worker.memory_bytes for worker in workers.find_live(session)]

    def wait_for_memory(wanted: list[int]) -> None:
        wait_until(lambda: live() == wanted, note=live)

    worker = start_worker(settings.model_copy(update={"memory_bytes": 1000}))
    wait_for_memory([1000])
    job_id = post(client, make_model())
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert job["waiting_reason"].startswith("no live worker has ")
    give_time(1)
    assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "queued"  # left alone: it needs more
    assert worker.drain() == 0
    assert live() == []
    killed = start_worker(settings.model_copy(update={"memory_bytes": 1000}))
    wait_for_memory([1000])
    killed.kill()
    wait_for_memory([])
