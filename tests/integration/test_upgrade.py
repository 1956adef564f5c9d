"""An upgrade as Kubernetes and systemd do it: migrations beside the old worker, SIGTERM, another process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import events
from api.store.tables.jobs import Artifact, Job
from quantcore.checkpoint.artifact import sha256
from quantcore.config import presets
from tests.support.attempts import StartHere, outcomes
from tests.support.models import tiny_model
from tests.support.service import REAL_ENGINE, ROOT, WorkerProcess, wait_for_empty
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LIMIT_S = 540
POD_MARGIN_S = 60
"""The chart's: seconds that a pod has after its engines' time to end (tests/architecture/test_helm.py)."""
ASKED: dict[str, Any] = {
    "config": {**presets.resolve("w4a16").to_dict(), "algo_config": [{"name": "gptq"}]},
    "calibration": {"source": "builtin", "num_samples": 70, "seq_len": 32},
    "export": ["quark"],
}


def test_an_upgrade_of_the_worker_costs_a_few_blocks(
    settings: Settings, sessions: Sessions, submit: Callable[..., str], start_worker: Callable[..., WorkerProcess],
    start_here: StartHere, wait_for: Callable[..., Job], get_job: Callable[[str], Job],
) -> None:  # fmt: skip
    """The job is no failure, continues after its last saved block, and has the bytes that an undisturbed one has."""
    settings = settings.model_copy(update=REAL_ENGINE | {"stop_grace_s": 30})
    model = tiny_model(settings.model_roots[0] / "model", num_hidden_layers=12)
    alone = start_here(settings)
    undisturbed = submit(model, **ASKED)
    wait_for(undisturbed, "succeeded", timeout_s=LIMIT_S)
    alone.drain()
    alone.join()
    old = start_worker(settings)
    job_id = submit(model, **ASKED)
    wait_until(lambda: num_blocks(get_job(job_id)) >= 2, timeout_s=LIMIT_S)
    migrations = [sys.executable, "-m", "alembic", "upgrade", "head"]
    environment = {"DATABASE_URL": settings.database_url.get_secret_value()}
    subprocess.run(migrations, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=LIMIT_S)
    assert get_job(job_id).state == "running", "the hook disturbs nobody"
    assert old.drain(timeout_s=settings.stop_grace_s + POD_MARGIN_S) == 0
    job = get_job(job_id)
    assert (job.state, job.failure_count, job.lost_count) == ("queued", 0, 0)
    start_worker(settings)
    assert wait_for(job_id, "succeeded", timeout_s=LIMIT_S).attempt == 2
    assert outcomes(sessions, job_id) == ["drained", "succeeded"]
    assert first_block(sessions, job_id) >= 2
    assert weights_of(sessions, job_id) == weights_of(sessions, undisturbed)
    wait_for_empty(settings.work_dir)


def num_blocks(job: Job) -> int:
    assert job.state in ("queued", "running"), job.error
    return int((job.progress or {}).get("done", 0)) if job.phase == "quantize" else 0


def first_block(sessions: Sessions, job_id: str) -> int:
    """Return where the last attempt began."""
    with sessions.begin() as session:
        story = events.read(session, job_id, after=0, limit=10_000, kinds=("phase_started", "layer_quantized"))
    start = max(event.seq for event in story if event.data.get("phase") == "quantize")
    return min(event.data["block"] for event in story if event.seq > start and event.kind == "layer_quantized")


def weights_of(sessions: Sessions, job_id: str) -> dict[str, str]:
    with sessions.begin() as session:
        folder = session.scalar(select(Artifact.path).where(Artifact.job_id == job_id))
    assert folder is not None
    return {path.name: sha256(path) for path in Path(folder).rglob("*.safetensors")}
