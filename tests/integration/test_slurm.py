"""Jobs whose engines run on the nodes of a real Slurm (see ``tests/support/slurm``)."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import control, events
from api.store.tables.jobs import Artifact, Job
from quantcore.checkpoint.artifact import sha256
from quantcore.config import presets
from tests.support.attempts import StartHere, outcomes
from tests.support.models import tiny_model
from tests.support.service import WorkerProcess, wait_for_empty
from tests.support.slurm import Cluster, running_cluster
from tests.support.waiting import give_time, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

Submit = Callable[..., str]
StartWorker = Callable[..., WorkerProcess]
WaitFor = Callable[..., Job]
MakeModel = Callable[..., Path]
GetJob = Callable[[str], Job]
LIMIT_S = 540
ASKED: dict[str, Any] = {
    "config": {**presets.resolve("w4a16").to_dict(), "algo_config": [{"name": "gptq"}]},
    "calibration": {"source": "builtin", "num_samples": 70, "seq_len": 32},
    "export": ["quark"],
}
REAL_ENGINE = {"engine_command": "{python} {launcher} -m quantcore run", "confine_engine": True, "stop_grace_s": 10}


@pytest.fixture(scope="module")
def whole_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, without the jobs of other tests."""
    yield whole_cluster
    whole_cluster.ask("scancel", "--user=root")
    wait_until(lambda: not whole_cluster.jobs(), note=whole_cluster.jobs)


@pytest.fixture
def settings(settings: Settings, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The stub engine, on the cluster."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.config))
    return settings.model_copy(
        update={"launcher": "slurm", "launcher_poll_s": 0.5, "memory_bytes": 2 << 30, "lease_s": 20, "heartbeat_s": 1}
    )


@pytest.fixture
def real(settings: Settings) -> Settings:
    """The real engine, on the cluster."""
    return settings.model_copy(update=REAL_ENGINE)


@pytest.fixture
def model(settings: Settings) -> Path:
    return tiny_model(settings.model_roots[0] / "model", num_hidden_layers=12)


@pytest.fixture
def expected(
    real: Settings, sessions: Sessions, model: Path, submit: Submit, start_here: StartHere, wait_for: WaitFor
) -> dict[str, str]:
    """The digests of what a worker makes on its own machine."""
    alone = start_here(real.model_copy(update={"launcher": "local"}))
    job_id = submit(model, **ASKED)
    wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
    alone.drain()
    alone.join()
    return weights_of(sessions, job_id)


def weights_of(sessions: Sessions, job_id: str) -> dict[str, str]:
    with sessions.begin() as session:
        folder = session.scalar(select(Artifact.path).where(Artifact.job_id == job_id))
    assert folder is not None
    return {path.name: sha256(path) for path in Path(folder).rglob("*.safetensors")}


def wait_until_quantizing(get_job: GetJob, job_id: str, num_blocks: int) -> None:
    def is_there() -> bool:
        job = get_job(job_id)
        assert job.state in ("queued", "running"), job.error
        return job.phase == "quantize" and (job.progress or {}).get("done", 0) >= num_blocks

    wait_until(is_there, timeout_s=LIMIT_S)


def saved_blocks(settings: Settings) -> int:
    """The number of blocks in front of the last savepoint of the only job; it takes none at every block."""
    files = list(settings.work_dir.glob("*/resume/state.json"))
    return int(json.loads(files[0].read_text())["next_block"]) if files else 0


def states_of(sessions: Sessions, job_id: str) -> list[str]:
    """What the scheduler said of the job, in order."""
    with sessions.begin() as session:
        return [
            event.data["state"] for event in events.read(session, job_id, after=0, limit=10_000, kinds=("allocation",))
        ]


def first_block(sessions: Sessions, job_id: str) -> int:
    """Where the last start of the engine began."""
    with sessions.begin() as session:
        story = events.read(session, job_id, after=0, limit=10_000, kinds=("phase_started", "layer_quantized"))
    start = max(event.seq for event in story if event.data.get("phase") == "quantize")
    return min(event.data["block"] for event in story if event.seq > start and event.kind == "layer_quantized")


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_job_runs_on_nodes_of_the_cluster(
    num_nodes: int, real: Settings, expected: dict[str, str], sessions: Sessions, model: Path, submit: Submit,
    start_here: StartHere, wait_for: WaitFor, cluster: Cluster,
) -> None:  # fmt: skip
    """With the bytes that one machine makes. Nothing remains of it but the artifact."""
    start_here(real)
    job_id = submit(model, nodes=num_nodes, **ASKED)
    job = wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
    assert weights_of(sessions, job_id) == expected
    assert job.attempt == 1 and job.allocation is not None
    assert (job.allocation["launcher"], job.allocation["state"]) == ("slurm", "COMPLETED")
    assert job.allocation["nodes"] in (["n1", "n2"] if num_nodes == 1 else ["n[1-2]"])
    assert "RUNNING" in states_of(sessions, job_id) and cluster.jobs() == []
    wait_for_empty(real.work_dir)


def test_a_job_waits_in_the_queue_of_the_cluster(
    settings: Settings, sessions: Sessions, make_model: MakeModel, submit: Submit, start_here: StartHere,
    wait_for: WaitFor, get_job: GetJob, cluster: Cluster,
) -> None:  # fmt: skip
    """It says why, in Slurm's words; the time does not count as its own; a cancel takes it out."""
    filler = cluster.occupy(600)
    start_here()
    model = make_model()
    waits = submit(model, max_runtime_s=2)
    wait_until(
        lambda: (get_job(waits).allocation or {}).get("reason") == "Resources", note=lambda: get_job(waits).allocation
    )
    give_time(4)
    assert get_job(waits).state == "running", "longer than it may run, but it does not run yet"
    with sessions.begin() as session:
        control.cancel(session, waits)
    wait_for(waits, "cancelled")
    goes = submit(model)
    wait_until(lambda: (get_job(goes).allocation or {}).get("state") == "PENDING")
    cluster.ask("scancel", filler)
    wait_for(goes, "succeeded")
    wait_for_empty(settings.work_dir)


def test_a_worker_that_was_killed_finds_its_engines_again(
    real: Settings, expected: dict[str, str], sessions: Sessions, model: Path, submit: Submit,
    start_worker: StartWorker, start_here: StartHere, wait_for: WaitFor, get_job: GetJob, cluster: Cluster,
) -> None:  # fmt: skip
    """The engine computes on meanwhile, and is not started again."""
    worker = start_worker(real)
    job_id = submit(model, **ASKED)
    wait_until_quantizing(get_job, job_id, 2)
    (before,) = cluster.jobs()
    worker.kill()
    start_here(real)
    job = wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
    assert (job.attempt, job.lost_count, outcomes(sessions, job_id)) == (2, 0, ["lost", "succeeded"])
    assert job.allocation is not None and job.allocation["id"] == before[0], "the same allocation"
    assert weights_of(sessions, job_id) == expected and first_block(sessions, job_id) == 0
    wait_for_empty(real.work_dir)


def test_a_drained_worker_leaves_its_engines_alone(
    real: Settings, sessions: Sessions, model: Path, submit: Submit, start_worker: StartWorker, start_here: StartHere,
    wait_for: WaitFor, get_job: GetJob, cluster: Cluster,
) -> None:  # fmt: skip
    """An upgrade of the worker costs the jobs nothing."""
    worker = start_worker(real)
    job_id = submit(model, **ASKED)
    wait_until_quantizing(get_job, job_id, 2)
    (before,) = cluster.jobs()
    assert worker.drain() == 0
    assert get_job(job_id).state == "queued" and cluster.jobs()[0][:3] == [*before[:2], "RUNNING"]
    start_here(real)
    job = wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
    assert job.allocation is not None and job.allocation["id"] == before[0], "the same allocation"
    assert first_block(sessions, job_id) == 0
    wait_for_empty(real.work_dir)


def test_a_job_that_is_cancelled_without_a_worker_ends_with_the_next(
    settings: Settings, sessions: Sessions, make_model: MakeModel, submit: Submit, start_worker: StartWorker,
    wait_for: WaitFor, cluster: Cluster,
) -> None:  # fmt: skip
    worker = start_worker()
    job_id = submit(make_model(mode="slow"))
    wait_until(lambda: cluster.jobs("RUNNING"))
    worker.drain()
    with sessions.begin() as session:
        control.cancel(session, job_id)
    wait_for(job_id, "cancelled")
    assert cluster.jobs("RUNNING"), "nobody has told Slurm"
    start_worker()
    wait_until(lambda: not cluster.jobs(), note=cluster.jobs)
    wait_for_empty(settings.work_dir)


def test_a_preempted_job_starts_again_after_its_last_block(
    real: Settings, expected: dict[str, str], sessions: Sessions, model: Path, submit: Submit, start_here: StartHere,
    wait_for: WaitFor, get_job: GetJob, cluster: Cluster,
) -> None:  # fmt: skip
    """That is no failure of the job, and no second attempt."""
    start_here(real)
    job_id = submit(model, **ASKED)
    wait_until_quantizing(get_job, job_id, 3)
    other = cluster.occupy(600, "--partition=high")
    wait_until(lambda: (get_job(job_id).allocation or {}).get("state") == "PENDING", note=cluster.jobs)
    cluster.ask("scancel", other)
    cluster.start_requeued()
    job = wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
    assert (job.attempt, job.failure_count) == (1, 0)
    assert first_block(sessions, job_id) > 0 and weights_of(sessions, job_id) == expected
    wait_for_empty(real.work_dir)


def test_a_lost_node_costs_a_few_blocks(
    real: Settings, expected: dict[str, str], sessions: Sessions, model: Path, submit: Submit, start_here: StartHere,
    wait_for: WaitFor, get_job: GetJob, cluster: Cluster,
) -> None:  # fmt: skip
    """And a controller that is killed in between costs nothing. Meanwhile the engine is held: it must not finish."""
    start_here(real)
    job_id = submit(model, **ASKED)
    wait_until(lambda: saved_blocks(real), timeout_s=LIMIT_S)
    all_of_it = str(real.work_dir)  # is in the command lines of the engine and of what started it
    subprocess.run(["pkill", "-STOP", "-f", "--", all_of_it], check=True)
    cluster.kill("slurmctld")
    wait_until(
        lambda: (get_job(job_id).allocation or {}).get("state") == "AWAY", note=lambda: get_job(job_id).allocation
    )
    cluster.start_controller()
    wait_until(lambda: (get_job(job_id).allocation or {}).get("state") == "RUNNING")
    node = (get_job(job_id).allocation or {})["nodes"]
    cluster.kill(f"slurmd-{node}")
    try:
        # the machine is gone, with all that ran there; first what would tell the controller
        for pattern in ("slurmstepd: ", all_of_it):
            subprocess.run(["pkill", "-KILL", "-f", "--", pattern], check=True)
        wait_until(lambda: (get_job(job_id).allocation or {}).get("state") == "PENDING", note=cluster.jobs)
        cluster.start_requeued()
        job = wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
    finally:
        cluster.start_node(node)
    assert (job.attempt, job.failure_count) == (1, 0)
    assert first_block(sessions, job_id) > 0 and weights_of(sessions, job_id) == expected
    wait_for_empty(real.work_dir)


def test_the_schedulers_time_limit_is_no_end(
    settings: Settings, sessions: Sessions, make_model: MakeModel, submit: Submit, start_here: StartHere,
    wait_for: WaitFor, get_job: GetJob, cluster: Cluster,
) -> None:  # fmt: skip
    """The job is submitted again; unless it has saved nothing since: then it says what to do."""
    start_here()
    job_id = submit(make_model(mode="slow"))
    ended: set[str] = set()
    while get_job(job_id).state == "running" or not ended:
        for number, *_ in cluster.jobs("RUNNING"):
            if number not in ended:
                cluster.ask("scontrol", "update", f"jobid={number}", "TimeLimit=1")
                ended.add(number)
        give_time(0.5)
    job = wait_for(job_id, "failed")
    assert job.error is not None and job.error["code"] == "scheduler_time_limit"
    assert len(ended) == 2 and states_of(sessions, job_id).count("TIMEOUT") == 2
    wait_for_empty(settings.work_dir)


def test_a_job_that_a_time_limit_ended_once_succeeds(
    settings: Settings, sessions: Sessions, make_model: MakeModel, submit: Submit, start_here: StartHere,
    wait_for: WaitFor, cluster: Cluster,
) -> None:  # fmt: skip
    """The engine says how it ended when the limit came; that is forgotten with the next submission."""
    start_here()
    job_id = submit(make_model(mode="slow_once"))
    ((number, *_),) = wait_until(lambda: cluster.jobs("RUNNING"))
    cluster.ask("scontrol", "update", f"jobid={number}", "TimeLimit=1")
    job = wait_for(job_id, "succeeded", "failed", timeout_s=LIMIT_S)
    assert (job.state, job.attempt, job.failure_count) == ("succeeded", 1, 0), job.error
    assert states_of(sessions, job_id).count("TIMEOUT") == 1
    wait_for_empty(settings.work_dir)


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("#!/bin/bash\n#SBATCH --partition=no_such_partition\nsrun {command}\n", "launcher_refused"),
        ("#!/bin/bash\nmodule load no_such_module || exit 3\nsrun {command}\n", "launch_failed"),
    ],
)
def test_a_wrong_template_says_what_slurm_said(
    template: str, code: str, settings: Settings, make_model: MakeModel, submit: Submit, start_here: StartHere,
    wait_for: WaitFor, tmp_path: Path, cluster: Cluster,
) -> None:  # fmt: skip
    file = tmp_path / "template.sh"
    file.write_text(template)
    start_here(settings.model_copy(update={"launcher_template": file}))
    job = wait_for(submit(make_model()), "failed")
    assert job.error is not None and job.error["code"] == code
    said = {"launcher_refused": "partition", "launch_failed": "module: command not found"}[code]
    assert said in job.error["message"] and "BITFOUNDRY_LAUNCHER_TEMPLATE" in job.error["hint"]
    assert cluster.jobs() == []
    wait_for_empty(settings.work_dir)


def test_no_more_jobs_are_in_the_scheduler_than_the_worker_has_slots(
    settings: Settings, make_model: MakeModel, submit: Submit, start_here: StartHere, wait_for: WaitFor,
    cluster: Cluster,
) -> None:  # fmt: skip
    """And they start in the order of their priorities."""
    model = make_model()
    low = [submit(model, priority=1) for _ in range(6)]
    high = [submit(model, priority=9) for _ in range(6)]
    start_here(settings.model_copy(update={"slots": 3}))
    most = 0
    jobs: list[Job] = []

    def all_ended() -> bool:
        nonlocal most, jobs
        most = max(most, len(cluster.jobs()))
        jobs = [wait_for(each, "queued", "running", "succeeded") for each in (*high, *low)]
        return all(job.state == "succeeded" for job in jobs)

    wait_until(all_ended, timeout_s=LIMIT_S)
    assert 1 < most <= 3
    times = {job.id: job.state_times["running"] for job in jobs}
    assert max(times[each] for each in high) < min(times[each] for each in low)
    assert all(job.attempt == 1 for job in jobs)
    wait_for_empty(settings.work_dir)


def test_nothing_secret_reaches_the_nodes(
    settings: Settings, make_model: MakeModel, submit: Submit, start_worker: StartWorker, wait_for: WaitFor,
    tmp_path: Path, cluster: Cluster,
) -> None:  # fmt: skip
    """Neither by the environment nor by the files of a launch; nor can an engine change what starts it."""
    noted = tmp_path / "environment.json"
    filler = cluster.occupy(600)
    start_worker()
    job_id = submit(make_model(environment=str(noted)))
    (launch,) = wait_until(lambda: list(settings.work_dir.glob("*.launch")))
    wait_until(lambda: cluster.jobs("PENDING"))
    files = {file.name: file.read_text() for file in launch.iterdir()}
    assert {"launch.json", "task.json", "allocation.json", "slurm.sh"} <= files.keys()
    cluster.ask("scancel", filler)
    wait_for(job_id, "succeeded")
    everything = json.dumps(files) + noted.read_text()
    secrets = (
        "canary-in-the-environment",
        settings.secret_key.get_secret_value() if settings.secret_key else "",
        settings.database_url.get_secret_value(),
    )
    assert all(secret and secret not in everything for secret in secrets)
    assert launch.parent == settings.work_dir and launch.suffix == ".launch"
