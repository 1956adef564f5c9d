"""Jobs whose model is on the Hub: submitted by id, fetched by the real engine, from our stand-in of the Hub."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.settings import Settings
from api.store.engine import Sessions
from api.store.tables.jobs import Job
from quantcore.config import presets
from tests.support.hub_server import TOKEN, HubServer
from tests.support.models import tiny_model
from tests.support.reading import quantize
from tests.support.service import REAL_ENGINE, WorkerProcess

CALIBRATION = {"source": "builtin", "num_samples": 2, "seq_len": 32}
LIMIT_S = 540.0


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """The real engine, which needs more than a stub's time between two heartbeats."""
    return settings.model_copy(update=REAL_ENGINE)


def body(model_id: str = "org/tiny", **model: str) -> dict[str, Any]:
    return {"model": {"id": model_id, **model}, "config": {"preset": "int8_dynamic"}, "calibration": CALIBRATION}


def test_a_model_by_id_from_the_request_to_the_artifact(
    client: TestClient,
    hub: HubServer,
    start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Job],
    sessions: Sessions,
    settings: Settings,
    tmp_path: Path,
) -> None:
    """The line is cut twice in mid-file, the branch moves on after the submit, a pickle lies beside the weights."""
    folder = tiny_model(tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    sha = hub.add("org/tiny", folder, private=True)
    answer = client.post("/v1/jobs", json=body())
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert job["model"] == {"id": "org/tiny", "revision": "main", "sha": sha}
    hub.add("org/tiny", {"config.json": b"{}"})
    hub.drops["model.safetensors"] = [100_000, 50_000]

    start_worker()
    row = wait_for(job["id"], "succeeded", "failed", timeout_s=LIMIT_S)
    assert row.state == "succeeded", row.error
    assert hub.drops["model.safetensors"] == []
    assert hub.asked("pytorch_model.bin") == []
    events = client.get(f"/v1/jobs/{job['id']}/events").json()["data"]
    phases = [event["data"]["phase"] for event in events if event["kind"] == "phase_started"]
    assert phases[:3] == ["resolve", "download", "plan"]
    report = client.get(f"/v1/jobs/{job['id']}/artifacts/report.json").json()
    assert report["model"] == {"id": "org/tiny", "sha": sha, "model_type": "llama"}

    assert any(TOKEN in request.headers.get("authorization", "") for request in hub.requests)
    assert_no_secret_was_kept(sessions, settings, tmp_path)


def assert_no_secret_was_kept(sessions: Sessions, settings: Settings, tmp_path: Path) -> None:
    """Neither the token nor a signed address: not in a row, not in a log, not in the artifact."""
    with sessions.begin() as session:
        rows = [
            str(row)
            for table in ("job", "event", "attempt", "artifact", "outbox", "log_line", "audit_entry", "hub_token")
            for row in session.execute(text(f"SELECT to_jsonb(t) FROM {table} t"))
        ]
    files = [path for path in (*settings.data_dir.rglob("*"), *tmp_path.glob("*.log")) if path.is_file()]
    assert rows and [path for path in files if path.suffix == ".log"]
    for secret in (TOKEN, "secret-signature"):
        assert not [row for row in rows if secret in row]
        assert not [path for path in files if secret.encode() in path.read_bytes()]


QUANTIZED = {
    "bitsandbytes": "nf4_double_quant",
    "compressed_tensors": "w4a16_sym",
    "gptq": "w4a16_sym",
    "awq": "w4a16",
    "quark": "fp8",
}


@pytest.mark.slow
@pytest.mark.usefixtures("proof_in_this_process")
def test_quantized_models_are_planned_as_on_the_disk_without_their_weights(
    client: TestClient, hub: HubServer, settings: Settings, tmp_path: Path
) -> None:
    """The weights are larger than the gaps that one request fetches, as those of published models."""
    model_dir = tiny_model(tmp_path / "model", hidden_size=1024, intermediate_size=2048, num_hidden_layers=1)
    for export, preset in QUANTIZED.items():
        folder = settings.model_roots[0] / export
        quantize(model_dir, folder, presets.resolve(preset), export)
        hub.add("org/tiny", folder)
        asked = {"config": {"preset": "int8_dynamic"}, "calibration": CALIBRATION}
        hub.requests.clear()
        remote = client.post("/v1/plans", json={"model": {"id": "org/tiny"}, **asked})
        local = client.post("/v1/plans", json={"model": {"path": str(folder)}, **asked})
        assert remote.status_code == 200, remote.text
        plans = [answer.json() for answer in (remote, local)]
        for plan in plans:
            plan.pop("model", None)
        assert plans[0] == plans[1]
        assert any(f"already quantized ({export})" in warning for warning in plans[0]["warnings"])
        size = (folder / "model.safetensors").stat().st_size
        ranges = [request.headers["range"].removeprefix("bytes=").split("-") for request in hub.asked("/cdn/")]
        begun = sum(int(end) + 1 - int(begin) for begin, end in ranges if int(begin) > 0)
        assert begun < size / 5 and (len(ranges) > 1) == (export in ("bitsandbytes", "compressed_tensors", "gptq"))


@pytest.mark.slow
@pytest.mark.usefixtures("proof_in_this_process")
def test_a_quantized_model_by_id_is_quantized_anew(
    client: TestClient, hub: HubServer, start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job],
    tmp_path: Path,
) -> None:  # fmt: skip
    quantize(tiny_model(tmp_path / "model"), tmp_path / "nf4", presets.resolve("nf4_double_quant"), "bitsandbytes")
    hub.add("org/tiny", tmp_path / "nf4")
    job_id = client.post("/v1/jobs", json=body()).json()["id"]
    start_worker()
    job = wait_for(job_id, "succeeded", "failed", timeout_s=LIMIT_S)
    assert job.state == "succeeded", job.error
    report = client.get(f"/v1/jobs/{job_id}/artifacts/report.json").json()
    assert any("already quantized (bitsandbytes)" in warning for warning in report["warnings"])


@pytest.mark.slow
@pytest.mark.usefixtures("proof_in_this_process")
def test_a_gguf_file_of_an_allowed_folder_is_a_job(
    client: TestClient, start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job], settings: Settings,
    tmp_path: Path,
) -> None:  # fmt: skip
    quantize(tiny_model(tmp_path / "model"), tmp_path / "q", presets.resolve("gguf_q8_0"), "gguf")
    file = settings.model_roots[0] / "tiny.gguf"
    file.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "q/model.gguf").rename(file)
    asked = {"config": {"preset": "int8_dynamic"}, "calibration": CALIBRATION, "max_shard_size": "90KB"}
    answer = client.post("/v1/jobs", json={"model": {"path": str(file)}, **asked})
    assert answer.status_code == 202, answer.text
    start_worker()
    job = wait_for(answer.json()["id"], "succeeded", "failed", timeout_s=LIMIT_S)
    assert job.state == "succeeded", job.error
    assert "model-00002-of-" in client.get(f"/v1/jobs/{job.id}/artifacts").text
    file.write_bytes(file.read_bytes()[:2000])
    answer = client.post("/v1/jobs", json={"model": {"path": str(file)}, **asked})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_gguf")


@pytest.mark.slow
def test_a_file_that_is_not_the_commits_is_tried_again_and_refused(
    client: TestClient, hub: HubServer, start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job],
    tmp_path: Path,
) -> None:  # fmt: skip
    folder = tiny_model(tmp_path / "model")
    hub.add("org/tiny", folder)
    job_id = client.post("/v1/jobs", json=body()).json()["id"]
    hub.tampered["tokenizer.json"] = b"X" + (folder / "tokenizer.json").read_bytes()[1:]
    start_worker()
    job = wait_for(job_id, "retry_wait", "succeeded", "failed", timeout_s=LIMIT_S)
    assert job.error is not None or job.state == "retry_wait"
    hub.tampered.clear()
    job = wait_for(job_id, "succeeded", "failed", timeout_s=LIMIT_S)
    assert job.state == "succeeded", job.error
    assert job.attempt > 1


def test_what_cannot_be_had_is_said_at_once(client: TestClient, hub: HubServer) -> None:
    config = json.dumps({"model_type": "llama", "num_hidden_layers": 1}).encode()
    hub.add("org/tiny", {"config.json": config})
    hub.add("org/gated", {"config.json": config}, gated=True)
    climbs = json.dumps({"weight_map": {"a": "../../x/model.safetensors"}}).encode()
    hub.add("org/climbs", {"config.json": config, "model.safetensors.index.json": climbs})
    hub.add("org/pickle", {"config.json": config, "pytorch_model.bin": b"x"})
    for given, code, pointer in (
        (body("org/none"), "hub_not_found", "#/model/id"),
        (body(revision="v9"), "hub_revision_not_found", "#/model/revision"),
        (body("org/gated"), "hub_gated", "#/model/id"),
        (body("org/climbs"), "unsafe_path", "#/model/id"),
        (body("org/pickle"), "unsafe_weights_format", "#/model/id"),
    ):
        for route in ("/v1/jobs", "/v1/plans"):
            answer = client.post(route, json=given)
            assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
            assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]
    for status, code in ((503, "hub_unreachable"), (429, "hub_rate_limited")):
        hub.status = status
        answer = client.post("/v1/jobs", json=body())
        assert (answer.status_code, answer.json()["code"]) == (503, code)
        assert int(answer.headers["Retry-After"]) > 0
    assert client.get("/v1/jobs").json()["data"] == []


def test_a_bad_id_asks_nobody(client: TestClient, hub: HubServer) -> None:
    for model_id in ("../x", "/etc", "a/b/c", "file://x", "a/" + "b" * 300, "a/b--c", "a/b.git", "tiny"):
        answer = client.post("/v1/jobs", json=body(model_id))
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_model_id"), model_id
    assert hub.requests == []


# tokens of projects


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch, hub: HubServer) -> None:
    """The service itself has no token."""
    monkeypatch.delenv("HF_TOKEN")


@pytest.mark.slow
def test_a_job_with_a_token_of_its_project(
    client: TestClient,
    hub: HubServer,
    no_token: None,
    start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Job],
    sessions: Sessions,
    settings: Settings,
    tmp_path: Path,
) -> None:
    """The token goes from the request into a sealed row and through a pipe to the download, and is nowhere else."""
    hub.add("org/tiny", tiny_model(tmp_path / "model"), private=True)
    assert client.post("/v1/jobs", json=body()).json()["code"] == "hub_not_found"
    answer = client.put("/v1/hub-tokens/team", json={"token": TOKEN})
    assert (answer.status_code, TOKEN in answer.text) == (200, False)
    sent = client.post("/v1/jobs", json=body(hub_token="team"))
    assert sent.status_code == 202, sent.text
    job = sent.json()
    assert job["model"]["hub_token"] == "team"
    start_worker()
    wait_for(job["id"], "running")
    looked_at: set[bytes] = set()
    while (row := wait_for(job["id"], "running", "succeeded", "failed", timeout_s=LIMIT_S)).state == "running":
        ours = [Path("/proc", str(process.pid)) for process in psutil.Process().children(recursive=True)]
        looked_at |= {bytes_of(folder / name) for folder in ours for name in ("environ", "cmdline")}
        time.sleep(0.1)
    assert row.state == "succeeded", row.error
    assert any(b"quantcore\0run" in each for each in looked_at)  # the engine was there to be looked at
    assert not [each for each in looked_at if TOKEN.encode() in each]
    assert any(TOKEN in request.headers.get("authorization", "") for request in hub.requests)
    clone = client.post(f"/v1/jobs/{job['id']}/clone")
    assert (clone.status_code, clone.json()["model"]) == (202, job["model"] | {"revision": job["model"]["sha"]})
    assert_no_secret_was_kept(sessions, settings, tmp_path)


def bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # a process that has ended
        return b""


def test_what_names_no_token(client: TestClient, hub: HubServer, no_token: None, sessions: Sessions) -> None:
    hub.add("org/tiny", {"config.json": b"{}"}, private=True)
    client.put("/v1/hub-tokens/other", json={"token": TOKEN})
    answer = client.post("/v1/jobs", json=body(hub_token="team"))
    assert (answer.status_code, answer.json()["code"]) == (422, "hub_token_not_found")
    assert answer.json()["errors"][0]["pointer"] == "#/model/hub_token"
    assert hub.requests == []
    given = client.post("/v1/jobs", json=body(hub_token=TOKEN))  # the token itself, by mistake
    assert (given.status_code, TOKEN in given.text) == (422, False)
    local = client.post("/v1/jobs", json={"model": {"path": "/x", "hub_token": "other"}, "config": {"preset": "fp8"}})
    assert (local.status_code, local.json()["code"]) == (422, "invalid_model")
    for wrong in ("", " ", "hf a", "hf_\u00e9", "x" * 513):
        answer = client.put("/v1/hub-tokens/team", json={"token": wrong})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "#/token"), wrong
    assert client.put("/v1/hub-tokens/Team", json={"token": TOKEN}).status_code == 422
    assert [token["name"] for token in client.get("/v1/hub-tokens").json()["data"]] == ["other"]
    with sessions.begin() as session:
        session.execute(text("UPDATE hub_token SET name = 'team'"))  # a sealed token does not open in another row
    moved = client.post("/v1/jobs", json=body(hub_token="team"))
    assert (moved.status_code, moved.json()["code"]) == (422, "hub_token_not_found")
    assert "another entry" in moved.json()["detail"]


@pytest.mark.slow
def test_a_token_that_was_deleted_fails_the_job(
    client: TestClient, hub: HubServer, no_token: None, start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Job], tmp_path: Path,
) -> None:  # fmt: skip
    hub.add("org/tiny", tiny_model(tmp_path / "model"), private=True)
    client.put("/v1/hub-tokens/team", json={"token": TOKEN})
    job_id = client.post("/v1/jobs", json=body(hub_token="team")).json()["id"]
    assert client.delete("/v1/hub-tokens/team").status_code == 204
    assert client.delete("/v1/hub-tokens/team").status_code == 404
    start_worker()
    failed = wait_for(job_id, "failed", timeout_s=LIMIT_S)
    assert failed.error is not None
    assert (failed.error["code"], failed.error["retryable"]) == ("hub_token_not_found", False)
    assert "hub-tokens put team" in failed.error["hint"]


def test_without_a_secret_key_no_secret_is_taken(settings: Settings, sessions: Sessions) -> None:
    from api.http.security import create_key
    from api.main import create_app

    bare = settings.model_copy(update={"secret_key": None})
    headers = {"Authorization": f"Bearer {create_key(sessions, 'k')}"}
    with TestClient(create_app(bare), headers=headers) as client:
        answer = client.put("/v1/hub-tokens/team", json={"token": TOKEN})
    assert (answer.status_code, answer.json()["code"]) == (409, "encryption_not_configured")
    with sessions.begin() as session:
        assert session.execute(text("SELECT 1 FROM hub_token")).all() == []
