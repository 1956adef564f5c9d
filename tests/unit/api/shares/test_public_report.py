"""A shared report names files and folders without their paths, wherever in it they are."""

import json

import pytest

from api.shares.public_report import without_paths
from quantcore.report.html import page
from quantcore.report.values import Report
from tests.support.reports import report

PATHS = ("/srv/secret place/model", "/data/secret/chats.jsonl", "/data/secret", "/home/secret/tasks")
SAMPLE = {
    "prompt": "ls /usr/bin", "original": "/usr/bin", "quantized": "x", "original_is_degenerate": False,
    "quantized_is_degenerate": False,
}  # fmt: skip


def shared(**parts: object) -> Report:
    return without_paths(Report.model_validate(report() | parts))


def test_no_path_is_left() -> None:
    model, text, folder, tasks = PATHS
    shown = shared(
        model={"path": model, "model_type": "llama"},
        calibration={"sources": [{"source": text, "share": 1.0}], "num_samples": 8},
        evaluation={"source": text, "include_path": tasks},
        warnings=[f"{model} has no chats; {folder}/work/x was removed", "read 3 tokens/s from file:///srv/secret/a"],
        samples=[SAMPLE],
    )
    for written in (json.dumps(shown.to_dict()), page(shown)):
        assert "secret" not in written
    assert shown.model.path == "model" and shown.model.name == "model"
    assert shown.calibration["sources"][0]["source"] == shown.evaluation["source"] == "chats.jsonl"
    assert shown.warnings == ("model has no chats; x was removed", "read 3 tokens/s from a")
    assert shown.samples and shown.samples[0].prompt == "ls /usr/bin"


@pytest.mark.parametrize(
    "text",
    [
        "org/name",
        "https://huggingface.co/org/name",
        "120 tokens/s",
        "LLM('./quark')",
        "+/- 1",
        "model.layers.0",
        "a / b",
    ],
)
def test_what_is_no_path_stays(text: str) -> None:
    assert shared(warnings=[text]).warnings == (text,)


def test_a_model_on_the_hub_keeps_its_name() -> None:
    model = {"id": "org/name", "sha": "0" * 40, "model_type": "llama"}
    assert shared(model=model).model.to_dict()["id"] == "org/name"
