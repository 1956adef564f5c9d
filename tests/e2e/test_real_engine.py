"""The whole way with the real engine and a tiny random model: HTTP in, proven artifact out, over the real stack."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from bitfoundry.client.answers import Job
from bitfoundry.client.service import Client
from bitfoundry.errors import ApiError
from bitfoundry.local.stack import LocalStack
from tests.support.models import tiny_model

CALIBRATION = {"source": "builtin", "num_samples": 4, "seq_len": 64}
EXPORTS = ["quark", "compressed_tensors"]
SHORT_TIMES = {"BITFOUNDRY_LEASE_S": "4", "BITFOUNDRY_HEARTBEAT_S": "1", "BITFOUNDRY_POLL_S": "1"}
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """A stack whose leases are short, and which may read models beside its home."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="bf-test-", dir="/tmp") as folder:
        for name, value in SHORT_TIMES.items():
            patch.setenv(name, value)
        patch.delenv("DATABASE_URL", raising=False)
        patch.delenv("BROKER_URL", raising=False)
        with LocalStack(Path(folder) / "home", 0, model_roots=[Path(folder)]) as stack:
            tiny_model(stack.home.parent / "model")
            yield stack


@pytest.fixture
def client(stack: LocalStack) -> Iterator[Client]:
    with Client(stack.url, stack.api_key) as client:
        yield client


def wait_until(stack: LocalStack, client: Client, job: Job, reached: Callable[[Job], bool]) -> Job:
    limit = time.monotonic() + LIMIT_S
    while not reached(job := client.get(job.id)):
        assert not job.is_final, job
        assert time.monotonic() < limit, job
        stack.tend()
        time.sleep(0.2)
    return job


def engines() -> list[psutil.Process]:
    """Running engine processes below this one, with the keeper of each."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # one that ends while we look
            if {"quantcore", "run"} <= set(process.cmdline()):
                found.append(process)
    return found


def test_a_job_ends_in_a_proven_artifact(stack: LocalStack, client: Client, tmp_path: Path) -> None:
    model = stack.home.parent / "model"
    planned = client.plan(model, config="fp8", calibration=CALIBRATION, export=EXPORTS)
    assert planned["num_blocks"] == 3
    job = client.submit(model, config="fp8", calibration=CALIBRATION, export=EXPORTS, labels={"e2e": "1"})
    assert job.state == "queued"
    job = client.wait(job.id, timeout_s=LIMIT_S, poll_s=0.5)
    assert job.state == "succeeded", job.error
    assert job.summary is not None and job.artifact is not None

    folder = client.download(job.id, tmp_path / "artifact")
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    listed = {file["path"] for file in manifest["files"]}
    assert {f"{name}/config.json" for name in EXPORTS} <= listed
    assert "report.json" in listed
    assert job.summary["exports"].keys() == set(EXPORTS)
    assert job.summary["size_after_bytes"] < job.summary["size_before_bytes"]
    kinds = {event.kind for event in client.events(job.id)}
    assert {"phase_started", "progress", "completed"} <= kinds
    with pytest.raises(ApiError) as final:
        client.cancel(job.id)
    assert final.value.code == "job_already_final"


def test_the_containers_health_check_is_satisfied(stack: LocalStack) -> None:
    compose = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text())
    code = compose["services"]["api"]["healthcheck"]["test"][3]
    assert subprocess.run([sys.executable, "-c", code.replace("http://127.0.0.1:8000", stack.url)]).returncode == 0
    assert (
        subprocess.run([sys.executable, "-c", code.replace(":8000", ":1")], stderr=subprocess.DEVNULL).returncode != 0
    )


@pytest.mark.slow
def test_a_cancel_ends_the_engine(stack: LocalStack, client: Client) -> None:
    job = client.submit(stack.home.parent / "model", config="w4a16", calibration=CALIBRATION)
    wait_until(stack, client, job, lambda job: job.state == "running")
    client.cancel(job.id)
    assert wait_until(stack, client, job, lambda job: job.is_final).state == "cancelled"
    assert engines() == []
    assert list((stack.home / "work").iterdir()) == []


@pytest.mark.slow
def test_a_job_survives_its_worker(stack: LocalStack, client: Client) -> None:
    job = client.submit(stack.home.parent / "model", config="int8_dynamic", calibration=CALIBRATION)
    wait_until(stack, client, job, lambda job: job.state == "running" and bool(engines()))
    orphans = engines()
    os.kill(stack._programs["worker"].pid, signal.SIGKILL)
    psutil.wait_procs(orphans, timeout=20)
    alive = [each for each in orphans if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert alive == []  # the engine did not outlive its worker
    job = wait_until(stack, client, job, lambda job: job.is_final)
    assert job.state == "succeeded", job.error
    assert job.attempt == 2
    assert engines() == []
