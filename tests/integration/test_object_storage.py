"""Models and results in a real object store, Ceph's (see ``tests/support/ceph``)."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import psutil
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.settings import Settings
from api.store.engine import Sessions
from api.store.tables.jobs import Job
from quantcore.hub.object_store import open_store
from tests.support.ceph import SECRET, USER, Store, running_store
from tests.support.models import tiny_model
from tests.support.service import REAL_ENGINE, WorkerProcess
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BUCKET, MODELS, RESULTS = "s3://bucket", "s3://bucket/models", "s3://bucket/results"
LIMIT_S = 540.0
CALIBRATION = {"source": "builtin", "num_samples": 2, "seq_len": 32}

StartWorker = Callable[..., WorkerProcess]
WaitFor = Callable[..., Job]


@pytest.fixture(scope="module")
def whole_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with running_store(tmp_path_factory.mktemp("ceph") / "store") as store:
        store.make_bucket("bucket")
        yield store


@pytest.fixture
def store(whole_store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in whole_store.environment.items():
        monkeypatch.setenv(name, value)
    return whole_store


@pytest.fixture
def settings(settings: Settings, store: Store) -> Settings:
    return settings.model_copy(update={**REAL_ENGINE, "model_urls": (MODELS,), "publish_urls": (RESULTS,)})


@pytest.fixture
def url(store: Store, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A model of this test alone, in the store."""
    url = f"{MODELS}/{request.node.name}"
    store.put(tiny_model(tmp_path / "model"), url)
    return url


def body(model: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": model, "config": {"preset": "int8_dynamic"}, "calibration": CALIBRATION, **more}


def submit(client: TestClient, url: str, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/jobs", json=body({"id": url}, **more))
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = answer.json()
    return job


def weights(client: TestClient, job_id: str) -> str:
    return hashlib.sha256(client.get(f"/v1/jobs/{job_id}/artifacts/model.safetensors").content).hexdigest()


def engines(words: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if words in " ".join(process.info["cmdline"] or ())]


def test_from_the_request_to_the_published_folder(
    client: TestClient, url: str, start_worker: StartWorker, wait_for: WaitFor, sessions: Sessions, settings: Settings,
    tmp_path: Path,
) -> None:  # fmt: skip
    """None of the job's files is on a shared disk but its result, which is the same as from a folder."""
    local = settings.model_roots[0] / "model"
    tiny_model(local)
    inspected = client.get("/v1/models/inspect", params={"id": url}).json()
    assert inspected["num_blocks"] == 3 and inspected["model"]["sha"]
    plans = [
        client.post("/v1/plans", json=body(model)).json() for model in ({"id": url}, {"path": str(local)})
    ]  # fmt: skip
    assert plans[0] == plans[1] and plans[0]["size_after_bytes"]

    target = f"{RESULTS}/first"
    job = submit(client, url, publish={"to": target})
    assert job["model"] == {"id": url, "revision": "main", "sha": inspected["model"]["sha"]}
    job_id = job["id"]
    start_worker()
    watched: list[tuple[str, bytes]] = []

    def is_over() -> bool:
        for process in engines("quantcore run") + engines("quantcore fetch"):
            kind = "run" if "run" in process.info["cmdline"] else "fetch"
            watched.append((kind, _environment(process.pid)))
        return bool(client.get(f"/v1/jobs/{job_id}").json()["state"] not in ("queued", "running"))

    wait_until(is_over, timeout_s=LIMIT_S)
    wait_for(job_id, "succeeded")
    assert {kind for kind, _ in watched} >= {"run"}
    assert not [kind for kind, variables in watched if kind == "run" and b"AWS_" in variables]
    alone = client.post("/v1/jobs", json=body({"path": str(local)})).json()["id"]
    wait_for(alone, "succeeded", timeout_s=LIMIT_S)
    assert weights(client, job_id) == weights(client, alone)
    report = client.get(f"/v1/jobs/{job_id}/artifacts/report.json").json()
    assert report["model"]["id"] == url and report["model"]["sha"] == inspected["model"]["sha"]
    assert "base_model: s3" not in client.get(f"/v1/jobs/{job_id}/artifacts/README.md").text

    wait_until(lambda: client.get(f"/v1/jobs/{job_id}").json()["publication"]["state"] == "published")
    published = open_store(target)
    manifest = json.loads(bytes(obstore.get(published, "MANIFEST.json").bytes()))
    for entry in manifest["files"]:
        data = bytes(obstore.get(published, entry["path"]).bytes())
        assert hashlib.sha256(data).hexdigest() == entry["sha256"], entry["path"]
    with sessions.begin() as session:
        tables = ("job", "event", "attempt", "artifact", "outbox", "log_line", "audit_entry", "publication")
        rows = [str(row) for table in tables for row in session.execute(text(f"SELECT to_jsonb(t) FROM {table} t"))]
    files = [path for path in (*settings.data_dir.rglob("*"), *tmp_path.glob("*.log")) if path.is_file()]
    assert not [row for row in rows if SECRET in row]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert not [path for path in settings.work_dir.iterdir() if path.suffix in (".resume", ".model")], (
        "the copy is removed"
    )


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended
        return b""


def test_a_model_that_was_replaced_meanwhile_is_refused(
    client: TestClient, url: str, store: Store, start_worker: StartWorker, wait_for: WaitFor, tmp_path: Path
) -> None:
    job_id = submit(client, url)["id"]
    store.put(tiny_model(tmp_path / "other", num_hidden_layers=2), url)
    start_worker()
    job = wait_for(job_id, "failed", "succeeded", timeout_s=LIMIT_S)
    assert job.error is not None and job.error["code"] == "model_changed"
    assert job.failure_count == 1, "another attempt would find the same"


def test_a_worker_that_dies_while_it_copies(
    client: TestClient, url: str, store: Store, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    """The store is held, so that the copy hangs; then it answers again, to another worker."""
    job_id = submit(client, url)["id"]
    first = start_worker()
    store.hold()
    try:
        wait_until(lambda: engines("quantcore fetch"), timeout_s=LIMIT_S)
        first.kill()
        wait_until(lambda: not engines("quantcore fetch"))
    finally:
        store.go_on()
    start_worker()
    job = wait_for(job_id, "succeeded", "failed", timeout_s=LIMIT_S)
    assert (job.state, job.attempt) == ("succeeded", 2), job.error


def test_a_cancel_while_the_model_is_copied(
    client: TestClient, url: str, store: Store, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    job_id = submit(client, url)["id"]
    start_worker()
    store.hold()
    try:
        wait_until(lambda: engines("quantcore fetch"), timeout_s=LIMIT_S)
        assert client.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
        wait_for(job_id, "cancelled")
    finally:
        store.go_on()
    assert not engines("quantcore fetch")


def test_what_is_refused_before_a_job(client: TestClient, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(id: str) -> tuple[int, dict[str, Any]]:
        answer = client.post("/v1/plans", json=body({"id": id}))
        problem = answer.json()
        return answer.status_code, problem["errors"][0] if "errors" in problem else problem

    status, error = refusal("s3://other/models/a")
    assert (status, error["code"], error["allowed"]) == (422, "model_url_not_allowed", [MODELS])
    assert refusal(f"{MODELS}/none")[1]["code"] == "store_not_found"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    status, error = refusal(url)
    assert (status, error["code"]) == (422, "store_forbidden")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    status, error = refusal(url)
    assert (status, error["code"]) == (503, "store_unreachable")


def test_the_tokens_of_a_dataset_are_counted(client: TestClient, url: str, settings: Settings, tmp_path: Path) -> None:
    lines = b'{"text": "one two three"}\n' * 20
    dataset = client.post("/v1/datasets", files={"file": ("a.jsonl", lines)}).json()
    local = tiny_model(settings.model_roots[0] / "model")
    counted = [
        client.get(f"/v1/datasets/{dataset['id']}/statistics", params={"model": model}).json()
        for model in (url, str(local))
    ]
    assert counted[0]["tokens"] == counted[1]["tokens"] and counted[0]["tokens"], counted


def test_a_full_bucket(
    client: TestClient, url: str, store: Store, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    """Nothing that looks whole is there; the publication goes on when there is room."""
    store.admin("quota", "set", "--quota-scope=user", f"--uid={USER}", "--max-objects=1")
    store.admin("quota", "enable", "--quota-scope=user", f"--uid={USER}")
    try:
        job_id = submit(client, url, publish={"to": f"{RESULTS}/full"})["id"]
        start_worker()
        wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
        shown = wait_until(
            lambda: next((e for e in [client.get(f"/v1/jobs/{job_id}").json()["publication"]] if e["error"]), None),
            timeout_s=LIMIT_S,
        )
        assert shown["error"]["code"] == "disk_full"
    finally:
        store.admin("quota", "disable", "--quota-scope=user", f"--uid={USER}")
    wait_until(
        lambda: client.get(f"/v1/jobs/{job_id}").json()["publication"]["state"] == "published", timeout_s=LIMIT_S
    )


def test_a_folder_with_many_pages_of_keys(store: Store, url: str) -> None:
    """A listing comes in pages of a thousand."""
    inside = open_store(url)
    for number in range(2100):
        obstore.put(inside, f"notes/{number:05}.txt", b"x")
        if number < 1100:
            obstore.put(inside, f"note-{number:05}.txt", b"x")
    from quantcore.hub.download import read_headers

    assert read_headers(url)[0].total_bytes
