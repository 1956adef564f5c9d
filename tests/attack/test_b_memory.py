"""One job takes all memory: it is ended with a named error, and the jobs of others are not (part B)."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api.main import create_app
from api.settings import Settings
from api.store.tables.jobs import Job
from quantcore.checkpoint.config_checks import check_config
from quantcore.checkpoint.layout import TensorHeader
from quantcore.engine.model.kinds import model_class
from quantcore.engine.model.skeleton import clean_config
from quantcore.engine.model.tiny_model import build_tiny_model, tiny_config
from quantcore.errors import ModelError
from tests.support.service import WorkerProcess, write_many_tensors
from worker import cgroup
from worker.memory_watch import EXTRA_BYTES, limit_of
from worker.supervisor import Supervisor

PLANNED = 64 << 20


def test_a_job_that_takes_more_than_its_limit_is_ended(
    settings: Settings, make_model: Callable[..., Path], submit: Callable[..., str],
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    start_worker(settings.model_copy(update={"slots": 2}))
    hostile = submit(make_model("hostile", mode="eats"), needs_memory_bytes=PLANNED)
    other = submit(make_model("other", mode="steady"), needs_memory_bytes=PLANNED)
    assert wait_for(other, "succeeded", "failed").state == "succeeded"
    job = wait_for(hostile, "succeeded", "failed", "queued")
    assert (job.state, job.attempt) == ("failed", 1)
    assert job.error is not None and (job.error["code"], job.error["retryable"]) == ("memory_limit", False)
    limit = limit_of(settings, PLANNED)
    assert limit == int(1.5 * PLANNED) + EXTRA_BYTES
    assert f"{PLANNED >> 20} MiB" in job.error["message"] and f"{limit >> 20} MiB" in job.error["message"]


def test_a_control_group_limits_all_processes_of_a_job(
    settings: Settings, make_model: Callable[..., Path], submit: Callable[..., str],
    start_here: Callable[..., Supervisor], wait_for: Callable[..., Job], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A STAND-IN for the kernel: a folder with the files of a group, whose processes the test ends as the kernel does.

    The memory controller of cgroup v2 is not there on every machine that runs the tests.
    """
    monkeypatch.setattr(cgroup, "prepare", lambda: tmp_path)
    job_id = submit(make_model(mode="slow"), needs_memory_bytes=PLANNED)
    start_here()
    wait_for(job_id, "running", phase="quantize")
    (group,) = tmp_path.glob(f"bitfoundry-{job_id}.*")
    assert int((group / "memory.max").read_text()) == limit_of(settings, PLANNED)
    assert (group / "memory.oom.group").read_text() == "1"
    (group / "memory.peak").write_text(str(2000 << 20))
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 3\noom_group_kill 1\n")
    os.killpg(int((group / "cgroup.procs").read_text()), signal.SIGKILL)
    job = wait_for(job_id, "failed", "retry_wait", "queued")
    assert job.error is not None and (job.error["code"], job.error["retryable"]) == ("memory_limit", False)
    assert f"{PLANNED >> 20} MiB" in job.error["message"] and "2000 MiB" in job.error["message"]


def test_limits_come_from_the_plan(settings: Settings) -> None:
    settings = settings.model_copy(update={"memory_bytes": 8 << 30, "memory_margin": 2.0, "engine_ranks": 2})
    assert limit_of(settings, 1 << 30) == 2 * (3 << 30)
    assert limit_of(settings, 4 << 30) == limit_of(settings, None) == 2 * (8 << 30)


def test_a_header_that_takes_too_much_memory(settings: Settings, client: TestClient) -> None:
    """The process that reads it ends with an error, and the API goes on."""
    model = settings.model_roots[0] / "many"
    write_many_tensors(model, 90_000)
    small = settings.model_copy(update={"reader_memory_bytes": 48 << 20})
    with TestClient(create_app(small), headers=client.headers) as limited:
        for _ in range(2):
            answer = limited.get("/v1/models/inspect", params={"path": str(model)})
            assert (answer.status_code, answer.json()["code"]) == (422, "model_too_large"), answer.text
            assert "48 MiB" in answer.json()["detail"]
        assert limited.get("/healthz/live").status_code == 200


def test_numbers_of_a_config_are_checked_before_anything_is_built() -> None:
    tensors = {"a.weight": TensorHeader("F32", (8, 8), "model.safetensors", 0, 256)}
    with pytest.raises(ModelError, match="num_labels"):
        check_config({"model_type": "llama", "hidden_size": 8, "num_labels": 1_000_000_000}, tensors)


@pytest.mark.parametrize("model_type", ["llava", "llama4", "qwen2_audio"])
def test_a_config_without_its_parts_makes_no_large_twin(model_type: str) -> None:
    """Transformers fills in the sizes of a published model: 21 GB and more."""
    config = {"model_type": model_type}
    kind, _ = model_class(clean_config(config), config)
    with pytest.raises(ModelError) as caught:
        build_tiny_model(tiny_config(config), kind=kind)
    assert caught.value.code == "config_implausible"
