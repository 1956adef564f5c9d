"""Uploaded datasets: what is taken in, what is refused with which code, who needs them, when they go."""

import gzip
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from fastapi.testclient import TestClient
from huggingface_hub import constants
from sqlalchemy import text

from api.datasets import child, storage
from api.datasets.cleanup_task import CleanupTask
from api.http import turns
from api.jobs import submission
from api.main import create_app
from api.settings import Settings
from api.store.engine import Sessions
from api.store.tables.jobs import Job
from tests.support.hub_server import HubServer
from tests.support.models import tiny_model
from tests.support.service import REAL_ENGINE, WorkerProcess
from tests.support.waiting import PATIENCE_S, wait_until

ROWS = [{"id": number, "text": f"this is row number {number} " * 3} for number in range(200)]
CONTENT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def upload(client: TestClient, name: str = "rows.jsonl", content: bytes = CONTENT, **form: str) -> Any:
    return client.post("/v1/datasets", files={"file": (name, content)}, data=form)


def made(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(answer: Any, status: int, code: str) -> dict[str, Any]:
    problem: dict[str, Any] = answer.json()
    assert (answer.status_code, problem["code"]) == (status, code), answer.text
    return problem


def stored(settings: Settings) -> list[str]:
    """The names of all files of datasets and uploads."""
    folders = (settings.datasets_dir, settings.uploads_dir)
    return sorted(path.name for folder in folders for path in folder.rglob("*") if path.is_file())


def test_a_small_file_from_the_upload_to_the_end(client: TestClient, settings: Settings) -> None:
    packed = gzip.compress(CONTENT)
    answer = upload(client, name="rows.JSONL.gz", content=packed)
    dataset = made(answer)
    assert answer.headers["location"] == f"/v1/datasets/{dataset['id']}"
    assert (dataset["name"], dataset["format"], dataset["columns"]) == ("rows.JSONL.gz", "jsonl.gz", ["id", "text"])
    assert dataset["column"] == "text" and dataset["sha256"] == hashlib.sha256(packed).hexdigest()
    assert dataset["statistics"]["num_rows"] == 200 and dataset["statistics"]["num_duplicates"] == 0
    assert stored(settings) == [f"{dataset['sha256']}.jsonl.gz"]

    assert client.get(f"/v1/datasets/{dataset['id']}").json() == dataset
    rows = client.get(f"/v1/datasets/{dataset['id']}/preview?rows=2").json()["rows"]
    assert rows == [{"place": f"Line {at + 1}", "values": ROWS[at]} for at in range(2)]
    statistics = client.get(f"/v1/datasets/{dataset['id']}/statistics").json()
    assert statistics == dataset["statistics"] | {"tokens": None}

    assert client.delete(f"/v1/datasets/{dataset['id']}").status_code == 204
    refused(client.get(f"/v1/datasets/{dataset['id']}"), 404, "dataset_not_found")
    refused(client.get(f"/v1/datasets/{dataset['id']}/preview"), 404, "dataset_not_found")
    refused(client.delete(f"/v1/datasets/{dataset['id']}"), 404, "dataset_not_found")
    assert stored(settings) == []


def test_statistics_say_what_is_odd(client: TestClient) -> None:
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "bye"}]
    rows = [{"messages": one} for one in (chat, chat, None, [], chat[:1])]
    content = "".join(json.dumps(row) + "\n" for row in rows if row["messages"] != []).encode()
    statistics = made(upload(client, content=content))["statistics"]
    assert {name: value for name, value in statistics.items() if name != "chars"} == {
        "num_rows": 4, "num_empty": 1, "num_duplicates": 1, "num_chats": 3,
    }  # fmt: skip
    assert statistics["chars"] == {
        "sum": 23, "min": 5, "median": 9, "max": 9,
        "histogram": [{"from": 4, "to": 8, "count": 1}, {"from": 8, "to": 16, "count": 2}],
    }  # fmt: skip


@pytest.mark.slow
def test_tokens_are_counted_for_a_model(client: TestClient, settings: Settings) -> None:
    model = tiny_model(settings.model_roots[0] / "tiny")
    dataset = made(upload(client))
    address = f"/v1/datasets/{dataset['id']}/statistics"
    tokens = client.get(address, params={"model": str(model), "seq_len": 32}).json()["tokens"]
    assert (tokens["num_rows"], tokens["is_whole"], tokens["num_longer"]) == (200, True, 200)
    assert tokens["num_beyond"] == tokens["tokens"]["sum"] - 200 * 32
    assert tokens["num_windows"] == tokens["tokens"]["sum"] // 32
    problem = refused(client.get(address, params={"model": "/etc"}), 422, "path_not_allowed")
    assert problem["errors"][0]["pointer"] == "#/model"
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    refused(client.get(address, params={"model": str(model)}), 422, "no_tokenizer")


@pytest.mark.slow
def test_tokens_for_a_model_on_the_hub(client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer() as hub:
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)  # of other processes
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        hub.add("org/tiny", tiny_model(tmp_path / "model"))
        address = f"/v1/datasets/{made(upload(client))['id']}/statistics"
        tokens = client.get(address, params={"model": "org/tiny"}).json()["tokens"]
        assert tokens["num_rows"] == 200 and hub.asked(".safetensors") == []
        refused(client.get(address, params={"model": "org/nothing"}), 422, "hub_not_found")
        refused(client.get(address, params={"model": "../x"}), 422, "invalid_model_id")
        huggingface_hub.close_session()  # type: ignore[attr-defined]


def test_the_list_goes_on_where_it_stopped(client: TestClient) -> None:
    ids = [made(upload(client, name=f"{number}.jsonl"))["id"] for number in range(3)]
    first = client.get("/v1/datasets?limit=2")
    assert [each["id"] for each in first.json()["data"]] == ids[:0:-1] and first.json()["has_more"]
    following = client.get(first.links["next"]["url"]).json()
    assert [each["id"] for each in following["data"]] == ids[:1] and not following["has_more"]
    assert client.get("/v1/datasets?cursor=junk").status_code == 422


def test_one_content_is_one_file_until_nobody_needs_it(client: TestClient, settings: Settings) -> None:
    one, two = made(upload(client)), made(upload(client, name="other.jsonl"))
    assert one["sha256"] == two["sha256"] and one["id"] != two["id"] and len(stored(settings)) == 1
    assert client.delete(f"/v1/datasets/{one['id']}").status_code == 204
    assert client.get(f"/v1/datasets/{two['id']}/preview").status_code == 200
    assert client.delete(f"/v1/datasets/{two['id']}").status_code == 204
    assert stored(settings) == []


BAD: dict[str, tuple[str, bytes, int, str]] = {
    "a folder": ("a/b.jsonl", CONTENT, 422, "unsafe_path"),
    "a way up": ("../../etc/cron.d/a.jsonl", CONTENT, 422, "unsafe_path"),
    "a way up for Windows": ("..\\a.jsonl", CONTENT, 422, "unsafe_path"),
    "a drive": ("C:a.jsonl", CONTENT, 422, "unsafe_path"),
    "hidden": (".jsonl", CONTENT, 422, "unsafe_path"),
    "an archive": ("a.zip", CONTENT, 422, "unsupported_format"),
    "an archive of archives": ("a.tar.gz", CONTENT, 422, "unsupported_format"),
    "a program": ("a.py", b"print()", 422, "unsupported_format"),
    "a pickle": ("a.pkl", b"\x80\x04.", 422, "unsupported_format"),
    "empty": ("a.jsonl", b"", 422, "empty_dataset"),
    "without text": ("a.jsonl", b'{"text": ""}\n{"text": " "}\n', 422, "empty_dataset"),
    "another column": ("a.jsonl", b'{"body": "a"}\n', 422, "no_text_column"),
    "not UTF-8": ("a.txt", b"caf\xe9", 422, "bad_encoding"),
    "no JSON": ("a.jsonl", b'{"text": "a"}\nnot JSON\n', 422, "bad_row"),
    "an abyss": ("a.jsonl", b'{"text": ' + b"[" * 500_000, 422, "bad_row"),
    "no gzip": ("a.csv.gz", b"text\na\n", 422, "bad_archive"),
    "a bomb": ("a.txt.gz", b"a " * (9 << 20), 422, "row_too_large"),
    "a bomb of lines": ("a.txt.gz", (b"some words, " * 10 + b"\n") * (9 << 16), 422, "archive_too_large"),
    "half a pair": ("a.jsonl", b'{"\\ud800": "a", "text\\u0000": 1}\n', 422, "no_text_column"),
    "Parquet of nothing": ("a.parquet", b"PAR1" * 10, 422, "bad_row"),
    "too large for one request": ("a.txt", b"a\n" * (9 << 20), 413, "body_too_large"),
}


READ_AS_ANOTHER = {"without text", "not UTF-8", "no JSON", "half a pair", "Parquet of nothing", "no gzip"}
"""A reader's process starts for each of them, and ends as it does for another one. See also its own tests."""


@pytest.mark.parametrize("cases", [BAD.keys() - READ_AS_ANOTHER, pytest.param(READ_AS_ANOTHER, marks=pytest.mark.slow)])
def test_a_bad_file_is_refused_and_nothing_is_kept(
    subtests: pytest.Subtests, client: TestClient, settings: Settings, cases: Set[str]
) -> None:
    for case in sorted(cases):
        name, content, status, code = BAD[case]
        with subtests.test(case):
            if "bomb" in case:
                content = gzip.compress(content)
            problem = refused(upload(client, name=name, content=content), status, code)
            assert str(settings.data_dir) not in json.dumps(problem)
            assert stored(settings) == []
            assert client.get("/v1/datasets").json()["data"] == []


def test_a_column_that_is_not_there_lists_those_that_are(client: TestClient) -> None:
    problem = refused(upload(client, column="body"), 422, "no_text_column")
    assert problem["errors"][0]["pointer"] == "#/column" and problem["errors"][0]["allowed"] == ["id", "text"]
    assert "Line 1" in problem["detail"]
    refused(upload(client, column="id"), 422, "no_text_column")


def test_a_reader_that_dies_or_hangs_takes_nothing_along(
    client: TestClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child.sys, "executable", "/bin/false")
    refused(upload(client), 422, "unreadable_file")
    monkeypatch.setattr(child, "TIMEOUT_S", 0.2)
    script = settings.data_dir / "slow"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(script))
    started = time.monotonic()
    refused(upload(client), 422, "unreadable_file")
    assert time.monotonic() - started < PATIENCE_S and stored(settings) == []


def test_a_project_with_too_much_to_read_is_told_to_wait(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = tmp_path / "reading", tmp_path / "go-on"
    script = tmp_path / "waits"
    lines = (f"touch {reading}", f"while [ ! -e {go_on} ]; do sleep 0.05; done", f'exec {sys.executable} "$@"')
    script.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    script.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(script))
    monkeypatch.setattr(turns, "MAX_WAIT_S", 0.2)
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(upload(client)))
    first.start()
    wait_until(lambda: reading.exists())
    answer = upload(client)
    refused(answer, 503, "busy")
    assert answer.headers["retry-after"] == "5"
    monkeypatch.setattr(turns, "MAX_WAITING", 0)
    refused(upload(client), 503, "busy")
    go_on.touch()
    first.join()
    monkeypatch.undo()
    made(answers[0])
    made(upload(client))


def test_the_reader_has_no_secrets(client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, said = tmp_path / "spy", tmp_path / "environment"
    script.write_text(f'#!/bin/sh\nenv > {said}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("DATABASE_URL", "canary")
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setattr(child.sys, "executable", str(script))
    made(upload(client))
    assert "canary" not in said.read_text() and "PATH=" in said.read_text()


def begin(client: TestClient, **body: str) -> str:
    answer = client.post("/v1/uploads", json={"filename": "rows.jsonl"} | body)
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/v1/uploads/{answer.json()['id']}"
    return str(answer.headers["location"])


def put(client: TestClient, address: str, number: int, content: bytes, sha256: str | None = None) -> Any:
    sha256 = sha256 or hashlib.sha256(content).hexdigest()
    return client.put(f"{address}/parts/{number}", params={"sha256": sha256}, content=content)


WHOLE = {"sha256": hashlib.sha256(CONTENT).hexdigest()}


def test_a_large_file_comes_in_parts(client: TestClient, settings: Settings) -> None:
    address = begin(client, name="large one", column="text")
    parts = [CONTENT[at : at + 5000] for at in range(0, len(CONTENT), 5000)]
    for number, content in reversed([*enumerate(parts, start=1)]):
        assert put(client, address, number, content).json()["bytes"] == len(content)
    assert put(client, address, 1, b"something else").status_code == 200  # and then the right one after all
    assert put(client, address, 1, parts[0]).status_code == put(client, address, 1, parts[0]).status_code == 200
    shown = client.get(address).json()
    assert [part["number"] for part in shown["parts"]] == [*range(1, len(parts) + 1)]
    assert shown["part_bytes"] == 64 << 20 and shown["dataset_id"] is None
    assert len(stored(settings)) == len(parts)

    answer = client.post(f"{address}/complete", json=WHOLE)
    dataset = made(answer)
    assert (dataset["name"], dataset["bytes"], dataset["sha256"]) == ("large one", len(CONTENT), WHOLE["sha256"])
    assert answer.headers["location"] == f"/v1/datasets/{dataset['id']}"
    assert stored(settings) == [f"{dataset['sha256']}.jsonl"]
    assert made(client.post(f"{address}/complete", json=WHOLE)) == dataset  # the answer was lost: asked again
    assert client.get(address).json()["dataset_id"] == dataset["id"]
    refused(put(client, address, 1, b"more"), 409, "upload_completed")
    refused(client.post(f"{address}/complete", json={"sha256": "0" * 64}), 409, "upload_completed")
    assert client.delete(address).status_code == 204
    assert client.get(f"/v1/datasets/{dataset['id']}").status_code == 200


def test_what_can_go_wrong_with_parts(client: TestClient, settings: Settings) -> None:
    address = begin(client)
    refused(client.post(f"{address}/complete", json=WHOLE), 409, "upload_incomplete")
    refused(put(client, address, 1, b"a", sha256="0" * 64), 422, "checksum_mismatch")
    assert put(client, address, 3, CONTENT).status_code == 200
    problem = refused(client.post(f"{address}/complete", json=WHOLE), 409, "upload_incomplete")
    assert "2 part(s) are missing: 1, 2" in problem["detail"]
    for number, content in ((1, b""), (2, b"x")):
        assert put(client, address, number, content).status_code == 200
    refused(client.post(f"{address}/complete", json=WHOLE), 422, "checksum_mismatch")
    assert put(client, address, 2, b"").status_code == 200
    made(client.post(f"{address}/complete", json=WHOLE))
    for number in (0, 10_001, -1, "x"):
        assert put(client, begin(client), number, b"a").status_code == 422  # type: ignore[arg-type]
    nowhere = "/v1/uploads/upl_" + "0" * 32
    refused(put(client, nowhere, 1, b"a"), 404, "upload_not_found")
    refused(client.get(nowhere), 404, "upload_not_found")
    refused(client.post(f"{nowhere}/complete", json=WHOLE), 404, "upload_not_found")
    refused(client.delete(nowhere), 404, "upload_not_found")
    answer = client.post("/v1/uploads", json={"filename": "../x.jsonl"})
    refused(answer, 422, "unsafe_path")
    refused(client.post("/v1/uploads", json={"filename": "x.exe"}), 422, "unsupported_format")
    assert stored(settings) == [f"{WHOLE['sha256']}.jsonl"]


def test_limits_of_size(client: TestClient, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    address = begin(client)
    refused(put(client, address, 1, bytes((64 << 20) + 1)), 413, "body_too_large")
    small = settings.model_copy(update={"max_dataset_bytes": 1000})
    with TestClient(create_app(small), headers=client.headers) as strict:
        assert put(strict, address, 1, bytes(900)).status_code == 200
        assert put(strict, address, 1, bytes(1000)).status_code == 200  # in the place of the first
        refused(put(strict, address, 2, b"a"), 413, "dataset_too_large")
    assert len(stored(settings)) == 1


def test_a_bad_file_in_parts_can_be_mended(client: TestClient, settings: Settings) -> None:
    address = begin(client)
    assert put(client, address, 1, CONTENT).status_code == put(client, address, 2, b"oops").status_code == 200
    bad = {"sha256": hashlib.sha256(CONTENT + b"oops").hexdigest()}
    assert "Line 201" in refused(client.post(f"{address}/complete", json=bad), 422, "bad_row")["detail"]
    assert put(client, address, 2, b"").status_code == 200
    made(client.post(f"{address}/complete", json=WHOLE))


def test_two_who_complete_at_once_make_one(client: TestClient, sessions: Sessions) -> None:
    address = begin(client)
    assert put(client, address, 1, CONTENT).status_code == 200
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(client.post(f"{address}/complete", json=WHOLE)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [answer.json()["id"] for answer in answers if answer.status_code == 201]
    assert done and len(set(done)) == 1
    assert {answer.json()["code"] for answer in answers if answer.status_code != 201} <= {"checksum_mismatch"}
    with sessions.begin() as session:
        assert session.scalar(text("SELECT count(*) FROM dataset")) == 1


def test_abandoned_uploads_and_litter_are_removed(client: TestClient, sessions: Sessions, settings: Settings) -> None:
    abandoned, alive = begin(client), begin(client)
    for address in (abandoned, alive):
        assert put(client, address, 1, b"a").status_code == 200
    dataset = made(upload(client))
    kept = settings.datasets_dir / f"{dataset['sha256']}.jsonl"
    litter = [settings.uploads_dir / "x.jsonl", settings.datasets_dir / f"{'0' * 64}.jsonl"]
    young = settings.datasets_dir / f"{'1' * 64}.jsonl"
    for path in (*litter, young):
        path.write_bytes(b"")
    long_ago = time.time() - storage.LITTER_AGE_S - 60
    for path in (*litter, kept):
        os.utime(path, (long_ago, long_ago))
    with sessions.begin() as session:
        statement = "UPDATE upload SET expires_at = clock_timestamp() WHERE id = :id"
        session.execute(text(statement), {"id": abandoned.rpartition("/")[2]})
    task = CleanupTask(settings, sessions)
    with sessions.begin() as session:
        task.run(session)
    # the service's own task may have it in hand
    wait_until(lambda: client.get(abandoned).status_code != 200)
    refused(client.get(abandoned), 404, "upload_not_found")
    assert not storage.parts_dir(settings, abandoned.rpartition("/")[2]).exists()
    assert len(client.get(alive).json()["parts"]) == 1
    assert kept.exists() and young.exists() and not any(path.exists() for path in litter)


def job_of(dataset_id: str, model: Path, **calibration: Any) -> dict[str, Any]:
    few = {"source": dataset_id, "num_samples": 2, "seq_len": 32}
    return {"model": {"path": str(model)}, "config": {"preset": "int8"}, "calibration": few | calibration}


def test_a_job_names_a_dataset(client: TestClient, make_model: Callable[..., Path], sessions: Sessions) -> None:
    dataset, model = made(upload(client)), make_model()
    job = client.post("/v1/jobs", json=job_of(dataset["id"], model)).json()
    assert (job["calibration"]["source"], job["calibration"]["column"]) == (dataset["id"], "text")
    problem = refused(client.delete(f"/v1/datasets/{dataset['id']}"), 409, "dataset_in_use")
    assert job["id"] in problem["detail"]
    clone = client.post(f"/v1/jobs/{job['id']}/clone").json()
    sweep = {"job": job_of(dataset["id"], model), "matrix": {"/calibration/num_samples": [1, 2]}}
    swept = client.post("/v1/sweeps", json=sweep).json()
    for job_id in (job["id"], clone["id"], *(each["id"] for each in swept["jobs"])):
        refused(client.delete(f"/v1/datasets/{dataset['id']}"), 409, "dataset_in_use")
        assert client.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
    assert client.delete(f"/v1/datasets/{dataset['id']}").status_code == 204
    assert client.get(f"/v1/jobs/{job['id']}").json()["calibration"]["source"] == dataset["id"]

    for body, code, pointer in (
        (job_of(dataset["id"], model), "dataset_not_found", "#/calibration/source"),
        (job_of(made(upload(client))["id"], model, column="n"), "no_text_column", "#/calibration/column"),
        (job_of(dataset["id"], model, split="train"), "invalid_request", "#/calibration"),
    ):
        assert refused(client.post("/v1/jobs", json=body), 422, code)["errors"][0]["pointer"] == pointer


def test_a_dataset_that_goes_while_a_job_comes(
    client: TestClient, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the plan and the row: the job is refused, never stored without its text."""
    dataset, model = made(upload(client)), make_model()
    store = submission.store

    def delete_first(*given: Any, **more: Any) -> Any:
        assert client.delete(f"/v1/datasets/{dataset['id']}").status_code == 204
        return store(*given, **more)

    monkeypatch.setattr(submission, "store", delete_first)
    refused(client.post("/v1/jobs", json=job_of(dataset["id"], model)), 422, "dataset_not_found")
    assert client.get("/v1/jobs").json()["data"] == []


@pytest.mark.slow
def test_the_real_engine_reads_it(
    client: TestClient, settings: Settings, start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job]
) -> None:
    real = settings.model_copy(update=REAL_ENGINE)
    model = tiny_model(settings.model_roots[0] / "tiny")
    content = gzip.compress(b"n,body\n" + b'1,"some words, and more"\n' * 5000)
    dataset = made(upload(client, name="a.csv.gz", content=content, column="body"))
    job = client.post("/v1/jobs", json=job_of(dataset["id"], model)).json()
    start_worker(real)
    row = wait_for(job["id"], "succeeded", "failed", timeout_s=120)
    assert row.state == "succeeded", row.error
    assert client.delete(f"/v1/datasets/{dataset['id']}").status_code == 204
