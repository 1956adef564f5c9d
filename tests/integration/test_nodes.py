"""The real engine on two nodes: two workers on this machine, which meet over the loopback as they would elsewhere.

Those that are to be killed are processes of their own; the others are threads of the test's.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
from sqlalchemy import select

from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import control, events
from api.store.tables.jobs import Artifact, Attempt, Job
from quantcore.checkpoint.artifact import sha256
from quantcore.config import presets
from tests.support.attempts import StartHere, run_as
from tests.support.models import tiny_model
from tests.support.service import ROOT, WorkerProcess, wait_for_empty
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

Submit = Callable[..., str]
StartWorker = Callable[..., WorkerProcess]
WaitFor = Callable[..., Job]
LIMIT_S = 540
ASKED: dict[str, Any] = {
    "config": {**presets.resolve("w4a16").to_dict(), "algo_config": [{"name": "gptq"}]},
    "calibration": {"source": "builtin", "num_samples": 70, "seq_len": 32},
    "export": ["quark"],
}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    more = {
        "engine_command": "{python} {launcher} -m quantcore run",
        "confine_engine": True,
        "node_address": "127.0.0.1",
        "gather_s": 120,
    }
    return settings.model_copy(update=more | {"lease_s": 20, "heartbeat_s": 1, "stop_grace_s": 10})


@pytest.fixture
def model(settings: Settings) -> Path:
    return tiny_model(settings.model_roots[0] / "model", num_hidden_layers=12)


def result_of(sessions: Sessions, job_id: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The digests of the weights, and the report."""
    with sessions.begin() as session:
        folder = session.scalar(select(Artifact.path).where(Artifact.job_id == job_id))
    assert folder is not None
    weights = {path.name: sha256(path) for path in Path(folder).rglob("*.safetensors")}
    return weights, json.loads((Path(folder) / "report.json").read_text())


def first_block(sessions: Sessions, job_id: str) -> int:
    """Where the last attempt began."""
    with sessions.begin() as session:
        story = events.read(session, job_id, after=0, limit=10_000, kinds=("phase_started", "layer_quantized"))
    start = max(event.seq for event in story if event.data.get("phase") == "quantize")
    return min(event.data["block"] for event in story if event.seq > start and event.kind == "layer_quantized")


def engines() -> list[psutil.Process]:
    """Processes of engines below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "quantcore" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until_quantizing(sessions: Sessions, job_id: str, num_blocks: int) -> None:
    def is_there() -> bool:
        with sessions.begin() as session:
            job = session.get_one(Job, job_id)
            assert job.state in ("queued", "running"), job.error
            return job.phase == "quantize" and (job.progress or {}).get("done", 0) >= num_blocks

    wait_until(is_there, timeout_s=LIMIT_S)


@pytest.fixture
def expected(
    sessions: Sessions, model: Path, submit: Submit, start_here: StartHere, wait_for: WaitFor
) -> dict[str, str]:
    """The digests of what one worker makes of it."""
    alone = start_here()
    job_id = submit(model, **ASKED)
    wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
    alone.drain()
    weights, report = result_of(sessions, job_id)
    assert weights and "ranks" not in report["summary"]
    return weights


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_nodes_give_the_same_bytes(
    num_ranks: int, expected: dict[str, str], sessions: Sessions, model: Path, submit: Submit,
    start_here: StartHere, wait_for: WaitFor, settings: Settings,
) -> None:  # fmt: skip
    """And say what each process held beside what was planned for it."""
    for _ in range(2):
        start_here(settings.model_copy(update={"engine_ranks": num_ranks}))
    job_id = submit(model, nodes=2, **ASKED)
    job = wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
    assert job.attempt == 1
    weights, report = result_of(sessions, job_id)
    assert weights == expected
    jsonschema.validate(report, json.loads((ROOT / "docs/report.schema.json").read_text()))
    rows = report["summary"]["ranks"]
    assert [row["rank"] for row in rows] == list(range(2 * num_ranks))
    assert all(row["peak_memory_bytes"] > 100e6 and row["planned_peak_memory_bytes"] > 100e6 for row in rows)
    assert rows[0]["planned_peak_memory_bytes"] < report["summary"]["planned_peak_memory_bytes"]
    wait_for_empty(settings.work_dir)
    assert engines() == []


@pytest.mark.parametrize("who", ["leader", "node"])
def test_a_node_that_is_killed_costs_a_few_blocks(
    who: str, expected: dict[str, str], sessions: Sessions, model: Path, submit: Submit, start_worker: StartWorker,
    start_here: StartHere, wait_for: WaitFor,
) -> None:  # fmt: skip
    """The next attempt, with another worker, goes on behind the last saved block and gives the same bytes."""
    two = [start_worker(), start_worker()]
    job_id = submit(model, nodes=2, **ASKED)
    wait_until_quantizing(sessions, job_id, 2)
    before = engines()
    assert len(before) >= 4
    run_as(sessions, job_id, two)[who].kill()
    psutil.wait_procs(before, timeout=60)
    assert [each for each in before if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
    start_here()
    job = wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
    with sessions.begin() as session:
        codes = [
            (attempt.error or {}).get("code")
            for attempt in session.scalars(select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.number))
        ]
    assert (job.attempt, codes) == (2, [None if who == "leader" else "node_lost", None])
    assert first_block(sessions, job_id) > 0, "it went on"
    assert result_of(sessions, job_id)[0] == expected


def test_a_cancel_leaves_no_process(
    sessions: Sessions, model: Path, submit: Submit, start_here: StartHere, wait_for: WaitFor, settings: Settings
) -> None:
    start_here(), start_here()
    job_id = submit(model, nodes=2, **ASKED)
    wait_until_quantizing(sessions, job_id, 1)
    assert len(engines()) >= 4
    with sessions.begin() as session:
        control.cancel(session, job_id)
    wait_for(job_id, "cancelled")
    wait_until(lambda: not engines(), note=engines)
    wait_for_empty(settings.work_dir)
