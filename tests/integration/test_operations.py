"""What operators see and order: workers, with whole worker processes, and the numbers of /metrics."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import leases, workers
from api.store.tables.jobs import Job
from tests.support.api import post
from tests.support.attempts import outcomes
from tests.support.service import Server, WorkerProcess, wait_gone
from tests.support.waiting import PATIENCE_S, give_time, wait_until
from worker.launchers import Launcher
from worker.supervisor import take_job, take_job_for

MakeModel = Callable[..., Path]
StartWorker = Callable[..., WorkerProcess]
WaitFor = Callable[..., Job]


def wait_worker(client: TestClient, *, state: str = "ready", timeout_s: float = PATIENCE_S) -> dict[str, Any]:
    def workers() -> list[dict[str, Any]]:
        return [worker for worker in client.get("/v1/workers").json()["data"] if worker["state"] == state]

    return wait_until(workers, timeout_s=timeout_s)[0]


@pytest.mark.slow
def test_a_drained_worker_gives_its_job_back_and_rests(
    client: TestClient, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor, sessions: Sessions,
    read_pids: Callable[..., list[list[int]]], tmp_path: Path,
) -> None:  # fmt: skip
    process = start_worker()
    job_id = post(client, make_model(mode="slow_once", pids=str(tmp_path / "pids")))
    wait_for(job_id, "running", phase="quantize")
    [pids] = read_pids(tmp_path / "pids")
    worker = wait_worker(client)
    assert [job["id"] for job in worker["jobs"]] == [job_id]
    assert worker["num_slots"] == 1 and worker["memory_bytes"] > 0
    place = f"/v1/workers/{worker['id']}"
    drained = client.post(f"{place}/drain")
    assert (drained.status_code, drained.json()["state"]) == (202, "draining")
    wait_for(job_id, "queued")
    wait_gone(pids)
    give_time(1.2)  # two polls: it takes nothing
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert (job["state"], job["waiting_reason"]) == ("queued", "the only worker is draining")
    assert process.process.poll() is None
    assert client.get(place).json()["jobs"] == []
    again = client.post(f"{place}/drain").json()
    assert again["drain_requested_at"] == drained.json()["drain_requested_at"]
    assert client.post(f"{place}/uncordon").json()["state"] == "ready"
    row = wait_for(job_id, "succeeded")
    assert (row.attempt, row.failure_count, row.lost_count) == (2, 0, 0)
    assert outcomes(sessions, job_id) == ["drained", "succeeded"]
    assert process.drain() == 0
    assert client.get("/v1/workers").json()["data"] == []
    assert client.get(place).status_code == 404


@pytest.mark.slow
def test_the_commands_about_workers(
    server: Server, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from bitfoundry.commands import main as cli

    monkeypatch.setenv("BITFOUNDRY_URL", server.url)
    monkeypatch.setenv("BITFOUNDRY_API_KEY", server.key)

    def command(line: str) -> Any:
        capsys.readouterr()
        assert cli.run([*line.split(), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    start_worker()
    with server.connect() as client:
        worker = wait_worker(client)  # type: ignore[arg-type]
    assert [each["id"] for each in command("workers list")] == [worker["id"]]
    assert command(f"workers drain {worker['id']}")["state"] == "draining"
    assert command(f"workers uncordon {worker['id']}")["state"] == "ready"


def numbers(client: TestClient) -> dict[str, float]:
    """Prometheus' text, read as its format says: name{labels} value."""
    answer = client.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([a-z_]+(?:\{(?:[a-z_]+=\"[^\"]*\",?)+\})?) (\S+)", line)
            assert match, line
            found[match[1]] = float(match[2])
    return found


def test_metrics(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    nothing = numbers(client)
    assert nothing['bitfoundry_jobs{state="queued"}'] == nothing["bitfoundry_oldest_wait_seconds"] == 0
    assert "bitfoundry_lease_left_seconds" not in nothing
    ids = [post(client, make_model(name)) for name in ("a", "b", "c")]
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
        done = leases.claim(session, worker="w", lease_s=90)
        assert lease and done
        goal = {"is_met": False, "why": "nothing that fits keeps 97 %"}
        summary = {"verdict": {"level": "good", "reason": "r"}, "goal": goal}
        leases.succeed(session, done, manifest_sha256="m", path="/p", num_bytes=1, summary=summary)
    phase = '{"name": "quantize", "state": "done", "started_at": "2026-01-01T00:00:00Z"}'
    with sessions.begin() as session:
        session.execute(text("UPDATE job SET run_at = run_at - interval '100 s' WHERE id = :id"), {"id": ids[2]})
        phases = f"jsonb_build_array('{phase}'::jsonb || '{{\"ended_at\": \"2026-01-01T00:00:07Z\"}}')"
        session.execute(text(f"UPDATE job SET phases = {phases} WHERE state = 'succeeded'"))
    found = numbers(client)
    expected = {"queued": 1, "running": 1, "succeeded": 1, "failed": 0}
    assert {name: found[f'bitfoundry_jobs{{state="{name}"}}'] for name in expected} == expected
    assert 100 <= found["bitfoundry_oldest_wait_seconds"] < 160
    assert 0 < found["bitfoundry_lease_left_seconds"] <= 60
    assert found['bitfoundry_phase_seconds{phase="quantize"}'] == 7
    assert found['bitfoundry_phase_runs{phase="quantize"}'] == 1
    assert {name: value for name, value in found.items() if "verdicts" in name} == {
        'bitfoundry_verdicts{verdict="good"}': 1
    }
    events = client.get(f"/v1/jobs/{done.job_id}/events").json()["data"]
    told = events[-1]["data"]  # as in the message of its webhook
    assert (told["verdict"], told["goal_missed"]) == ("good", goal["why"])
    assert found['bitfoundry_workers{state="ready"}'] == 0


def test_the_memory_of_gpus(client: TestClient, sessions: Sessions) -> None:
    def beat(used_bytes: int | None) -> None:
        device = {"kind": "cuda", "name": "A card", "memory_bytes": 100, "used_bytes": used_bytes}
        old = {"kind": "rocm", "name": "Of an older worker", "memory_bytes": 50}
        with sessions.begin() as session:
            workers.beat(session, workers.Registration("w:1", "w", 1, 1), devices=[device, old], live_s=60)

    beat(None)
    beat(30)
    found = {name: value for name, value in numbers(client).items() if "gpu_memory" in name}
    place = 'bitfoundry_gpu_memory_bytes{gpu="0",name="A card",what="%s",worker="w:1"}'
    other = 'bitfoundry_gpu_memory_bytes{gpu="1",name="Of an older worker",what="total",worker="w:1"}'
    assert found == {place % "total": 100, place % "used": 30, other: 50}


def test_a_silent_worker_keeps_its_drain_order(client: TestClient, sessions: Sessions) -> None:
    def beat(live_s: float) -> bool:
        with sessions.begin() as session:
            return workers.beat(session, workers.Registration("w:1", "w", 1, 1), devices=[], live_s=live_s)

    def state() -> str:
        with sessions.begin() as session:
            workers.purge(session)
        return client.get("/v1/workers/w:1").json().get("state", "gone")  # type: ignore[no-any-return]

    assert beat(60) is False
    assert client.post("/v1/workers/w:1/drain").json()["state"] == state() == "draining"
    assert beat(-1) is True
    assert state() == "silent"
    assert client.get("/v1/workers").json()["data"] == []
    assert beat(60) is True
    assert state() == "draining"
    beat(-workers.REMEMBERED.total_seconds() - 1)
    assert state() == "gone"


@pytest.mark.parametrize("has_launcher", [False, True])
def test_a_drained_worker_takes_nothing_before_it_knows(
    has_launcher: bool, client: TestClient, sessions: Sessions, make_model: MakeModel, settings: Settings
) -> None:
    """It learns of the order with its next heartbeat, and a job that is submitted before must not be its own."""
    with sessions.begin() as session:
        workers.beat(session, workers.Registration("w:1", "w", 1, settings.memory_bytes), devices=[], live_s=60)
    take = partial(take_job_for, cast(Launcher, SimpleNamespace(name="none"))) if has_launcher else take_job
    assert client.post("/v1/workers/w:1/drain").status_code == 202
    job_id = post(client, make_model())
    assert take(sessions, settings, "w:1:0") is None
    assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "queued"
    assert client.post("/v1/workers/w:1/uncordon").status_code == 202
    assert take(sessions, settings, "w:1:0") is not None
    assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "running"


def test_metrics_are_an_operators(client: TestClient) -> None:
    key = client.post("/v1/keys", json={"name": "k", "scopes": ["jobs:read", "jobs:write", "admin"]}).json()["key"]
    headers = {"Authorization": f"Bearer {key}"}
    assert client.get("/metrics", headers=headers).json()["errors"][0]["allowed"] == ["operator"]
    assert client.get("/v1/workers", headers=headers).status_code == 403
