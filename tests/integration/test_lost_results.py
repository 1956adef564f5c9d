"""What was asked for and did not come is said: in the report, all that is made from it, and the exit status."""

import json
import stat
import sys
from types import SimpleNamespace

import jsonschema
import pytest

from quantcore.cli.main import main
from quantcore.config import presets
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.evaluation import harness
from quantcore.engine.pipeline.job import run
from quantcore.engine.verification import fresh_process, whole_model
from quantcore.errors import ConfigError
from tests.support.jobs import task
from tests.support.models import tiny_model
from tests.support.service import ROOT

REASON = "the data of tiny_choice is <gone>"
SIZES = ["--num_calib_data", "4", "--seq_len", "64", "--num_eval_data", "2", "--eval_seq_len", "64"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def failing_tasks(monkeypatch):
    """The harness breaks while it runs, as it does where a task's data cannot be fetched."""

    def fail(*given):
        raise RuntimeError(REASON)

    monkeypatch.setattr(harness, "check", lambda evaluation: None)  # it imports lm_eval, which takes seconds
    monkeypatch.setattr(harness, "run_tasks", fail)


def pages_of(folder):
    return {name: (folder / name).read_text() for name in ("report.json", "report.html", "README.md")}


@pytest.mark.slow
def test_a_warning_of_the_fresh_process_is_in_everything_that_travels(model_dir, tmp_path, monkeypatch):
    """The process that verifies prints it before all else, and then is what it always is."""
    said = json.dumps({"kind": "warning", "code": "samples_failed", "message": "a word from the fresh process"})
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{said}'\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(fresh_process, "sys", SimpleNamespace(executable=str(python)))
    monkeypatch.setattr(fresh_process, "waiting", lambda: None)
    events = []
    report = run(task(model_dir, tmp_path / "out", "w4a16"), events.append).to_dict()
    assert "a word from the fresh process" in [getattr(event, "message", "") for event in events]
    assert report["warnings"].count("a word from the fresh process") == 1
    assert all("a word from the fresh process" in text for text in pages_of(tmp_path / "out").values())
    phases = report["summary"]["memory_by_phase"]
    assert phases["verify"]["peak_memory_bytes"] > 200e6, "the fresh process says what it held"


@pytest.mark.usefixtures("failing_tasks", "proof_in_this_process")
def test_tasks_that_failed_are_named_with_the_reason(model_dir, tmp_path):
    given = task(model_dir, tmp_path / "out", "w4a16")
    evaluation = given.evaluation.model_copy(update={"tasks": ("tiny_choice", "tiny_rolling")})
    report = run(given.model_copy(update={"evaluation": evaluation}), lambda event: None).to_dict()
    assert report["summary"]["failed_tasks"] == {"tiny_choice": REASON, "tiny_rolling": REASON}
    assert report["harness"] == {} and any(REASON in warning for warning in report["warnings"])
    pages = pages_of(tmp_path / "out")
    jsonschema.validate(json.loads(pages["report.json"]), json.loads((ROOT / "docs/report.schema.json").read_text()))
    assert "tiny_rolling failed</b>: the data of tiny_choice is &lt;gone&gt;" in pages["report.html"]
    assert "| `tiny_rolling` | failed | failed |" in pages["README.md"] and "## Warnings" in pages["README.md"]


@pytest.mark.slow
@pytest.mark.usefixtures("failing_tasks", "proof_in_this_process")
def test_the_exit_status_tells_of_tasks_that_failed(model_dir, tmp_path, capsys):
    """1, and the result is there; a job of the service has its result, with a warning."""
    flags = ["--model_dir", str(model_dir), "--quant_scheme", "fp8", *SIZES]
    assert main([*flags, "--output_dir", str(tmp_path / "out"), "--tasks", "tiny_choice"]) == 1
    said = capsys.readouterr()
    assert f"The task tiny_choice failed: {REASON}" in said.err and "written to" in said.out
    assert (tmp_path / "out" / "MANIFEST.json").is_file()
    assert main([*flags, "--output_dir", str(tmp_path / "json"), "--tasks", "tiny_choice", "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["summary"]["failed_tasks"] == {"tiny_choice": REASON}
    assert main([*flags, "--output_dir", str(tmp_path / "fine")]) == 0
    file = tmp_path / "task.json"
    evaluation = EvaluationConfig(num_windows=2, seq_len=64, tasks=("tiny_choice",))
    given = task(model_dir, tmp_path / "job").model_copy(update={"evaluation": evaluation})
    file.write_text(given.model_dump_json())
    assert main(["run", str(file)]) == 0
    [completed] = [line for line in capsys.readouterr().out.splitlines() if '"kind":"completed"' in line]
    assert json.loads(completed)["summary"]["failed_tasks"] == {"tiny_choice": REASON}


@pytest.mark.usefixtures("failing_tasks")
def test_evaluate_keeps_what_it_measured_before_tasks_failed(model_dir, capsys):
    flags = ["evaluate", str(model_dir), *SIZES[4:], "--tasks", "tiny_choice"]
    assert main([*flags, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["failed_tasks"] == {"tiny_choice": REASON} and found["quality"]["num_windows"] == 2
    assert main(flags) == 1
    said = capsys.readouterr()
    assert f"The task tiny_choice failed: {REASON}" in said.err and "token perplexity" in said.out


def test_tasks_beside_no_evaluation_are_refused(model_dir, tmp_path, capsys):
    flags = ["--model_dir", str(model_dir), "--output_dir", str(tmp_path / "out"), "--quant_scheme", "fp8"]
    assert main([*flags, "--tasks", "piqa", "--skip_evaluation"]) == 1
    said = capsys.readouterr().err
    assert "--skip_evaluation" in said and "unsupported_config" in said and not (tmp_path / "out").exists()
    with pytest.raises(ConfigError) as caught:
        Task(
            model_dir=model_dir, output_dir=tmp_path / "out", config=presets.resolve("fp8"),
            evaluation=EvaluationConfig(num_windows=0, tasks=("piqa",)),
        )  # fmt: skip
    assert caught.value.field == "/evaluation/tasks"


@pytest.mark.usefixtures("proof_in_this_process")
def test_samples_that_are_left_out_are_missed_aloud(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(whole_model, "free_memory_bytes", lambda device: 0)
    report = run(task(model_dir, tmp_path / "out", "fp8", num_prompts=4), lambda event: None).to_dict()
    [said] = [warning for warning in report["warnings"] if "No sample texts were generated" in warning]
    assert "but less is free" in said and report["samples"] is None
