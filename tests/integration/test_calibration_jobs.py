"""Jobs by what calibrates them, with the real engine: files, chats, and datasets on our stand-in of the Hub."""

import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from huggingface_hub import constants

from api.settings import Settings
from api.store.tables.jobs import Job
from quantcore.cli.main import main
from tests.support.hub_server import TOKEN, HubServer
from tests.support.models import tiny_model
from tests.support.service import REAL_ENGINE, WorkerProcess

LIMIT_S = 540.0
FEW = {"num_samples": 2, "seq_len": 32}
TEMPLATE = "{% for one in messages %}<|{{ one.role }}|>{{ one.content }}{{ eos_token }}{% endfor %}"
CARD = b"""---
configs:
- config_name: default
  data_files:
  - split: train_sft
    path: data/train_sft-*
---
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """The stand-in, for the API in this process and, by the environment, for workers."""
    with HubServer() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)  # of other processes
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        for name, value in (environment | {"HF_TOKEN": TOKEN}).items():
            monkeypatch.setenv(name, value)
        for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield hub
        huggingface_hub.close_session()  # type: ignore[attr-defined]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """The real engine, which needs more than a stub's time between two heartbeats."""
    return settings.model_copy(update=REAL_ENGINE)


@pytest.fixture
def model(settings: Settings) -> Path:
    """A tiny model that knows chats."""
    folder = tiny_model(settings.model_roots[0] / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def body(model: Path, **calibration: Any) -> dict[str, Any]:
    return {"model": {"path": str(model)}, "config": {"preset": "int8"}, "calibration": FEW | calibration}


def chats(count: int = 400) -> list[dict[str, Any]]:
    words = "the quick brown fox jumps over the lazy dog and runs far away from here "
    return [
        {"messages": [{"role": "user", "content": f"{number} {words}"}, {"role": "assistant", "content": words * 3}]}
        for number in range(count)
    ]


@pytest.mark.slow
def test_a_file_of_chats(
    client: TestClient, model: Path, start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job]
) -> None:
    file = model.parent / "chats.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in chats()).encode()))
    job = client.post("/v1/jobs", json=body(model, source=str(file))).json()
    assert job["calibration"] == FEW | {"source": str(file), "seed": 0}
    start_worker()
    row = wait_for(job["id"], "succeeded", "failed", timeout_s=LIMIT_S)
    assert row.state == "succeeded", row.error

    (model / "chat_template.jinja").write_text("{{ 'x' * 10**10 }}")
    job = client.post("/v1/jobs", json=body(model, source=str(file))).json()
    row = wait_for(job["id"], "succeeded", "failed", timeout_s=LIMIT_S)
    assert row.error and row.error["code"] == "bad_chat_template"


def test_a_place_of_an_importance_matrix_is_checked_at_once(client: TestClient, model: Path, tmp_path: Path) -> None:
    def answer(path: Path) -> tuple[int, str, str]:
        config = {"preset": "gguf_q4_0", "algo_config": [{"name": "rtn", "imatrix": str(path)}]}
        answer = client.post("/v1/jobs?dry_run=true", json={"model": {"path": str(model)}, "config": config})
        said = answer.json()
        return answer.status_code, said["code"], said["errors"][0]["pointer"]

    (tmp_path / "secret.gguf").touch()
    assert answer(tmp_path / "secret.gguf") == (422, "path_not_allowed", "#/config/algo_config")
    assert answer(model.parent / "nowhere.gguf") == (422, "imatrix_not_found", "#/config/algo_config")


@pytest.mark.slow
def test_an_importance_matrix(
    client: TestClient, model: Path, start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job]
) -> None:
    file = model.parent / "im.gguf"
    assert main(["imatrix", str(model), "-o", str(file), "--num_calib_data", "2", "--seq_len", "32"]) == 0
    algorithm = {"name": "rtn", "imatrix": str(file)}
    asked = {"model": {"path": str(model)}, "config": {"preset": "gguf_q4_0", "algo_config": [algorithm]}}
    job = client.post("/v1/jobs", json=asked).json()
    start_worker()
    row = wait_for(job["id"], "succeeded", "failed", timeout_s=LIMIT_S)
    assert row.state == "succeeded", row.error


@pytest.fixture
def dataset_sha(hub: HubServer) -> str:
    """The commit of a dataset of chats on the stand-in."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(chats()), buffer)
    files = {"data/train_sft-0.parquet": buffer.getvalue(), "README.md": CARD}
    return hub.add("datasets/HuggingFaceH4/ultrachat_200k", files)


@pytest.mark.slow
def test_a_dataset_on_the_hub(
    client: TestClient, model: Path, hub: HubServer, dataset_sha: str, start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    """Named as AMD Quark names it, at the commit of the submit; gone from the branch when the engine reads it."""
    job = client.post("/v1/jobs", json=body(model, source="HuggingFaceH4/ultrachat_200k")).json()
    assert job["calibration"] == FEW | {
        "source": "HuggingFaceH4/ultrachat_200k",
        "split": "train_sft",
        "column": "messages",
        "revision": dataset_sha,
        "seed": 0,
    }
    hub.add("datasets/HuggingFaceH4/ultrachat_200k", {"README.md": b"moved"})
    start_worker()
    row = wait_for(job["id"], "succeeded", "failed", timeout_s=LIMIT_S)
    assert row.state == "succeeded", row.error
    assert any(TOKEN in request.headers.get("authorization", "") for request in hub.asked("train_sft"))


@pytest.mark.slow
def test_a_split_that_a_dataset_on_the_hub_has_not(
    client: TestClient, model: Path, dataset_sha: str, start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    asked = {"source": "HuggingFaceH4/ultrachat_200k", "split": "no", "revision": dataset_sha}
    job = client.post("/v1/jobs", json=body(model, **asked))
    start_worker()
    row = wait_for(job.json()["id"], "succeeded", "failed", timeout_s=LIMIT_S)
    assert row.error and (row.error["code"], row.error["retryable"]) == ("unknown_split", False)
    assert "train_sft" in row.error["hint"]


def upload(client: TestClient, name: str, rows: list[dict[str, Any]], **form: str) -> str:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    answer = client.post("/v1/datasets", files={"file": (name, content)}, data=form)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def test_a_job_holds_all_its_datasets(client: TestClient, model: Path) -> None:
    """Each gets its own column, stays while the job waits, and is named where it is at fault."""
    first = upload(client, "chats.jsonl", chats(8))
    second = upload(client, "rows.jsonl", [{"id": 1, "code": "x = 1"}], column="code")
    shared = [{"source": first, "share": 3}, {"source": second}, {"source": "builtin", "share": 0.5}]
    job = client.post("/v1/jobs", json=body(model, sources=shared, num_samples=9)).json()
    assert job["calibration"] == {
        "sources": [
            {"source": first, "column": "messages", "share": 3.0},
            {"source": second, "column": "code", "share": 1.0},
            {"source": "builtin", "share": 0.5},
        ],
        "num_samples": 9, "seq_len": 32, "seed": 0,
    }  # fmt: skip
    for dataset in (first, second):
        answer = client.delete(f"/v1/datasets/{dataset}")
        assert (answer.status_code, answer.json()["code"]) == (409, "dataset_in_use")
    clone = client.post(f"/v1/jobs/{job['id']}/clone").json()
    assert clone["calibration"] == job["calibration"]
    for job_id in (job["id"], clone["id"]):
        assert client.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
    assert client.delete(f"/v1/datasets/{second}").status_code == 204

    for fault, code, pointer in (
        ({"source": second}, "dataset_not_found", "#/calibration/sources/1/source"),
        ({"source": first, "column": "no"}, "no_text_column", "#/calibration/sources/1/column"),
        ({"source": "/etc/passwd"}, "path_not_allowed", "#/calibration/sources/1/source"),
        ({"source": first, "split": "train"}, "invalid_request", "#/calibration/sources/1"),
    ):
        problem = client.post("/v1/jobs", json=body(model, sources=[{"source": "builtin"}, fault])).json()
        assert (problem["code"], problem["errors"][0]["pointer"]) == (code, pointer), problem


@pytest.mark.slow
def test_several_sources(
    client: TestClient, model: Path, settings: Settings, hub: HubServer, dataset_sha: str,
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    """A file, an uploaded dataset and one on the Hub, which has moved on when the engine reads it."""
    file = model.parent / "words.txt"
    file.write_text("some words of a file " * 2000)
    dataset = upload(client, "chats.jsonl", chats())
    shared = [{"source": str(file)}, {"source": dataset}, {"source": "HuggingFaceH4/ultrachat_200k"}]
    job = client.post("/v1/jobs", json=body(model, sources=shared, num_samples=6)).json()
    assert job["calibration"]["sources"][2]["revision"] == dataset_sha
    hub.add("datasets/HuggingFaceH4/ultrachat_200k", {"README.md": b"moved"})
    start_worker()
    row = wait_for(job["id"], "succeeded", "failed", timeout_s=LIMIT_S)
    assert row.state == "succeeded", row.error
    artifact = client.get(f"/v1/jobs/{job['id']}").json()["artifact"]["path"]
    report = json.loads((Path(artifact) / "report.json").read_text())
    assert [source["num_samples"] for source in report["calibration"]["sources"]] == [2, 2, 2]


REFUSED: tuple[tuple[dict[str, Any], int, str, str], ...] = (
    ({"source": "org/nothing"}, 422, "hub_not_found", "#/calibration/source"),
    ({"source": "org/set", "revision": "nowhere"}, 422, "hub_revision_not_found", "#/calibration/revision"),
    ({"source": "not a name"}, 422, "invalid_dataset_name", "#/calibration/source"),
    ({"source": "../../etc/passwd"}, 422, "invalid_dataset_name", "#/calibration/source"),
    ({"source": "https://example.org/a"}, 422, "invalid_dataset_name", "#/calibration/source"),
    ({"source": "/etc/passwd"}, 422, "path_not_allowed", "#/calibration/source"),
    ({"source": "{model}/config.bin"}, 422, "calibration_not_found", "#/calibration/source"),
    ({"source": "{model}/model.safetensors"}, 422, "unsupported_format", "#/calibration/source"),
    ({"source": "{model}/config.json", "split": "train"}, 422, "invalid_request", "#/calibration"),
    ({"column": "text"}, 422, "invalid_request", "#/calibration"),
    ({"source": "org/set", "script": True}, 422, "unknown_field", "#/calibration/script"),
)


def test_what_cannot_work_is_refused_at_once(
    subtests: pytest.Subtests, client: TestClient, model: Path, hub: HubServer
) -> None:
    hub.add("datasets/org/set", {"train.jsonl": b'{"text": "a"}\n'})
    for calibration, status, code, pointer in REFUSED:
        with subtests.test(str(calibration)):
            if "source" in calibration:
                calibration = calibration | {"source": calibration["source"].format(model=model)}
            answer = client.post("/v1/jobs", json=body(model, **calibration))
            problem = answer.json()
            assert (answer.status_code, problem["code"]) == (status, code), problem
            assert problem["errors"][0]["pointer"] == pointer


def test_a_hub_that_is_away_is_a_matter_of_time(client: TestClient, model: Path, hub: HubServer) -> None:
    hub.status = 503
    answer = client.post("/v1/jobs", json=body(model, source="org/set"))
    assert (answer.status_code, answer.json()["code"]) == (503, "hub_unreachable")
    assert "retry-after" in answer.headers
