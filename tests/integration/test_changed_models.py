"""A model's folder that changes, or goes, while its job runs: the job fails and says why, and hands out nothing."""

import itertools
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.settings import Settings
from api.store.tables.jobs import Job
from quantcore.config import presets
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.pipeline.job import run
from quantcore.errors import ModelError
from quantcore.events import Event, PhaseStarted, Progress
from tests.support.models import tiny_model
from tests.support.params import with_rare
from tests.support.proofs import proving_here
from tests.support.service import REAL_ENGINE, WorkerProcess


def overwrite(model: Path) -> None:
    """In its place: only the time tells."""
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-64, 2)
        file.write(bytes(64))


def swap(model: Path) -> None:
    other = tiny_model(model.parent / "other", seed=1)
    (other / "model.safetensors").replace(model / "model.safetensors")


def other_terms(model: Path) -> None:
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + "\n")


HARM: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "another model in its place": swap,
    "bytes in its place": overwrite,
    "another tokenizer": other_terms,
}


def is_quantizing(event: Event) -> bool:
    return isinstance(event, Progress) and event.phase == "quantize" and event.done == 1


def is_reading(event: Event) -> bool:
    return event == PhaseStarted("quantize")


def is_proving(event: Event) -> bool:
    return isinstance(event, Progress) and event.phase == "verify" and event.done == 1


RARE = [(harm, "in the proof") for harm in HARM if harm != "bytes in its place"]
MOMENTS = {"after the plan": is_reading, "in the blocks": is_quantizing, "in the proof": is_proving}


@pytest.mark.parametrize(("harm", "moment"), with_rare(itertools.product(HARM, MOMENTS), RARE))
def test_a_model_that_changes_while_its_job_runs(tmp_path: Path, harm: str, moment: str) -> None:
    model = tiny_model(tmp_path / "model")
    seen: list[Event] = []

    def emit(event: Event) -> None:
        if MOMENTS[moment](event) and not any(map(MOMENTS[moment], seen)):
            HARM[harm](model)
        seen.append(event)

    task = Task(
        model_dir=model, output_dir=tmp_path / "out", config=presets.resolve("w4a16", group_size=32),
        calibration=CalibrationConfig(num_samples=2, seq_len=32),
        evaluation=EvaluationConfig(num_windows=2, seq_len=32, num_prompts=0),
    )  # fmt: skip
    with proving_here() if harm == "bytes in its place" else nullcontext(), pytest.raises(ModelError) as caught:
        run(task, emit)
    assert any(map(MOMENTS[moment], seen))
    assert (caught.value.code, caught.value.retryable) == ("model_changed", False)
    assert not (tmp_path / "out").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"model", "other"}


def test_from_file_to_file(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")

    def emit(event: Event) -> None:
        if is_quantizing(event):
            overwrite(model)

    task = Task(model_dir=model, output_dir=tmp_path / "out", config=presets.resolve("fp8_dynamic"), file2file=True,
                evaluation=EvaluationConfig(num_windows=0))  # fmt: skip
    with pytest.raises(ModelError) as caught:
        run(task, emit)
    assert caught.value.code == "model_changed"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_model_that_is_gone_before_its_job_starts(
    client: TestClient, settings: Settings, start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job]
) -> None:
    removed = tiny_model(settings.model_roots[0] / "removed")
    moved = tiny_model(settings.model_roots[0] / "moved")
    secret = settings.data_dir / "artifacts" / "somebodys"
    asked: dict[str, Any] = {
        "config": {"preset": "fp8"},
        "calibration": {"num_samples": 4, "seq_len": 64},
        "evaluation": {"num_windows": 2, "seq_len": 64},
    }
    ids = [client.post("/v1/jobs", json=asked | {"model": {"path": str(model)}}).json()["id"]
           for model in (removed, moved)]  # fmt: skip
    shutil.rmtree(removed)
    secret.parent.mkdir(parents=True)
    moved.rename(secret)
    moved.symlink_to(secret)
    start_worker(settings.model_copy(update=REAL_ENGINE))
    codes = [wait_for(job_id, "failed").error["code"] for job_id in ids]
    assert codes == ["model_not_found", "path_not_allowed"]


def test_a_licence_that_links_to_the_key_ends_at_the_door(client: TestClient, settings: Settings) -> None:
    """The model of the attack, over HTTP: no plan is made of it, and what is refused names no path of the service."""
    model = tiny_model(settings.model_roots[0] / "hostile")
    settings.data_dir.mkdir(exist_ok=True)
    (settings.data_dir / "secret.key").write_text("the key")
    (model / "LICENSE").symlink_to(settings.data_dir / "secret.key")
    asked = {"model": {"path": str(model)}, "config": {"preset": "fp8_dynamic"}}
    answer = client.post("/v1/jobs", json=asked)
    assert (answer.status_code, answer.json()["code"]) == (422, "unsafe_path")
    assert str(settings.data_dir) not in json.dumps(answer.json())
