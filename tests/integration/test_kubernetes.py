"""Jobs whose engines run as pods: the official client, and a stand-in for the cluster (``kubernetes_server``)."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import update

from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import control, events
from api.store.tables.jobs import Job
from quantcore.errors import ConfigError
from tests.support.attempts import StartHere, outcomes
from tests.support.kubernetes_server import Cluster, serving
from tests.support.service import WorkerProcess, wait_for_empty
from tests.support.waiting import wait_until
from worker import allocation
from worker.launchers import find_launcher
from worker.launchers.kubernetes import name_of

Submit = Callable[..., str]
StartWorker = Callable[..., WorkerProcess]
WaitFor = Callable[..., Job]
MakeModel = Callable[..., Path]
GetJob = Callable[[str], Job]
TEMPLATE: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}},
    "spec": {
        "template": {
            "spec": {
                "nodeSelector": {"gpu": "h100"},
                "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
                "containers": [
                    {
                        "name": "engine",
                        "image": "registry.example.org/bitfoundry:1",
                        "env": [{"name": "HF_HOME", "value": "/shared/hf"}],
                        "resources": {"limits": {"nvidia.com/gpu": 8}},
                        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
                    }
                ],
                "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "bitfoundry"}}],
            }
        }
    },
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster()
    with serving(tmp_path, cluster) as config:
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield cluster


@pytest.fixture
def settings(settings: Settings, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The stub engine, on the cluster."""
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig.json"))
    template = tmp_path / "template.yaml"
    template.write_text(yaml.safe_dump(TEMPLATE))
    more = {"launcher": "kubernetes", "launcher_template": template, "launcher_poll_s": 0.1}
    return settings.model_copy(update=more | {"memory_bytes": 4 << 30})


def states_of(sessions: Sessions, job_id: str) -> list[str]:
    with sessions.begin() as session:
        story = events.read(session, job_id, after=0, limit=10_000, kinds=("allocation",))
    return [event.data["state"] for event in story]


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_job_runs_as_pods(
    num_nodes: int, settings: Settings, sessions: Sessions, make_model: MakeModel, submit: Submit,
    start_worker: StartWorker, wait_for: WaitFor, tmp_path: Path, cluster: Cluster,
) -> None:  # fmt: skip
    """The manifest is that of the template with what the job needs, and no secret reaches the cluster."""
    noted = tmp_path / "environment.json"
    start_worker(settings, more={"NVIDIA_VISIBLE_DEVICES": "all", "NCCL_DEBUG": "INFO"})  # as an image may set them
    job_id = submit(make_model(environment=str(noted)), nodes=num_nodes)
    job = wait_for(job_id, "succeeded")
    assert job.attempt == 1 and job.allocation is not None
    assert (job.allocation["launcher"], job.allocation["state"]) == ("kubernetes", "Complete")
    assert job.allocation["nodes"] == ",".join(f"node-{index}" for index in range(num_nodes))
    (manifest,) = cluster.manifests
    spec, pod = manifest["spec"], manifest["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (num_nodes, num_nodes, 0)
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert pod["nodeSelector"] == {"gpu": "h100"} and pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert (
        container["resources"]["limits"]["nvidia.com/gpu"] == 8 and "Mi" in container["resources"]["limits"]["memory"]
    )
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables["HF_HOME"] == "/shared/hf" and not {"PATH", "HOME", "DATABASE_URL"} & variables.keys()
    assert variables["NCCL_DEBUG"] == "INFO" and "NVIDIA_VISIBLE_DEVICES" not in variables, "the node chooses its GPUs"
    everything = json.dumps(manifest) + noted.read_text()
    assert settings.secret_key is not None
    for secret in ("canary-in-the-environment", settings.secret_key.get_secret_value()):
        assert secret not in everything
    wait_for_empty(settings.work_dir)


def test_a_job_waits_for_room_and_leaves_the_queue_when_cancelled(
    settings: Settings, sessions: Sessions, make_model: MakeModel, submit: Submit, start_here: StartHere,
    wait_for: WaitFor, get_job: GetJob, cluster: Cluster,
) -> None:  # fmt: skip
    cluster.num_pods = 0
    start_here(settings)
    job_id = submit(make_model())
    reason = wait_until(lambda: (get_job(job_id).allocation or {}).get("reason"))
    assert reason == "Unschedulable: 0/1 nodes"
    with sessions.begin() as session:
        control.cancel(session, job_id)
    wait_for(job_id, "cancelled")
    wait_until(lambda: not cluster.jobs())
    wait_for_empty(settings.work_dir)


def test_a_worker_that_was_killed_finds_its_engine_again(
    settings: Settings, sessions: Sessions, make_model: MakeModel, submit: Submit, start_worker: StartWorker,
    start_here: StartHere, wait_for: WaitFor, get_job: GetJob, cluster: Cluster,
) -> None:  # fmt: skip
    settings = settings.model_copy(update={"lease_s": 6})
    worker = start_worker(settings)
    job_id = submit(make_model(mode="steady", block_s=1.5))
    wait_until(lambda: get_job(job_id).phase == "quantize")
    worker.kill()
    start_here(settings)
    job = wait_for(job_id, "succeeded")
    assert (job.attempt, job.lost_count, outcomes(sessions, job_id)) == (2, 0, ["lost", "succeeded"])
    assert len(cluster.manifests) == 1, "submitted once"
    wait_for_empty(settings.work_dir)


def test_an_evicted_pod_starts_again(
    settings: Settings, sessions: Sessions, make_model: MakeModel, submit: Submit, start_here: StartHere,
    wait_for: WaitFor, get_job: GetJob, cluster: Cluster,
) -> None:  # fmt: skip
    start_here(settings)
    job_id = submit(make_model(mode="slow_once"))
    wait_until(lambda: get_job(job_id).phase == "quantize")
    cluster.evict(name_of(f"bitfoundry-{job_id}"))
    job = wait_for(job_id, "succeeded")
    assert (job.attempt, job.failure_count) == (1, 0)


def test_a_server_that_does_not_answer_costs_nothing(
    settings: Settings, sessions: Sessions, make_model: MakeModel, submit: Submit, start_here: StartHere,
    wait_for: WaitFor, get_job: GetJob, cluster: Cluster,
) -> None:  # fmt: skip
    """Neither before the submission nor while the engine runs."""
    cluster.refuse_with = 429
    start_here(settings)
    job_id = submit(make_model(mode="steady", block_s=0.2))
    wait_until(lambda: (get_job(job_id).allocation or {}).get("state") == "AWAY")
    cluster.refuse_with = None
    wait_until(lambda: get_job(job_id).phase == "quantize")
    cluster.refuse_with = 503
    wait_until(lambda: states_of(sessions, job_id)[-1] == "AWAY")
    cluster.refuse_with = None
    job = wait_for(job_id, "succeeded")
    assert job.attempt == 1 and len(cluster.manifests) == 1


@pytest.mark.parametrize(
    ("what", "code"), [("memory", "memory_limit"), ("deadline", "scheduler_time_limit"), ("quota", "launcher_refused")]
)
def test_what_the_cluster_ends_or_refuses_is_said(
    what: str, code: str, settings: Settings, make_model: MakeModel, submit: Submit, start_here: StartHere,
    wait_for: WaitFor, get_job: GetJob, cluster: Cluster,
) -> None:  # fmt: skip
    cluster.quota_is_used = what == "quota"
    start_here(settings)
    job_id = submit(make_model(mode="slow"))
    name = name_of(f"bitfoundry-{job_id}")
    if what == "memory":
        wait_until(lambda: get_job(job_id).phase == "quantize")
        cluster.kill_for_memory(name)
    elif what == "deadline":
        for number in (1, 2):
            wait_until(lambda number=number: len(cluster.manifests) == number and name in cluster.jobs())
            cluster.end_in_time(name)
    job = wait_for(job_id, "failed")
    assert job.error is not None and job.error["code"] == code
    if what == "quota":
        assert "exceeded quota" in job.error["message"]
    wait_for_empty(settings.work_dir)


@pytest.mark.parametrize(("num_nodes", "how"), [(1, "deadline"), (2, "eviction")])
def test_a_job_that_is_submitted_again_succeeds(
    num_nodes: int, how: str, settings: Settings, make_model: MakeModel, submit: Submit, start_here: StartHere,
    wait_for: WaitFor, get_job: GetJob, cluster: Cluster,
) -> None:  # fmt: skip
    """How the first allocation ended is forgotten: it is no second attempt, and no failure."""
    start_here(settings)
    job_id = submit(make_model(mode="slow_once", node_mode="ends late"), nodes=num_nodes)
    wait_until(lambda: get_job(job_id).phase == "quantize")
    name = name_of(f"bitfoundry-{job_id}")
    (cluster.end_in_time if how == "deadline" else cluster.evict)(name)
    job = wait_for(job_id, "succeeded", "failed")
    assert (job.state, job.attempt, job.failure_count) == ("succeeded", 1, 0), (job.error, cluster.history)
    assert len(cluster.manifests) == 2, cluster.history
    wait_for_empty(settings.work_dir)


def test_a_worker_that_lost_its_lease_leaves_the_folders_to_the_next(
    settings: Settings, sessions: Sessions, make_model: MakeModel, submit: Submit, start_here: StartHere,
    wait_for: WaitFor, get_job: GetJob, cluster: Cluster,
) -> None:  # fmt: skip
    start_here(settings)
    job_id = submit(make_model(mode="steady", block_s=1))
    wait_until(lambda: get_job(job_id).phase == "quantize")
    with sessions.begin() as session:
        session.execute(update(Job).where(Job.id == job_id).values(lease_expires_at=datetime.now(UTC)))
    job = wait_for(job_id, "succeeded", "failed")
    assert (job.state, outcomes(sessions, job_id)) == ("succeeded", ["lost", "succeeded"]), job.error
    assert len(cluster.manifests) == 1
    wait_for_empty(settings.work_dir)


def test_a_wrong_template_is_refused_at_the_start(settings: Settings, tmp_path: Path) -> None:
    for text in ("kind: Job", "[]", "{", json.dumps(TEMPLATE | {"kind": "Pod"})):
        (tmp_path / "wrong.yaml").write_text(text)
        with pytest.raises(ConfigError, match="no manifest of a Job"):
            find_launcher(settings.model_copy(update={"launcher_template": tmp_path / "wrong.yaml"}))
    with pytest.raises(ConfigError, match="needs a manifest"):
        find_launcher(settings.model_copy(update={"launcher_template": None}))


def test_the_manifest_is_shown_before_anything_is_asked(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, cluster: Cluster
) -> None:
    monkeypatch.setenv("BITFOUNDRY_LAUNCHER_TEMPLATE", str(settings.launcher_template))
    shown = yaml.safe_load(allocation.preview("kubernetes", nodes=2, planned_bytes=2 << 30))
    status, _ = cluster.answer("POST", "/apis/batch/v1/namespaces/models/jobs", {}, shown)
    assert status == 201 and shown["spec"]["completions"] == 2
    container = shown["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["memory"] == f"{int(1.5 * 2048) + 1024 + 256}Mi"
