"""Faults of workers: a stop or a cancel in any phase, a clock that lies, poison, a disk that is full."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import select

from api.http.security import create_key
from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import control
from api.store.tables.jobs import Attempt, Dataset, Job
from quantcore.config import presets
from tests.support.attempts import outcomes
from tests.support.faults import ApiProcess, on_a_small_disk, seen_by
from tests.support.models import tiny_model
from tests.support.service import WorkerProcess, wait_for_empty, wait_gone

pytestmark = pytest.mark.short_leases
MakeModel = Callable[..., Path]
Submit = Callable[..., str]
StartWorker = Callable[..., WorkerProcess]
WaitFor = Callable[..., Job]
PHASES = ("resolve", "download", "plan", "quantize", "export", "verify")


@pytest.mark.slow
def test_a_cancel_in_every_phase(
    make_model: MakeModel, submit: Submit, start_worker: StartWorker, wait_for: WaitFor, sessions: Sessions,
    read_pids: Callable[..., list[list[int]]], settings: Settings, tmp_path: Path,
) -> None:  # fmt: skip
    start_worker()
    for number, phase in enumerate(PHASES, start=1):
        job_id = submit(make_model(phase, stays_in=phase, pids=str(tmp_path / "pids")))
        wait_for(job_id, "running", phase=phase)
        pids = read_pids(tmp_path / "pids", num_starts=number)[-1]
        with sessions.begin() as session:
            control.cancel(session, job_id)
        wait_for(job_id, "cancelled")
        wait_gone(pids)
        wait_for_empty(settings.work_dir)
        assert outcomes(sessions, job_id) == ["cancelled"]
    assert not list(settings.artifacts_dir.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_drain_in_every_phase(
    phase: str, make_model: MakeModel, submit: Submit, start_worker: StartWorker, wait_for: WaitFor,
    sessions: Sessions, settings: Settings,
) -> None:  # fmt: skip
    worker = start_worker()
    job_id = submit(make_model(stays_in=phase))
    wait_for(job_id, "running", phase=phase)
    assert worker.drain(timeout_s=settings.stop_grace_s + 8) == 0
    job = wait_for(job_id, "queued")
    assert (job.failure_count, job.lost_count) == (0, 0)
    assert outcomes(sessions, job_id) == ["drained"]


@pytest.mark.slow
@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_wrong_moves_no_lease(
    hours: int, make_model: MakeModel, submit: Submit, start_worker: StartWorker, wait_for: WaitFor,
    sessions: Sessions, tmp_path: Path,
) -> None:  # fmt: skip
    """Simulated in the worker's Python, which is all of it that reads a clock."""
    folder = tmp_path / "clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import time\nreal = time.time\ntime.time = lambda: real() + 3600 * {hours}\n"
        f"open({str(tmp_path / 'was_here')!r}, 'w').write(str(time.time() - real()))\n"
    )
    start_worker(more={"PYTHONPATH": str(folder)})
    job_id = submit(make_model(mode="steady"))
    job = wait_for(job_id, "running")
    assert job.lease_expires_at is not None
    with sessions.begin() as session:
        left = select(Job.lease_expires_at - Attempt.started_at).join(Attempt, Attempt.job_id == Job.id)
        left_s = session.scalar(left)
    assert left_s is not None and 0 < left_s.total_seconds() < 10
    job = wait_for(job_id, "succeeded")
    assert (job.attempt, job.lost_count) == (1, 0)
    assert abs(float((tmp_path / "was_here").read_text()) - 3600 * hours) < 1


@pytest.mark.slow
def test_a_job_that_takes_every_worker_along(
    make_model: MakeModel, submit: Submit, start_worker: StartWorker, wait_for: WaitFor, sessions: Sessions
) -> None:
    poison = submit(make_model(mode="kills_its_worker"))
    for _ in range(4):
        start_worker().process.wait(30)
    start_worker()
    job = wait_for(poison, "failed")
    assert job.error is not None and job.error["code"] == "worker_lost"
    assert outcomes(sessions, poison) == ["lost"] * 4
    wait_for(submit(make_model("good")), "succeeded")


@pytest.mark.slow
def test_a_worker_without_room_on_its_disk(
    make_model: MakeModel, submit: Submit, start_worker: StartWorker, wait_for: WaitFor, settings: Settings,
    sessions: Sessions,
) -> None:  # fmt: skip
    """In the checkpoint's folder (the task file does not fit) the attempt fails in a way that may pass."""
    prefix = on_a_small_disk(settings.data_dir, size="64k", filler_bytes=65_536)
    worker = start_worker(settings.model_copy(update={"reserved_disk_bytes": 0}), prefix=prefix)
    job = wait_for(submit(make_model()), "failed")
    assert job.error is not None
    assert (job.error["code"], job.error["retryable"]) == ("disk_full", True)
    assert outcomes(sessions, job.id) == ["retry", "retry", "failed"]
    wait_for_empty(seen_by(worker.process, settings.work_dir))
    assert worker.process.poll() is None


@pytest.mark.slow
def test_an_upload_that_does_not_fit_on_the_disk(settings: Settings, sessions: Sessions, tmp_path: Path) -> None:
    key = create_key(sessions, "k")
    prefix = on_a_small_disk(settings.data_dir, size="1m")
    with ApiProcess(settings, tmp_path / "api.log", prefix=prefix) as api:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.Client(base_url=api.url, headers=headers, trust_env=False) as client:
            row = b'{"text": "' + b"word " * 200 + b'"}\n'
            large = client.post("/v1/datasets", files={"file": ("large.jsonl", row * 2000)})
            assert (large.status_code, large.json()["code"]) == (507, "disk_full"), large.text
            assert large.json()["hint"]
            part = client.post("/v1/uploads", json={"filename": "large.jsonl"}).json()["id"]
            answer = client.put(f"/v1/uploads/{part}/parts/1", content=row * 2000)
            assert (answer.status_code, answer.json()["code"]) == (507, "disk_full"), answer.text
            uploads = seen_by(api.process, settings.uploads_dir)
            assert [path for path in uploads.rglob("*") if path.is_file()] == []
            small = client.post("/v1/datasets", files={"file": ("small.jsonl", row * 20)})
            assert small.status_code == 201, small.text  # there is room again: nothing was left behind
    with sessions.begin() as session:
        assert len(session.scalars(select(Dataset)).all()) == 1


@pytest.mark.slow
def test_an_engine_without_room_for_its_result(tmp_path: Path) -> None:
    """The real one: it says why in its last event, and leaves nothing half-written."""
    model = tiny_model(tmp_path / "model")
    disk = tmp_path / "disk"
    task = {
        "model_dir": str(model), "output_dir": str(disk / "out"), "resume_dir": str(disk / "resume"),
        "config": presets.resolve("int8_dynamic").to_dict(), "export": ["fake_quantized"],
        "calibration": {"num_samples": 2, "seq_len": 32},
    }  # fmt: skip
    file = tmp_path / "task.json"
    file.write_text(json.dumps(task))
    prefix = on_a_small_disk(disk, size="64k")
    look = 'python="$1"; "$python" -m quantcore run "$2"; echo "status $?"; ls "$3"'
    command = [*prefix, "sh", "-c", look, "sh", sys.executable, str(file), str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said, _, left = done.stdout.partition("status 1\n")
    last = json.loads(said.splitlines()[-1])
    assert (last["kind"], last["code"], last["retryable"]) == ("failed", "disk_full", True)
    assert "out" not in left.split()
