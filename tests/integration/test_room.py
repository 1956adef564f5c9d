"""A disk that runs short: nothing new begins below the reserve, and all goes on by itself when there is room again."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest
from fastapi.testclient import TestClient

from api import disk
from api.http.security import create_key
from api.main import create_app
from api.settings import Settings
from api.store.engine import Sessions
from api.store.tables.jobs import Job
from tests.support.attempts import outcomes
from tests.support.faults import ApiProcess, on_a_small_disk, seen_by
from tests.support.service import WorkerProcess, wait_for_empty
from tests.support.waiting import wait_until
from worker.workspace import remove_attempt

EVERYTHING = 1 << 60


def test_what_would_be_stored_is_refused(
    settings: Settings, sessions: Sessions, make_model: Callable[..., Path], submit: Callable[..., str]
) -> None:
    headers = {"Authorization": f"Bearer {create_key(sessions, 'k')}"}
    body = {"model": {"path": str(make_model())}, "config": {"preset": "fp8"}}
    earlier = submit()
    short = settings.model_copy(update={"reserved_disk_bytes": EVERYTHING})
    with TestClient(create_app(short), headers=headers) as client:
        upload = f"/v1/uploads/upl_{32 * '0'}"
        answers = [
            client.post("/v1/jobs", json=body),
            client.post(f"/v1/jobs/{earlier}/clone", json={}),
            client.post(f"/v1/jobs/{earlier}/retry"),
            client.post("/v1/sweeps", json={"job": body, "matrix": {"/config": [{"preset": "fp8"}]}}),
            client.post("/v1/datasets", files={"file": ("a.jsonl", b'{"text": "a"}')}),
            client.post("/v1/uploads", json={"filename": "a.jsonl"}),
            client.put(f"{upload}/parts/1", params={"sha256": 64 * "0"}, content=b"a"),
            client.post(f"{upload}/complete", json={"sha256": 64 * "0"}),
        ]
        for answer in answers:
            assert (answer.status_code, answer.json()["code"]) == (507, "disk_full"), answer.text
            assert answer.headers["Retry-After"] and answer.json()["hint"]
        dry = client.post("/v1/jobs", json=body, params={"dry_run": True})
        assert dry.status_code == 200, dry.text
        assert client.get("/v1/jobs").status_code == 200
        ready = client.get("/healthz/ready")
        assert (ready.status_code, ready.json()["status"], ready.json()["disk"]) == (200, "degraded", "disk_full")
        assert "bitfoundry_disk_free_bytes " in client.get("/metrics").text
        assert client.post(f"/v1/jobs/{earlier}/cancel").status_code == 202  # what makes room is not refused
    with TestClient(create_app(settings), headers=headers) as client:
        assert client.post("/v1/jobs", json=body).status_code == 202
        assert client.get("/healthz/ready").json()["disk"] == "ok"


@pytest.mark.slow
def test_a_worker_without_room_says_so_and_goes_on_by_itself(
    settings: Settings, sessions: Sessions, make_model: Callable[..., Path], submit: Callable[..., str],
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job], client: TestClient,
) -> None:  # fmt: skip
    prefix = on_a_small_disk(settings.data_dir, size="8m", filler_bytes=7 << 20)
    worker = start_worker(settings.model_copy(update={"reserved_disk_bytes": 4 << 20}), prefix=prefix)
    job_id = submit(make_model())

    def reason() -> str:
        return str(client.get(f"/v1/jobs/{job_id}").json().get("waiting_reason") or "")

    wait_until(lambda: reason().startswith("no worker accepts jobs: 0.00 GB are free"))
    (shown,) = client.get("/v1/workers").json()["data"]
    assert (shown["state"], "reserved" in shown["blocked_reason"]) == ("blocked", True)
    assert 'bitfoundry_workers{state="blocked"} 1.0' in client.get("/metrics").text
    assert outcomes(sessions, job_id) == []

    (seen_by(worker.process, settings.data_dir) / "filler").unlink()
    wait_for(job_id, "succeeded")
    wait_until(lambda: client.get("/v1/workers").json()["data"][0]["state"] == "ready")
    assert outcomes(sessions, job_id) == ["succeeded"]


@pytest.mark.slow
def test_an_engine_is_ended_before_it_takes_the_reserve(
    settings: Settings, sessions: Sessions, make_model: Callable[..., Path], submit: Callable[..., str],
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    prefix = on_a_small_disk(settings.data_dir, size="8m")
    worker = start_worker(settings.model_copy(update={"reserved_disk_bytes": 4 << 20}), prefix=prefix)
    job_id = submit(make_model(mode="slow_once"))
    wait_for(job_id, "running", phase="quantize")
    folder = seen_by(worker.process, settings.data_dir)
    (folder / "filler").write_bytes(bytes(5 << 20))
    wait_until(lambda: outcomes(sessions, job_id) == ["retry"])
    wait_for_empty(folder / "work")
    (folder / "filler").unlink()
    wait_for(job_id, "succeeded")


@pytest.mark.slow
def test_a_read_only_disk_is_named(settings: Settings, sessions: Sessions, tmp_path: Path) -> None:
    settings.data_dir.mkdir()
    headers = {"Authorization": f"Bearer {create_key(sessions, 'k')}"}
    flags = ["-m"] if os.geteuid() == 0 else ["-U", "-r", "-m"]
    mount = 'mount -t tmpfs -o ro tmpfs "$1"; shift; exec "$@"'
    prefix = ["unshare", *flags, "sh", "-c", mount, "sh", str(settings.data_dir)]
    with (
        ApiProcess(settings, tmp_path / "api.log", prefix=prefix) as api,
        httpx2.Client(base_url=api.url, headers=headers, trust_env=False) as client,
    ):
        answer = client.post("/v1/datasets", files={"file": ("a.jsonl", b'{"text": "a"}')})
        assert (answer.status_code, answer.json()["code"]) == (507, "disk_read_only"), answer.text
        assert client.get("/healthz/ready").json()["disk"] == "disk_read_only"
        assert client.get("/v1/jobs").status_code == 200


@pytest.mark.parametrize(("reserved", "fault"), [(0, None), (EVERYTHING, "disk_full")])
def test_the_reserve_is_a_setting(reserved: int, fault: str | None, settings: Settings) -> None:
    found = disk.measure(settings.model_copy(update={"reserved_disk_bytes": reserved}))
    assert (found.fault(), found.reserved_bytes) == (fault, reserved)
    total = shutil.disk_usage(settings.data_dir.parent).total
    assert 0 < disk.measure(settings).reserved_bytes <= min(2 << 30, total // 20)


@pytest.mark.slow
def test_the_folder_of_a_killed_attempt_is_removed_while_workers_run(
    settings: Settings, make_model: Callable[..., Path], submit: Callable[..., str],
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    """Not that of an attempt that lives."""
    workers = [start_worker(), start_worker()]
    job_id = submit(make_model(mode="slow_once"))
    job = wait_for(job_id, "running", phase="quantize")
    living = settings.work_dir / f"{job_id}.{job.fence}"
    stale = settings.work_dir / f"job_{32 * 'a'}.7"  # of a job that is no more
    (stale / "resume").mkdir(parents=True)
    wait_until(lambda: not stale.exists())
    assert living.exists()

    (holder,) = [each for each in workers if job.worker and f":{each.process.pid}:" in job.worker]
    holder.kill()
    wait_for(job_id, "succeeded")
    wait_for_empty(settings.work_dir)


def test_what_a_waiting_job_goes_on_from_stays(tmp_path: Path) -> None:
    folder = tmp_path / "job_1.7"
    (folder / "output").mkdir(parents=True)
    (folder / "task.json").write_text("{}")
    (folder / "resume").mkdir()
    (folder / "resume" / "state").write_text("half of the work")
    remove_attempt(folder, may_go_on=True)
    assert [path.name for path in folder.iterdir()] == ["resume"]
    remove_attempt(folder, may_go_on=False)
    assert not folder.exists()


@pytest.mark.slow
def test_a_disk_without_inodes_is_a_full_disk(
    settings: Settings, sessions: Sessions, make_model: Callable[..., Path], submit: Callable[..., str],
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job], client: TestClient,
) -> None:  # fmt: skip
    """Megabytes are free, and no file can be made: jobs wait instead of failing, and go on by themselves."""
    prefix = on_a_small_disk(settings.data_dir, size="8m,nr_inodes=200")
    worker = start_worker(settings.model_copy(update={"reserved_disk_bytes": 1 << 20}), prefix=prefix)
    wait_until(lambda: client.get("/v1/workers").json()["data"])  # from now on it has the disk
    folder = seen_by(worker.process, settings.data_dir)
    made = []
    with suppress(OSError):
        for number in range(200):
            made.append(folder / f"file{number}")
            made[-1].touch()
    assert 0 < len(made) < 200
    wait_until(lambda: client.get("/v1/workers").json()["data"][0]["state"] == "blocked")
    job_id = submit(make_model())

    def reason() -> str:
        return str(client.get(f"/v1/jobs/{job_id}").json().get("waiting_reason") or "")

    wait_until(lambda: "more files (inodes)" in reason(), note=reason)
    assert outcomes(sessions, job_id) == []
    for path in made:
        path.unlink(missing_ok=True)
    wait_for(job_id, "succeeded")
