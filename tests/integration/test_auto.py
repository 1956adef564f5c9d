"""Goals on a tiny random model: the search measures whole jobs, keeps the best, and goes on after a stop."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantcore.checkpoint.artifact import sha256
from quantcore.cli.main import main
from quantcore.config.algorithms import RTNConfig
from quantcore.config.goal import Goal
from quantcore.config.job_spec import NO_SCHEME
from quantcore.config.quantization import Config, parse_config
from quantcore.config.target_devices import DEVICES, Device
from quantcore.config.task import Task
from quantcore.engine.commands import goal as search
from quantcore.engine.evaluation.baseline_cache import VARIABLE
from quantcore.engine.pipeline import job
from quantcore.errors import ConfigError, GateError
from quantcore.events import Completed, Event, PhaseStarted, Warned
from quantcore.plan.runtimes import USABLE_SHARE, kv_cache_bytes
from quantcore.report.values import GoalResult, GoalSummary, Report
from tests.support.models import tiny_model
from tests.support.proofs import proving_here

CONTEXT = 1 << 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("auto") / "model")


def task_for(model: Path, output_dir: Path, **fields: Any) -> Task:
    return Task(
        model_dir=model, output_dir=output_dir, config=Config(global_quant_config=NO_SCHEME),
        goal=Goal.model_validate({"runtime": "vllm", "device": "24GB"} | fields),
        calibration={"num_samples": 8, "seq_len": 64}, evaluation={"num_windows": 4, "seq_len": 64, "num_prompts": 0},
    )  # fmt: skip


def find(task: Task) -> tuple[GoalResult, Report, list[Event]]:
    events: list[Event] = []
    with proving_here():
        report = search.run_goal(task, events.append)
    assert report is not None and report.goal is not None
    return report.goal, report, events


def test_the_smallest_that_is_good_enough_is_kept_and_others_are_not(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    best, *_ = find(task_for(model, tmp_path / "best", min_recovery="best"))
    [only] = best.trials
    assert best.is_met and only.layers.keys() == {"int8_weight_only"} and only.algorithms == "gptaq"
    wanted = 1 - 5 * (1 - only.recovery)  # between the best that there is and 4 bits everywhere
    result, report, events = find(task_for(model, out, min_recovery=wanted))

    assert result.is_met and f"{100 * wanted:g} %" in result.why
    assert report.summary.goal == GoalSummary(is_met=True, why=result.why)
    [chosen] = [trial for trial in result.trials if trial.is_chosen]
    assert chosen.recovery >= wanted and chosen.size_bytes < only.size_bytes
    assert all(t.size_bytes > chosen.size_bytes for t in result.trials if t is not chosen and t.recovery >= wanted)
    assert report.quality is not None and chosen.kl == report.quality.divergence.kl_mean
    assert report.summary.size_after_bytes == chosen.size_bytes
    assert [point.size_bytes for point in result.frontier] == sorted({point.size_bytes for point in result.frontier})

    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    manifest = {entry["path"]: entry["sha256"] for entry in json.loads((out / "MANIFEST.json").read_text())["files"]}
    assert manifest == {path.name: sha256(path) for path in out.iterdir() if path.name != "MANIFEST.json"}
    assert Report.model_validate_json((out / "report.json").read_text()).goal == result
    assert f"from {len(result.trials)} candidates" in (out / "README.md").read_text()
    assert sum(isinstance(event, Completed) for event in events) == 1
    phases = [event.phase for event in events if isinstance(event, PhaseStarted)]
    assert phases.count("sensitivity") == 1 and phases.count("trial") == len(result.trials)
    assert set(phases) == set(report.summary.seconds_by_phase)  # the time is that of the whole search
    assert report.summary.total_s > sum(trial.seconds for trial in result.trials)


def test_transformers_loads_what_was_chosen_for_it(model: Path, tmp_path: Path) -> None:
    _, report, _ = find(task_for(model, tmp_path / "out", runtime="transformers", min_recovery=0.5))
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        logits = quantized(tokens).logits.log_softmax(-1)
        before = AutoModelForCausalLM.from_pretrained(model)(tokens).logits.log_softmax(-1)
    loss = (before.exp() * (before - logits)).sum(-1).mean()
    assert report.quality is not None
    assert 0 < float(loss) < 10 * (report.quality.divergence.kl_mean.value or 0)


def test_if_nothing_is_good_enough_the_best_is_kept_and_said_so(model: Path, tmp_path: Path) -> None:
    result, report, events = find(task_for(model, tmp_path / "out", min_recovery=0.999999))
    assert not result.is_met and "no measured result that fits keeps 99.9999 %" in result.why
    assert [trial.algorithms for trial in result.trials] == ["none (rounds to nearest)", "gptaq"]
    gate = report.summary.gates[-1]
    assert (gate.name, gate.status, gate.limit) == ("recovery", "fail", 0.999999)
    assert gate.value == max(trial.recovery for trial in result.trials)
    assert gate.sentence in [event.message for event in events if isinstance(event, Warned)]
    verdict = report.summary.verdict
    if verdict.level in ("faithful", "good"):  # it was "every measurement is within its limits" beside a failed gate
        assert "but it failed" in verdict.reason and "Recovery" in verdict.reason


def test_an_importance_matrix_takes_the_place_of_calibration(model: Path, tmp_path: Path) -> None:
    """Each candidate is what a job with its config and the same matrix makes of the model."""
    matrix = tmp_path / "im.gguf"
    assert main(["imatrix", str(model), "-o", str(matrix), "--num_calib_data", "4", "--seq_len", "64"]) == 0
    config = Config(global_quant_config=NO_SCHEME, algo_config=(RTNConfig(imatrix=str(matrix)),))
    goal = {"runtime": "llama_cpp", "device": "cpu", "min_recovery": 0.999999}
    task = task_for(model, tmp_path / "out", **goal).model_copy(update={"config": config})
    result, report, events = find(task)
    sizes = [trial.size_bytes for trial in result.trials]
    assert {trial.algorithms for trial in result.trials} == {"rtn"} and len(sizes) == len(set(sizes))
    assert "calibrate" not in [event.phase for event in events if isinstance(event, PhaseStarted)]
    again = task.model_copy(
        update={"goal": None, "config": parse_config(report.config), "output_dir": tmp_path / "job"}
    )
    with proving_here():
        job.run(again.model_copy(update={"export": ("gguf",)}), lambda event: None)
    assert sha256(tmp_path / "job/model.gguf") == sha256(tmp_path / "out/model.gguf")
    with pytest.raises(ConfigError, match="in goals for llama_cpp, not for vllm") as refused:
        Task.model_validate(task.to_dict() | {"goal": {"runtime": "vllm", "device": "24GB"}})
    assert refused.value.code == "conflicting_goal"
    chain = [{"name": "gptq"}]
    with pytest.raises(ConfigError, match="'config' cannot be set together") as refused:
        Task.model_validate(task.to_dict() | {"config": {"global_quant_config": {}, "algo_config": chain}})


@pytest.mark.parametrize("runtime", ["vllm", "llama_cpp"])
def test_the_files_keep_to_the_size(model: Path, tmp_path: Path, runtime: str) -> None:
    device = "24GB" if runtime == "vllm" else "cpu"
    goal = {"runtime": runtime, "device": device, "min_recovery": "best"}
    _, largest, _ = find(task_for(model, tmp_path / "largest", **goal))
    weights = largest.summary.size_after_bytes
    result, report, _ = find(task_for(model, tmp_path / "out", **goal, max_size=weights))
    files = [path for path in (tmp_path / "out").iterdir() if path.suffix in (".safetensors", ".gguf")]
    assert files and sum(path.stat().st_size for path in files) <= weights
    assert report.summary.size_after_bytes < weights and (result.max_bytes or weights) < weights
    smallest = min(point.size_bytes for point in result.frontier)
    with pytest.raises(ConfigError, match="besides the weights") as refused:
        find(task_for(model, tmp_path / "none", **goal, max_size=smallest))
    assert refused.value.code == "goal_too_small" and not list(tmp_path.glob("*none*"))


def test_a_missed_goal_fails_the_job_if_gates_do(model: Path, tmp_path: Path) -> None:
    task = task_for(model, tmp_path / "out", min_recovery=0.999999).model_copy(update={"gate": "fail"})
    with proving_here(), pytest.raises(GateError, match=r"Recovery .* is below the 100 % limit") as refused:
        search.run_goal(task, lambda event: None)
    assert refused.value.code == "gate_failed" and "a lower recovery" in refused.value.hint
    report = Report.model_validate_json((tmp_path / "out.rejected" / "report.json").read_text())
    assert report.summary.gate == "fail" and report.summary.goal is not None and not report.summary.goal.is_met
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.rejected"]


def test_a_search_without_time_says_so(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial takes an hour by the search's clock, however fast this machine is."""
    wanted = 0.999999
    whole, *_ = find(task_for(model, tmp_path / "whole", min_recovery=wanted))
    clock, run, num_trials = time.monotonic, job.run, 0

    def run_for_an_hour(*given: Any) -> Report | None:
        nonlocal num_trials
        num_trials += 1
        return run(*given)

    monkeypatch.setattr(job, "run", run_for_an_hour)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600 * num_trials)
    result, *_ = find(task_for(model, tmp_path / "out", min_recovery=wanted, max_time_s=3600))
    assert len(result.trials) == 1 < len(whole.trials)
    assert not result.is_met and "keeps 99.9999 % within 3600 s" in result.why
    assert any(advice.startswith("more time") for advice in result.advice)
    assert not any(advice.startswith("more time") for advice in whole.advice)


def test_it_goes_on_where_it_was_stopped(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_for(model, tmp_path / "out", min_recovery=0.999999)
    run, ran = job.run, []

    def stopped(*given: Any) -> Report | None:
        ran.append(given[0].config.algo_config)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return run(*given)

    monkeypatch.setattr(job, "run", stopped)
    with proving_here(), pytest.raises(KeyboardInterrupt):
        search.run_goal(task, lambda event: None)
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.auto").is_dir()
    _, _, events = find(task)
    assert [bool(algorithms) for algorithms in ran] == [False, True, True]
    assert PhaseStarted("sensitivity") not in events


def test_another_goal_runs_a_trial_again_whose_files_were_dropped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, run = [], job.run
    monkeypatch.setattr(job, "run", lambda *given: ran.append(given[0].output_dir.name) or run(*given))

    def measuring(*places: int) -> None:
        monkeypatch.setattr(
            search,
            "find_smallest",
            lambda points, most, measure, *_, **__: {i: measure(i % len(points)) for i in places},
        )

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    measuring(0, -1)  # the smallest, and the largest, which is better
    with monkeypatch.context() as stop, proving_here(), pytest.raises(KeyboardInterrupt):
        stop.setattr(search._Search, "finish", stopped)
        search.run_goal(task_for(model, tmp_path / "out", min_recovery=0.999999), lambda event: None)
    smallest, largest = ran
    measuring(0)
    result, _, _ = find(task_for(model, tmp_path / "out", min_recovery=0.5))
    assert result.is_met and ran == [smallest, largest, smallest]
    assert (tmp_path / "out" / "config.json").is_file()


def test_another_goal_starts_from_what_was_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "known"))
    best, *_ = find(task_for(model, tmp_path / "first", min_recovery="best"))
    ran, run = [], job.run
    monkeypatch.setattr(job, "run", lambda *given: ran.append(given[0].output_dir.name) or run(*given))
    again, _, events = find(task_for(model, tmp_path / "second", min_recovery="best", max_size="1GB"))
    assert PhaseStarted("sensitivity") not in events and len(ran) == 1  # only to make its files
    assert [(trial.kl, trial.size_bytes) for trial in again.trials] == [(t.kl, t.size_bytes) for t in best.trials]
    weights = [sha256(tmp_path / name / "model.safetensors") for name in ("first", "second")]
    assert weights[0] == weights[1]


def test_the_kv_cache_is_quantized_where_nothing_fits_otherwise(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = kv_cache_bytes(json.loads((model / "config.json").read_text()), CONTEXT)
    room = (cache * 0.75 + 10**6) / USABLE_SHARE  # for half the cache and the weights, not for all of the cache
    monkeypatch.setitem(DEVICES, "small", Device("small GPU", round(room), frozenset({"w4", "w8", "fp8"})))
    result, report, _ = find(task_for(model, tmp_path / "out", device="small", context=CONTEXT, min_recovery=0.5))
    assert (result.kv_cache, result.cache_bytes) == ("fp8", cache // 2)
    assert report.config["kv_cache_quant_config"]
    with pytest.raises(ConfigError) as refused:
        find(task_for(model, tmp_path / "no", device="small", context=2 * CONTEXT))
    assert refused.value.code == "goal_too_small" and "KV cache" in refused.value.message
    assert "shorten the context" in refused.value.hint
    assert not (tmp_path / ".no.auto").exists()


def auto(model: Path, output_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bitfoundry", "auto", str(model), "--output_dir", str(output_dir), *flags]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--runtime", "vllm", "--device", "h1000"], "h100"),
        (["--runtime", "vllm", "--device", "h100", "--min_recovery", "110%"], "Use 99%, 0.99 or best"),
        (["--runtime", "vllm"], "--device"),
    ],
)
def test_the_command_refuses_what_cannot_be(model: Path, tmp_path: Path, flags: list[str], words: str) -> None:
    refused = auto(model, tmp_path / "out", *flags)
    assert refused.returncode != 0 and words in refused.stderr and "Traceback" not in refused.stderr, refused.stderr


@pytest.mark.slow
def test_the_command_says_what_it_found(model: Path, tmp_path: Path) -> None:
    text = ["--num_calib_data", "8", "--seq_len", "64", "--num_eval_data", "4", "--eval_seq_len", "64"]
    goal = ["--runtime", "llama_cpp", "--device", "cpu", "--min_recovery", "best"]
    done = auto(model, tmp_path / "out", *goal, *text)
    assert done.returncode == 0, done.stderr
    assert "the best result that fits" in done.stdout
    assert json.loads((tmp_path / "out/report.json").read_text())["goal"]["asked"]["runtime"] == "llama_cpp"
