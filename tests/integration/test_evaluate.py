"""A model that is there is measured as its job did it; tasks give what the harness gives; originals are run once."""

import json
import sys
from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantcore.cli import main as cli
from quantcore.config.task import EvaluationConfig
from quantcore.engine.commands.evaluate import evaluate
from quantcore.engine.evaluation import harness
from quantcore.engine.evaluation.baseline_cache import VARIABLE, BaselineCache
from quantcore.engine.modules import loading
from quantcore.engine.pipeline.job import run
from quantcore.engine.runtime.shards import is_sharded, local_rows
from quantcore.engine.runtime.streamed_model import StreamedModel
from quantcore.errors import ConfigError, ModelError
from tests.support.forks import forked
from tests.support.harness_tasks import write_tasks
from tests.support.jobs import task
from tests.support.models import tiny_model, tiny_tokenizer

ASKED = EvaluationConfig(num_windows=3, seq_len=64, num_prompts=2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", rank=8)


@pytest.mark.parametrize("preset", ["fp8", "w4a16"])
def test_an_artifact_is_measured_as_its_job_did(preset, model_dir, tmp_path, capsys, proof_in_this_process):
    report = run(task(model_dir, tmp_path / "out", preset, num_prompts=4), lambda event: None).to_dict()
    flags = ["--num_eval_data", "3", "--eval_seq_len", "64"]
    assert cli.main(["evaluate", str(tmp_path / "out"), "--against", str(model_dir), *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quality"] == json.loads(json.dumps(report["quality"]))
    assert [one["quantized"] for one in found["samples"]] == [one["quantized"] for one in report["samples"]]
    assert cli.main(["evaluate", str(model_dir), *flags]) == 0
    shown = capsys.readouterr().out
    assert f"{report['quality']['before']['token_perplexity']['value']:.5g}" in shown and "kl" not in shown


def test_what_cannot_be_evaluated_is_said(model_dir, tmp_path, capsys):
    with pytest.raises(ModelError) as caught:
        evaluate(str(tmp_path / "nothing"), None, ASKED, lambda event: None)
    assert caught.value.code == "model_not_found"
    assert cli.main(["evaluate", str(model_dir), "--eval_stride", "4"]) == 1
    assert "invalid_evaluation" in capsys.readouterr().err


def test_vllm_must_be_where_it_is_said_to_be(model_dir, tasks, tmp_path, capsys):
    flags = ["--num_eval_data", "3", "--eval_seq_len", "64", "--tasks", "tiny_choice", "--include_path", str(tasks)]
    for python, more, code in (
        (sys.executable, [], "no_runtime"),
        (str(tmp_path / "python"), [], "no_runtime"),
        (sys.executable, ["--include_path", str(tmp_path / "nothing")], "no_include_path"),
        (sys.executable, ["--tasks", ""], "invalid_evaluation"),
    ):
        assert cli.main(["evaluate", str(model_dir), *flags, "--vllm", python, *more]) == 1
        assert code in capsys.readouterr().err


@pytest.mark.slow
def test_the_original_is_measured_once(model_dir, tmp_path, monkeypatch, proof_in_this_process):
    plain = run(task(model_dir, tmp_path / "plain", "fp8", num_prompts=4), lambda event: None).to_dict()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "originals"))
    walked = watch_embedded_windows(monkeypatch)
    presets = ("fp8", "w4a16", "int8")
    reports = [
        run(task(model_dir, tmp_path / name, name, num_prompts=4), lambda event: None).to_dict() for name in presets
    ]
    assert walked.count(3) == 1 + 3, "the float model's windows once, those of each result"
    assert len(list((tmp_path / "originals").iterdir())) == 4, "states, samples, the proofs of the twin and a window"
    for report in reports:
        assert report["quality"]["before"] == plain["quality"]["before"]
    assert [one["original"] for one in reports[2]["samples"]] == [one["original"] for one in plain["samples"]]
    assert reports[0]["quality"] == plain["quality"]
    for entry in (tmp_path / "originals").iterdir():
        entry.write_bytes(b"damaged")
    again = run(task(model_dir, tmp_path / "again", "fp8", num_prompts=4), lambda event: None).to_dict()
    assert again["quality"] == plain["quality"] and again["samples"] == plain["samples"]


def test_another_original_is_another_entry(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    for model in ("sha256:a", "sha256:b"):
        known = BaselineCache(model)
        assert not known.has_states({"x": 1})
        known.write_states({"x": 1}, torch.ones(2))
        assert known.read_states({"x": 2}) is None and torch.equal(known.read_states({"x": 1}), torch.ones(2))
        assert known.value({"y": 1}, lambda: [1]) == [1] == known.value({"y": 1}, lambda: [2])
    monkeypatch.setattr("quantcore.engine.evaluation.baseline_cache.MAX_BYTES", 100)
    known.write_states({"x": 3}, torch.ones(2))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 100
    monkeypatch.setenv(VARIABLE, "")
    assert known.value({"y": 1}, lambda: [3]) == [3]


def watch_embedded_windows(monkeypatch):
    """How many windows each call of ``embed`` was given."""
    seen, embed = [], StreamedModel.embed

    def watched(self, windows_NT, states=None, media=()):
        seen.append(len(windows_NT))
        return embed(self, windows_NT, states, media)

    monkeypatch.setattr(StreamedModel, "embed", watched)
    return seen


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.mark.slow
@pytest.mark.usefixtures("proof_in_this_process")
@pytest.mark.filterwarnings("ignore")  # the harness's own
def test_ranks_that_hold_the_models_together_measure_what_one_does(model_dir, tasks, tmp_path, monkeypatch, capsys):
    """Quality, samples and tasks, to the last digit. Neither of the two holds a whole model, and one speaks."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "originals"))
    run(task(model_dir, tmp_path / "out", "int8_static"), lambda event: None)
    flags = ["--num_eval_data", "3", "--eval_seq_len", "64", "--tasks", "tiny_choice,tiny_rolling", "--limit", "4"]
    command = ["evaluate", str(tmp_path / "out"), "--against", str(model_dir), *flags, "--include_path", str(tasks)]
    capsys.readouterr()
    assert cli.main([*command, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["harness"].keys() == {"tiny_choice", "tiny_rolling"} and len(alone["samples"]) == 3
    held = []

    def note(block, ranks, device, keeps, shard=loading.shard):
        shard(block, ranks, device, keeps)
        linear = [one for one in block.parameters() if is_sharded(one)]
        held.append(sum(local_rows(one).numel() for one in linear) / sum(one.numel() for one in linear))

    monkeypatch.setattr(loading, "shard", note)

    def work(rank):
        status = cli.main([*command, "--json"])
        (tmp_path / f"held.{rank}").write_text(json.dumps(held))
        return status

    for entries in ("known", "unknown"):
        if entries == "unknown":
            monkeypatch.setenv(VARIABLE, str(tmp_path / "others"))
        assert forked(work, 2, tmp_path) == [0, 0], (tmp_path / "err.0").read_text()
        assert json.loads((tmp_path / "out.0").read_text()) == alone
        assert (tmp_path / "out.1").read_text() == ""
        parts = [json.loads((tmp_path / f"held.{rank}").read_text()) for rank in range(2)]
        assert len(parts[0]) == (2 if entries == "known" else 4) and all(0.3 < part < 0.7 for part in chain(*parts))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the harness's own
def test_tasks_give_what_the_harness_gives_by_hand(model_dir, tasks, tmp_path, monkeypatch, proof_in_this_process):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "originals"))
    wanted = ASKED.model_copy(
        update={"tasks": ("tiny_choice", "tiny_rolling"), "include_path": tasks, "limit": 6, "num_fewshot": 1}
    )
    given = task(model_dir, tmp_path / "out", "w4a16", ("quark", "fake_quantized"))
    report = run(given.model_copy(update={"evaluation": wanted}), lambda event: None).to_dict()
    for which, folder in (("original", model_dir), ("quantized", tmp_path / "out" / "fake_quantized")):
        expected = by_hand(folder, tasks)
        for name, metrics in report["harness"].items():
            for metric, pair in metrics.items():
                stderr = expected[name].get(metric.replace(",", "_stderr,"))
                assert pair[which]["value"] == pytest.approx(expected[name][metric], rel=1e-6), (name, metric)
                assert pair[which]["stderr"] == (stderr if isinstance(stderr, float) else None)
    assert report["harness"].keys() == {"tiny_choice", "tiny_rolling"}
    assert report["harness"]["tiny_choice"].keys() == {"acc,none"}
    assert 0 < report["harness"]["tiny_choice"]["acc,none"]["quantized"]["stderr"] < 1
    calls = []
    monkeypatch.setattr(harness, "run_tasks", lambda *given: calls.append(1) or report_of(report, "quantized"))
    run(task(model_dir, tmp_path / "more", "fp8").model_copy(update={"evaluation": wanted}), lambda event: None)
    assert len(calls) == 1, "the original's numbers were kept"


def report_of(report, which):
    return {task: {metric: pair[which] for metric, pair in found.items()} for task, found in report["harness"].items()}


def by_hand(folder, tasks):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=8), tasks=["tiny_choice", "tiny_rolling"],
        num_fewshot=1, limit=6, task_manager=TaskManager(include_path=str(tasks)), bootstrap_iters=1000,
    )["results"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_task_that_is_not_there_is_refused_before_any_work(model_dir, tmp_path):
    wanted = ASKED.model_copy(update={"tasks": ("gsm9k",)})
    with pytest.raises(ConfigError) as caught:
        run(task(model_dir, tmp_path / "out").model_copy(update={"evaluation": wanted}), lambda event: None)
    assert caught.value.code == "unknown_tasks" and "gsm8k" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="no folder of tasks"):
        harness.check(wanted.model_copy(update={"include_path": tmp_path / "nothing"}))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as missing:
        patch.setattr(harness, "find_spec", lambda name: None)
        harness.check(wanted)
    assert missing.value.code == "no_lm_eval"
