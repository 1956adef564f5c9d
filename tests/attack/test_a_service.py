"""A hostile model through the service: planned, inspected, counted with, run. A watched file stays closed (part A)."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.main import create_app
from api.settings import Settings
from api.store.tables.jobs import Job
from tests.support.api import body, post
from tests.support.canary import FORMS, Canary
from tests.support.models import tiny_model
from tests.support.service import REAL_ENGINE, WorkerProcess


@pytest.fixture
def canary(settings: Settings, tmp_path: Path) -> Iterator[Canary]:
    """Outside of all folders of models."""
    watched = Canary(tmp_path / "elsewhere")
    assert not any(watched.path.is_relative_to(root) for root in settings.model_roots)
    yield watched
    watched.close()


@pytest.fixture
def confined(settings: Settings, client: TestClient) -> Iterator[TestClient]:
    """The API whose readers have the sandbox that services have by default."""
    with TestClient(create_app(settings.model_copy(update={"confine_engine": True}))) as api:
        api.headers.update(client.headers)
        yield api


@pytest.fixture
def make_hostile(settings: Settings, canary: Canary) -> Callable[[str], Path]:
    """``make_hostile(form)``: a model whose tokenizer, config and generation settings name the canary."""

    def make(form: str) -> Path:
        model = tiny_model(settings.model_roots[0] / "hostile")
        named = canary.named(form, model)
        (model / "tokenizer.json").unlink()
        for file, keys in {
            "tokenizer_config.json": ("vocab", "merges", "vocab_file", "tokenizer_file", "spm_file"),
            "special_tokens_map.json": ("vocab", "merges"),
            "generation_config.json": ("assistant_tokenizer", "cache_implementation"),
            "config.json": ("_name_or_path", "backbone", "index_path", "passages_path"),
        }.items():
            before = json.loads((model / file).read_text()) if (model / file).exists() else {}
            (model / file).write_text(json.dumps(before | dict.fromkeys(keys, named)))
        settings_of = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps(settings_of | {"tokenizer_class": "BertTokenizer"}))
        return model

    return make


def upload(client: TestClient) -> str:
    rows = b"".join(b'{"text": "some words for a model to count"}\n' for _ in range(50))
    answer = client.post("/v1/datasets", files={"file": ("rows.jsonl", rows)})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


@pytest.mark.parametrize("form", FORMS[:2])
def test_plans_inspections_and_counts(
    form: str, confined: TestClient, canary: Canary, make_hostile: Callable[[str], Path]
) -> None:
    model = make_hostile(form)
    answers = [
        confined.post("/v1/plans", json=body(model)),
        confined.get("/v1/models/inspect", params={"path": str(model)}),
        confined.get(f"/v1/datasets/{upload(confined)}/statistics", params={"model": str(model)}),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 422], answers[0].text
    assert answers[2].json()["code"] == "unsafe_setting"
    assert not canary.was_opened() and not any(canary.secret in answer.text for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_job_opens_nothing_that_its_model_names(
    form: str, client: TestClient, settings: Settings, canary: Canary, make_hostile: Callable[[str], Path],
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    """The job of the real engine ends with the name of the key; nothing of the file is in any answer.

    A link that leaves the model's folder is refused with the request.
    """
    model = make_hostile(form)
    if "link" in form:
        answer = client.post("/v1/jobs", json=body(model))
        assert (answer.status_code, answer.json()["code"]) == (422, "unsafe_path")
        assert not canary.was_opened() and canary.secret not in answer.text
        return
    job_id = post(client, model)
    start_worker(settings.model_copy(update=REAL_ENGINE))
    job = wait_for(job_id, "failed", "succeeded")
    assert (job.state, (job.error or {}).get("code")) == ("failed", "unsafe_setting")
    shown = [client.get(f"/v1/jobs/{job_id}{what}").text for what in ("", "/events", "/logs")]
    assert not canary.was_opened() and not any(canary.secret in text for text in shown)


@pytest.mark.parametrize("what", ["a file", "a folder", "nothing"])
def test_no_answer_tells_what_exists_outside(what: str, client: TestClient, canary: Canary) -> None:
    """Paths outside of the allowed folders have one answer, whether something is there or not."""
    path = {"a file": canary.path, "a folder": canary.path.parent, "nothing": canary.path.parent / "nothing"}[what]
    dataset = upload(client)
    answers: list[Any] = [
        client.post("/v1/plans", json=body(path)),
        client.get("/v1/models/inspect", params={"path": str(path)}),
        client.get(f"/v1/datasets/{dataset}/statistics", params={"model": str(path)}),
        client.post("/v1/plans", json=body(path, calibration={"source": str(path)})),
    ]
    problems = [answer.json() for answer in answers]
    assert {(answer.status_code, answer.json()["code"]) for answer in answers} == {(422, "path_not_allowed")}
    assert {problem["detail"] for problem in problems} == {
        f"The path '{path}' is not in a folder that this service may read from."
    }
    assert not canary.was_opened()
