"""KV caches of fewer bits in a job: measured on its result as ``evaluate`` measures the written files."""

import json

import pytest

from bitfoundry.commands.options import evaluation_of
from quantcore.cli.flags import parser
from quantcore.cli.from_flags import request_of, task_of
from quantcore.cli.main import main
from quantcore.config.presets import with_kv_cache
from quantcore.config.task import EvaluationConfig
from quantcore.engine.pipeline.job import run
from quantcore.engine.verification import kv_caches
from quantcore.errors import ConfigError
from quantcore.events import PhaseStarted, silence
from tests.support.forks import config, forked, task_file
from tests.support.jobs import task
from tests.support.models import tiny_model

TEXT = {"num_windows": 3, "seq_len": 64}
SHORT = {"num_windows": 5, "seq_len": 32, "num_prompts": 0}
FLAGS = ["--num_eval_data", "3", "--eval_seq_len", "64"]


def asked(folder, out, *names, scheme="int8_weight_only", **changes):
    """A job that measures dtypes of the KV cache."""
    evaluation = EvaluationConfig(**TEXT, num_prompts=0, num_answers=0, kv_cache_dtypes=names, **changes)
    return task(folder, out, scheme).model_copy(update={"evaluation": evaluation})


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file with more text than is measured."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(
        "\n".join(f"The {number}th of {number * number} foxes jumps over dog {number}." for number in range(200))
    )
    return file


@pytest.fixture(scope="module")
def made(text, tmp_path_factory):
    """The result of a job, and its report."""
    folder = tiny_model(tmp_path_factory.mktemp("float") / "model", head_dim=32)
    out = tmp_path_factory.mktemp("made") / "out"
    return out, run(asked(folder, out, "q4_0", "fp8", source=str(text)), silence)


def test_a_job_measures_what_evaluate_measures_on_its_files(made, text, capsys):
    out, report = made
    command = ["evaluate", str(out), "--kv_cache_dtypes", "q4_0,fp8", "--eval_dataset", str(text), *FLAGS, "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)["kv_caches"]
    assert json.loads(json.dumps([each.to_dict() for each in report.kv_caches])) == found
    assert all(each["quality"]["divergence"]["kl_mean"]["value"] > 0 for each in found)


def test_every_form_of_the_report_shows_the_dtypes(made):
    out, report = made
    written = json.loads((out / "report.json").read_text())
    assert [each["dtype"] for each in written["kv_caches"]] == ["q4_0", "fp8"]
    assert written["evaluation"]["kv_cache_dtypes"] == ["q4_0", "fp8"]
    assert "<h2>KV caches</h2>" in (out / "report.html").read_text()
    levels = ", ".join(f"`{each.dtype}` {each.level}" for each in report.kv_caches)
    assert f"With a KV cache of fewer bits, beside itself with one of 16: {levels}." in (out / "README.md").read_text()
    assert not report.warnings


@pytest.mark.parametrize(("size", "code"), [(24, "cache_dtype_does_not_fit"), (32, "cache_dtypes_not_measured")])
def test_a_dtype_that_does_not_fit_is_refused_before_any_work(tmp_path, size, code):
    """At 32 channels it is the job's own scheme that quantizes the cache."""
    folder, out, events = tiny_model(tmp_path / "model", head_dim=size), tmp_path / "out", []
    job = asked(folder, out, "q8_0", scheme="fp8")
    config = job.config if size == 24 else with_kv_cache(job.config, "fp8")
    with pytest.raises(ConfigError) as caught:
        run(job.model_copy(update={"config": config}), events.append)
    assert caught.value.code == code
    assert {each.phase for each in events if isinstance(each, PhaseStarted)} == {"resolve", "plan"} and not out.exists()


def test_an_encoder_is_refused_with_the_reason(tmp_path):
    folder = tiny_model(tmp_path / "bert", model_type="bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ConfigError, match="only causal language models keep") as caught:
        run(asked(folder, tmp_path / "out", "fp8"), silence)
    assert caught.value.code == "cache_dtypes_not_measured"


@pytest.mark.usefixtures("proof_in_this_process")
def test_what_fails_while_it_is_measured_is_a_warning(text, tmp_path, monkeypatch):
    """The result is proven by then, and is kept."""
    monkeypatch.setattr(kv_caches, "measure_cache_dtypes", raising)
    folder, out = tiny_model(tmp_path / "model", head_dim=32), tmp_path / "out"
    report = run(asked(folder, out, "q8_0", source=str(text)), silence)
    assert report.kv_caches is None and "kv_caches" not in report.to_dict()
    assert any("Measuring dtypes of the KV cache failed" in warning for warning in report.warnings)


def raising(*_):
    raise RuntimeError("it fails")


def test_the_flag_is_a_field_of_tasks_and_requests(tmp_path, capsys):
    flags, words = parser(), ["--model_dir", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    words += ["--quant_scheme", "fp8", "--kv_cache_dtypes", "q8_0, fp8"]
    assert task_of(flags.parse_args(words)).evaluation.kv_cache_dtypes == ("q8_0", "fp8")
    assert request_of(flags.parse_args(words), flags.given(words))["evaluation"] == {"kv_cache_dtypes": ["q8_0", "fp8"]}
    assert evaluation_of(["kv_cache_dtypes=q8_0,fp8"]) == {"kv_cache_dtypes": ["q8_0", "fp8"]}
    for flag in ("--skip_evaluation", "--file2file_quantization"):
        with pytest.raises(ConfigError, match="Dtypes of the KV cache are measured together with the perplexity"):
            task_of(flags.parse_args([*words, flag]))
    with pytest.raises(SystemExit):
        flags.parse_args([*words[:-1], "q8"])
    assert "Did you mean 'q8_0'?" in capsys.readouterr().err


@pytest.mark.slow
def test_several_processes_measure_what_one_does(tmp_path):
    """The first of them verifies, alone."""
    folder, found = tiny_model(tmp_path / "model", head_dim=32), []
    for size in (1, 2):
        out = tmp_path / f"out{size}"
        file = task_file(folder, out, config("w4a16"), ("quark",), evaluation=SHORT | {"kv_cache_dtypes": ["q4_0"]})
        assert forked(lambda _, file=file: main(["run", str(file)]), size, tmp_path) == [0] * size
        found.append(json.loads((out / "report.json").read_text())["kv_caches"])
    assert found[0] == found[1] and found[0][0]["dtype"] == "q4_0"
