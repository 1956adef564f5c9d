"""Jobs that say how they are measured and which way their weights take."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import leases
from api.store.tables.jobs import Job
from quantcore.cli.main import main
from tests.support.hub_server import HubServer
from tests.support.models import tiny_model
from tests.support.service import REAL_ENGINE, WorkerProcess

LIMIT_S = 540.0
FEW = {"num_samples": 2, "seq_len": 32}
SMALL = {"num_windows": 3, "seq_len": 64, "num_prompts": 0}
StartWorker = Callable[..., WorkerProcess]
PROSE = "the quick brown fox jumps over the lazy dog and runs far away from here "
TASK = """
task: our_own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: question
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""


@pytest.fixture
def settings(settings: Settings, tmp_path: Path) -> Settings:
    """With a folder of the operator's tasks."""
    (tmp_path / "tasks").mkdir()
    return settings.model_copy(update={"lm_eval_tasks_dir": tmp_path / "tasks"})


@pytest.fixture
def with_engine(settings: Settings) -> Settings:
    """The real engine, which needs more than a stub's time between two heartbeats."""
    return settings.model_copy(update=REAL_ENGINE)


@pytest.fixture
def model(settings: Settings) -> Path:
    """For the real engine, and for the stub, which writes its task and its environment beside it."""
    folder = tiny_model(settings.model_roots[0] / "tiny")
    orders = {name: str(folder.parent / f"{name}.json") for name in ("task", "environment")}
    (folder / "stub.json").write_text(json.dumps(orders))
    return folder


@pytest.fixture
def ended(client: TestClient, wait_for: Callable[..., Job]) -> Callable[..., Job]:
    """``ended(body)``: the job as it ended."""

    def run(body: dict[str, Any], timeout_s: float = LIMIT_S) -> Job:
        answer = client.post("/v1/jobs", json=body)
        assert answer.status_code == 202, answer.text
        job = wait_for(answer.json()["id"], "succeeded", "failed", timeout_s=timeout_s)
        assert job.state == "succeeded", job.error
        return job

    return run


def upload(client: TestClient, rows: list[dict[str, str]], **form: str) -> str:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    dataset: str = client.post("/v1/datasets", files={"file": ("rows.jsonl", content)}, data=form).json()["id"]
    return dataset


def body(model: Path, preset: str = "int8_dynamic", **more: Any) -> dict[str, Any]:
    return {"model": {"path": str(model)}, "config": {"preset": preset}, "calibration": FEW, **more}


def read(client: TestClient, job: Job, name: str) -> Any:
    return client.get(f"/v1/jobs/{job.id}/artifacts/{name}")


@pytest.mark.slow
def test_a_job_from_file_to_file_gives_what_the_command_gives(
    client: TestClient, model: Path, with_engine: Settings, start_worker: StartWorker, ended: Callable[..., Job],
    tmp_path: Path, proof_in_this_process: Callable[..., Any],
) -> None:  # fmt: skip
    start_worker(with_engine)
    asked = body(model, "w4a16", file2file=True)
    planned = client.post("/v1/plans", json=asked).json()
    assert planned["executor"] == "file_to_file"
    job = ended(asked)
    assert job.needs_memory_bytes == planned["peak_memory_bytes"]
    flags = ["--model_dir", str(model), "--output_dir", str(tmp_path / "out"), "--quant_scheme", "w4a16"]
    assert main([*flags, "--file2file_quantization", "--num_calib_data", "2", "--seq_len", "32"]) == 0
    for name in ("model.safetensors", "config.json", "plan.json"):
        assert read(client, job, name).content == (tmp_path / "out" / name).read_bytes(), name
    report = read(client, job, "report.json").json()
    assert (report["summary"]["executor"], report["quality"]) == ("file_to_file", None)


@pytest.mark.slow
def test_the_report_is_measured_as_it_was_asked_for(
    client: TestClient, model: Path, with_engine: Settings, start_worker: StartWorker, ended: Callable[..., Job]
) -> None:
    start_worker(with_engine)
    dataset = upload(client, [{"body": f"{number} {PROSE}"} for number in range(200)], column="body")
    job = ended(body(model, evaluation={**SMALL, "source": dataset, "stride": 32}))
    report = read(client, job, "report.json").json()
    assert (report["evaluation"]["num_windows"], report["evaluation"]["num_prompts"]) == (3, 0)
    assert report["quality"]["num_tokens"] == 64 + 2 * 32 - 1 and report["samples"] is None


@pytest.mark.slow
def test_uploaded_text_is_a_file_for_the_engine(
    client: TestClient, model: Path, settings: Settings, start_worker: StartWorker, ended: Callable[..., Job]
) -> None:
    start_worker()
    dataset = upload(client, [{"body": PROSE}], column="body")
    job = ended(body(model, evaluation={**SMALL, "source": dataset}, file2file=True, shard_blocks=False))
    task = json.loads((model.parent / "task.json").read_text())
    assert (job.spec["evaluation"]["source"], job.evaluation_dataset_id) == (dataset, dataset)
    assert Path(task["evaluation"].pop("source")).parent == settings.datasets_dir
    assert task["evaluation"] == {**SMALL, "column": "body", "tasks": [], "batch_size": 8, "num_answers": 24}
    assert (task["file2file"], task["shard_blocks"]) == (True, False)
    assert client.delete(f"/v1/datasets/{dataset}").status_code == 204
    answer = client.post(f"/v1/jobs/{job.id}/clone", json={})
    assert (answer.status_code, answer.json()["code"]) == (422, "dataset_not_found")
    assert answer.json()["errors"][0]["pointer"] == "#/evaluation/source"


def test_text_that_a_waiting_job_is_measured_on_stays(client: TestClient, model: Path) -> None:
    dataset = upload(client, [{"text": PROSE}])
    job = client.post("/v1/jobs", json=body(model, evaluation={"source": dataset})).json()
    answer = client.delete(f"/v1/datasets/{dataset}")
    assert (answer.status_code, answer.json()["code"]) == (409, "dataset_in_use")
    assert client.post(f"/v1/jobs/{job['id']}/cancel").status_code == 202
    assert client.delete(f"/v1/datasets/{dataset}").status_code == 204


@pytest.mark.slow
def test_text_on_the_hub_is_that_of_the_commit_at_the_submit(
    client: TestClient, model: Path, hub: HubServer, start_worker: StartWorker, ended: Callable[..., Job]
) -> None:
    start_worker()
    sha = hub.add("datasets/org/set", {"test.jsonl": json.dumps({"text": PROSE}).encode()})
    asked = {**SMALL, "source": "org/set", "split": "test"}
    job = ended(body(model, evaluation=asked))
    task = json.loads((model.parent / "task.json").read_text())
    assert task["evaluation"]["revision"] == job.spec["evaluation"]["revision"] == sha
    assert task["token_on_stdin"]
    answer = client.post("/v1/jobs", json=body(model, evaluation={**asked, "revision": "nowhere"}))
    assert answer.json()["errors"][0]["pointer"] == "#/evaluation/revision"


@pytest.mark.slow
def test_the_operator_s_folder_of_tasks_goes_to_jobs_with_tasks(
    model: Path, hub: HubServer, settings: Settings, start_worker: StartWorker, ended: Callable[..., Job]
) -> None:
    """And the way to the Hub, where the data of most tasks is."""
    start_worker()
    for tasks in (["our_own"], []):
        ended(body(model, evaluation={**SMALL, "tasks": tasks}))
        task = json.loads((model.parent / "task.json").read_text())
        environment = json.loads((model.parent / "environment.json").read_text())
        assert task["evaluation"].get("include_path") == (str(settings.lm_eval_tasks_dir) if tasks else None)
        assert ("HF_ENDPOINT" in environment) == bool(tasks)


def test_a_clone_a_dry_run_and_a_sweep_know_them(client: TestClient, model: Path, sessions: Sessions) -> None:
    asked = body(model, "w4a16", file2file=True, shard_blocks=False, evaluation=SMALL)
    dry = client.post("/v1/jobs", params={"dry_run": True}, json=asked).json()
    assert (dry["executor"], dry["evaluation"]["num_windows"]) == ("file_to_file", 3)
    job = client.post("/v1/jobs", json=asked).json()
    changes = {"evaluation": {"num_windows": 7}}
    same = client.post(f"/v1/jobs/{job['id']}/clone", json={}).json()
    other = client.post(f"/v1/jobs/{job['id']}/clone", json={**changes, "file2file": False}).json()
    for name in ("evaluation", "file2file", "shard_blocks"):
        assert same[name] == job[name] is not None
    assert (other["file2file"], other["evaluation"]["num_windows"], other["evaluation"]["num_prompts"]) == (False, 7, 4)
    matrix = {"/file2file": [True, False], "/evaluation/num_windows": [1, 2]}
    sweep = client.post("/v1/sweeps", json={"job": body(model, "w4a16"), "matrix": matrix}).json()
    made = [(job["file2file"], job["evaluation"]["num_windows"]) for job in sweep["jobs"]]
    assert made == [(True, 1), (True, 2), (False, 1), (False, 2)]
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
    assert lease and (lease.spec.file2file, lease.spec.shard_blocks) == (True, False)
    assert lease.spec.evaluation.model_dump(mode="json", exclude_none=True) == job["evaluation"]


def test_a_sweep_says_which_way_cannot_be(client: TestClient, model: Path) -> None:
    matrix = {"/file2file": [True, False], "/evaluation/tasks": [[], ["piqa"]]}
    answer = client.post("/v1/sweeps", json={"job": body(model, "w4a16"), "matrix": matrix})
    assert (answer.status_code, answer.json()["code"]) == (422, "unsupported_config")
    [entry] = answer.json()["errors"]
    assert entry["pointer"] == "#/job/evaluation/tasks"
    assert entry["values"] == {"/file2file": True, "/evaluation/tasks": ["piqa"]}


@pytest.mark.slow
def test_the_operator_s_tasks_are_run(
    client: TestClient, model: Path, with_engine: Settings, start_worker: StartWorker, ended: Callable[..., Job],
    wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    start_worker(with_engine)
    folder = with_engine.lm_eval_tasks_dir
    assert folder is not None
    words = "for if while class".split()
    rows = [{"question": f"The {word}", "choices": [f" {one}" for one in words], "answer": 1} for word in words]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "ours.yaml").write_text(TASK.format(data=folder / "rows.jsonl"))
    asked = {**SMALL, "tasks": ["our_own"], "limit": 3}
    job = ended(body(model, evaluation=asked), timeout_s=400)
    report = read(client, job, "report.json").json()
    assert report["harness"]["our_own"]["acc,none"].keys() == {"original", "quantized"}
    wrong = client.post("/v1/jobs", json=body(model, evaluation={**asked, "tasks": ["our_won"]})).json()
    failed = wait_for(wrong["id"], "failed", timeout_s=200)
    assert failed.error and failed.error["code"] == "unknown_tasks" and "our_own" in failed.error["hint"]
