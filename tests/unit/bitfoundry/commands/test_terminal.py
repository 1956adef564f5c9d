"""What people see: tables that fit a plain terminal, progress in words, and lines that can be pasted."""

import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType

from bitfoundry.client.answers import ArtifactRef, Dataset, Job, JobError, Progress
from bitfoundry.client.model_answers import BriefSweep, Sweep
from bitfoundry.commands import terminal
from bitfoundry.commands.account import AUDIT_COLUMNS, KEY_COLUMNS, WORKER_COLUMNS
from bitfoundry.commands.sweeps import sweep_table, sweeps_table
from bitfoundry.commands.verdicts import shipping_warning, verdict_text
from quantcore import events
from tests.support.terminals import shown

SUMMARY: dict[str, Any] = {
    "size_before_bytes": 269_000_000,
    "size_after_bytes": 163_300_000,
    "perplexity_before": 11.51,
    "perplexity_after": 11.71,
    "worst_layer": {"name": "model.layers.29.self_attn.o_proj", "relative_error": 0.0116, "sqnr_db": 38.1},
    "num_layers_quantized": 210,
    "num_layers_kept": 1,
    "quantize_s": 50.1,
    "total_s": 61.2,
    "peak_memory_bytes": 728_500_000,
    "planned_peak_memory_bytes": 730_000_000,
    "gate": "warn",
    "exports": {
        "quark": {"path": "quark", "bytes": 1, "load": "llm = LLM('quark', quantization='quark')"},
        "compressed_tensors": {"path": "compressed_tensors", "bytes": 1, "load": "load('compressed_tensors')"},
    },
}


def job_with(**fields: Any) -> Job:
    given = {
        "id": "job_1",
        "state": "queued",
        "priority": 5,
        "pinned": False,
        "attempt": 0,
        "cancel_requested": False,
        "model": {"path": "/m"},
        "config": {},
        "created_at": "2026-11-21T12:00:00Z",
    }
    return Job.model_validate(given | fields)


def test_three_results_fit_80_characters() -> None:
    jobs = [job_with(name=name, state="succeeded", summary=SUMMARY) for name in ("int8_dynamic", "fp8", "w4a16")]
    text = shown(terminal.results_table(jobs))
    assert max(map(len, text.splitlines())) <= 80
    for whole in ("269.0 MB → 163.3 MB", "11.51 → 11.71", "+1.7 %", "self_attn.o_proj", "0.0116", "728.5 MB", "61"):
        assert text.count(whole) == 3, whole


@pytest.mark.parametrize(
    ("is_met", "beside", "row"),
    [(True, "good", "it keeps 97 %"), (False, "good, goal missed", "missed: it keeps 97 %")],
)
def test_a_goal_stands_above_the_verdict(is_met: bool, beside: str, row: str) -> None:
    judged = {"goal": {"is_met": is_met, "why": "it keeps 97 %"}, "verdict": {"level": "good", "reason": "small"}}
    job = job_with(state="succeeded", summary=SUMMARY | judged)
    assert verdict_text(job) == beside and terminal.progress_text(job) == ""
    assert re.search(rf"goal +{row} *\n *verdict +good", shown(terminal.results_table([job])))
    details = shown(terminal.job_details(job))
    assert re.search(rf"goal +{row} *\n *verdict +good: small", details)
    assert "phase" not in details  # it was "phase good, goal missed"


@pytest.mark.parametrize(
    ("verdict", "warning"),
    [
        (None, "bot@1 has no verdict: how close it is to the original was not judged."),
        ({"level": "faithful", "reason": "near", "sentence": "It may be shipped."}, ""),
        ({"level": "good", "reason": "near", "sentence": "It may be shipped."}, ""),
        ({"level": "unclear", "reason": "few", "sentence": "Measure more."}, "bot@1 is unclear. Measure more."),
        ({"level": "degraded", "reason": "the KL divergence is 0.2"}, "bot@1 is degraded. the KL divergence is 0.2"),
        ({"level": "broken", "reason": "far", "sentence": "Do not ship it."}, "bot@1 is broken. Do not ship it."),
    ],
)
def test_a_result_that_may_not_be_shipped_has_a_warning(verdict: dict[str, str] | None, warning: str) -> None:
    job = job_with(state="succeeded", summary=SUMMARY | ({"verdict": verdict} if verdict else {}))
    assert shipping_warning("bot@1", job) == warning


@pytest.mark.parametrize(
    ("level", "is_met", "warning"),
    [
        ("good", True, ""),
        ("good", False, "bot@1 missed its goal: it keeps 91 % of 95 %."),
        ("broken", False, "bot@1 is broken. Do not ship it. bot@1 missed its goal: it keeps 91 % of 95 %."),
    ],
)
def test_a_result_that_missed_its_goal_has_a_warning(level: str, is_met: bool, warning: str) -> None:
    verdict = {"level": level, "reason": "far", "sentence": "Do not ship it."}
    judged = {"goal": {"is_met": is_met, "why": "it keeps 91 % of 95 %"}, "verdict": verdict}
    assert shipping_warning("bot@1", job_with(state="succeeded", summary=SUMMARY | judged)) == warning


def test_a_job_shows_the_verdict_in_words_and_the_command_of_each_step() -> None:
    step = {"text": "Use effort best.", "changes": {"effort": "best"}, "flags": "--effort best"}
    sentence = "Read its answers before you ship it: of 100 next words, 81 are the original's."
    verdict = {"level": "degraded", "reason": "far", "sentence": sentence, "steps": [step]}
    job = job_with(state="succeeded", summary=SUMMARY | {"verdict": verdict})
    text = shown(terminal.job_details(job), 120)
    assert re.search(rf"result +{sentence} *\n|\nverdict +degraded: far", text) and sentence in text
    assert f"bitfoundry clone {job.id} --effort best" in text
    assert str(job.summary).splitlines()[:2] == [sentence, "degraded: far"]


def test_a_job_that_has_succeeded_begins_with_what_a_person_asks() -> None:
    judged = {"verdict": {"level": "degraded", "reason": "The KL divergence is 0.15.", "advice": "Use effort best."}}
    job = job_with(id="job_1", state="succeeded", phase="verify", summary=SUMMARY | judged,
                   artifact=ArtifactRef(manifest_sha256="0", bytes=1, path="/srv/x"))  # fmt: skip
    text = " ".join(shown(terminal.job_details(job), 200).split())
    assert "verdict degraded: The KL divergence is 0.15. next Use effort best. size 269.0 MB" in text
    assert "download bitfoundry download job_1" in text
    for left_out in ("phase", "priority", "attempt", "/srv/x"):
        assert left_out not in text
    assert str(job.summary).splitlines()[:2] == ["degraded: The KL divergence is 0.15.", "Next: Use effort best."]
    assert str(job.summary).splitlines()[2].startswith("269.0 MB -> 163.3 MB")
    assert "phase" in shown(terminal.job_details(job_with(state="running", phase="resolve")))


def test_a_failed_job_has_its_reason_in_the_table() -> None:
    failure = JobError(code="disk_full", message="The worker's disk is full.")
    jobs = [job_with(name="a", state="succeeded", summary=SUMMARY), job_with(name="b", state="failed", error=failure)]
    text = " ".join(shown(terminal.results_table(jobs), 200).split())
    assert "failed: The worker's disk is full. (disk_full)" in text


def test_lines_to_load_name_the_folder_and_nothing_else_changes() -> None:
    job = job_with(state="succeeded", summary=SUMMARY, artifact=ArtifactRef(manifest_sha256="0", bytes=1, path="/x"))
    lines = terminal.load_lines(job, "/a")
    assert lines == {
        "quark": "llm = LLM('/a/quark', quantization='quark')",
        "compressed_tensors": "load('/a/compressed_tensors')",
    }
    alone = SUMMARY | {"exports": {"quark": {"path": ".", "bytes": 1, "load": "LLM('.', quantization='quark')"}}}
    assert terminal.load_lines(job_with(summary=alone), "/a") == {"quark": "LLM('/a', quantization='quark')"}
    of_a_file = SUMMARY | {"exports": {"gguf": {"path": ".", "bytes": 1, "load": "Llama('./model.gguf')"}}}
    assert terminal.load_lines(job_with(summary=of_a_file), "/a") == {"gguf": "Llama('/a/model.gguf')"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"state": "running", "phase": "resolve"}, "resolve"),
        (
            {"state": "running", "phase": "quantize"}
            | {"progress": Progress(phase="quantize", done=3, total=30, unit="block", eta_s=41.6)},
            "quantize: block 3 of 30, 42 s left",
        ),
        (
            {"state": "running", "phase": "quantize", "eta_s": 68.2}
            | {"progress": Progress(phase="quantize", done=3, total=30, unit="block", eta_s=41.6)},
            "quantize: block 3 of 30, 42 s left, about 68 s until the job ends",
        ),
        (  # the bar of the phase before says nothing about this one
            {"state": "running", "phase": "verify"}
            | {"progress": Progress(phase="quantize", done=30, total=30, unit="block")},
            "verify",
        ),
        ({"state": "failed", "phase": "quantize"}, ""),
    ],
)
def test_progress_in_words(fields: dict[str, Any], text: str) -> None:
    assert terminal.progress_text(job_with(**fields)) == text


ID = "0123456789abcdef" * 2
LONG_JOB = {
    "id": f"job_{ID}", "name": "meta-llama-3.1-8b-instruct-w4a16-gptq", "preset": "fp8_per_channel_dynamic",
    "state": "running", "phase": "quantize", "sweep_values": {"/config/preset": "fp8_per_channel_dynamic"},
    "progress": Progress(phase="quantize", done=12, total=30, unit="block", eta_s=40),
}  # fmt: skip
DATASET = {
    "id": f"ds_{ID}", "name": "our-calibration-texts-of-the-year-2026.jsonl", "format": "jsonl.gz", "bytes": 10**9,
    "column": "messages", "statistics": {"num_rows": 123_456}, "created_at": "2026-11-21T12:00:00Z",
}  # fmt: skip
WORKER = {
    "id": f"wrk_{ID}", "state": "draining", "host": "gpu-node-17.cluster.example.com", "beat_at": "2026-11-21T12:00:00",
    "devices": ["NVIDIA H100 80GB HBM3"] * 8, "jobs": [f"job_{ID}"],
}  # fmt: skip
SWEEP = Sweep(
    id=f"swp_{ID}", created_at="2026-11-21T12:00:00Z", matrix={"/config/preset": ["fp8"]}, total=1,
    by_state={"running": 1}, jobs=[job_with(**LONG_JOB)],
)  # fmt: skip


@pytest.mark.parametrize(
    ("table", "whole"),
    [
        (terminal.jobs_table([job_with(**LONG_JOB)]), [f"job_{ID}", "meta-llama-3.1-8b-…struct-w4a16-gptq", "running"]),
        (sweep_table(SWEEP), [f"swp_{ID}", f"job_{ID}"[:12], "preset", "running"]),
        (terminal.datasets_table([Dataset.model_construct(**DATASET)]), [f"ds_{ID}", str(DATASET["name"]), "123,456"]),
        (terminal.rows_table([WORKER], WORKER_COLUMNS), [f"wrk_{ID}", f"job_{ID}", str(WORKER["host"]), "draining"]),
    ],
    ids=["jobs", "sweep", "datasets", "workers"],
)
def test_tables_fit_80_characters_with_whole_ids(table: RenderableType, whole: list[str]) -> None:
    text = shown(table, 80)
    assert max(map(len, text.splitlines())) <= 80
    for part in whole:
        assert part in text


def test_a_sweep_is_a_table_with_its_axes_and_what_was_measured() -> None:
    values = {"/config/preset": "w4a16", "/calibration/num_samples": 32}
    verdict = {"verdict": {"level": "good", "reason": "small"}, "kl_mean": 0.0512}
    done = job_with(id=f"job_{ID}", state="succeeded", summary=SUMMARY | verdict, sweep_values=values)
    error = JobError(code="disk_full", message="The disk is full.")
    failed = job_with(state="failed", error=error, sweep_values=values | {"/calibration/num_samples": 64})
    matrix = {"/config/preset": ["w4a16"], "/calibration/num_samples": [32, 64]}
    sweep = Sweep(
        id=f"swp_{ID}", created_at="2026-11-21T12:00:00Z", matrix=matrix, total=2,
        by_state={"succeeded": 1, "failed": 1}, jobs=[done, failed],
    )  # fmt: skip
    heading, _, first, second = [line for line in shown(sweep_table(sweep), 120).splitlines()[2:] if line.strip()]
    assert heading.split() == ["job", "preset", "num_samples", "state", "size", "KL", "verdict"]
    assert first.split() == [f"job_{ID}"[:12], "w4a16", "32", "succeeded", "163.3", "MB", "0.0512", "good"]
    assert second.split()[2:] == ["64", "failed", "The", "disk", "is", "full.", "(disk_full)"]


def test_sweeps_are_a_table_with_their_best_results() -> None:
    best = {
        "job_id": f"job_{ID}", "finished_at": "2026-11-21T12:00:00Z", "recipe": {"preset": "w4a16"},
        "size_after_bytes": 103_000_000, "verdict": "good", "kl_mean": 0.01,
    }  # fmt: skip
    sweep = BriefSweep.model_validate(
        {
            "id": f"swp_{ID}", "name": "which", "created_at": "2026-11-21T12:00:00Z", "model": "/m/SmolLM2",
            "axes": {"/config/preset": ["fp8", "w4a16"], "/calibration/preset": [1]}, "total": 2,
            "by_state": {"queued": 0, "succeeded": 2}, "best": best,
        }
    )  # fmt: skip
    text = shown(sweeps_table([sweep]), 250)
    assert "SmolLM2" in text and "/config/preset (2), /calibration/preset (1)" in text and "2 succeeded" in text
    assert f"{f'job_{ID}'[:12]}: good, 103.0 MB, KL 0.01" in text


def test_a_wide_terminal_has_one_line_per_job() -> None:
    lines = shown(terminal.jobs_table([job_with(**LONG_JOB)] * 2), 200).splitlines()
    assert len(lines) == 3
    assert str(LONG_JOB["name"]) in lines[1]


def test_without_a_terminal_each_step_is_one_line() -> None:
    console = Console(file=StringIO(), width=80)
    with terminal.Watch(console) as watch:
        for _ in range(3):
            watch.update(job_with(name="fp8", state="running", phase="quantize"))
        watch.update(job_with(name="fp8", state="succeeded"))
    assert console.file.getvalue().splitlines() == ["fp8: quantize", "fp8: succeeded"]  # type: ignore[attr-defined]


def test_without_a_terminal_a_long_phase_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(phase="quantize", done=12, total=30, unit="block", eta_s=40)
    job = job_with(name="fp8", state="running", phase="quantize")
    console = Console(file=StringIO(), width=80)
    with terminal.Watch(console) as watch:
        watch.update(job)
        watch.update(job.model_copy(update={"progress": progress}))
        monkeypatch.setattr(events, "INTERVAL_S", 0.0)
        watch.update(job.model_copy(update={"progress": progress}))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == ["fp8: quantize", "fp8: quantize: block 12 of 30, 40 s left"]


def test_on_a_terminal_the_bar_shows_block_and_rest() -> None:
    console = Console(file=StringIO(), width=120, force_terminal=True)
    progress = Progress(phase="quantize", done=12, total=30, unit="block", eta_s=40)
    with terminal.Watch(console) as watch:
        watch.update(job_with(name="fp8", state="running", phase="quantize", progress=progress, started_at="now"))
        text = shown(watch.picture, 120)
    assert "quantize" in text
    assert "12/30" in text
    assert "block, 40 s left" in text


def test_what_others_wrote_is_shown_as_text() -> None:
    """A model's or a job's name is no markup."""
    evil = "[red]x[/red][link=https://evil]"
    failed = job_with(name=evil, state="failed", error=JobError(code="x", message=evil))
    for table in (terminal.jobs_table([failed]), terminal.job_details(failed), terminal.results_table([failed])):
        assert evil in shown(table, 200)
    with terminal.Watch(Console(file=StringIO(), width=200, force_terminal=True)) as watch:
        watch.update(job_with(name=evil))
        assert evil in shown(watch.picture, 200)


@pytest.mark.parametrize("columns", [KEY_COLUMNS, AUDIT_COLUMNS], ids=["keys", "audit"])
def test_a_table_names_the_member_of_a_key(columns: tuple[str, ...]) -> None:
    rows = [{"id": "1", "member": {"id": "mem_1", "name": "Ada [b]L.[/b]"}}, {"id": "2", "member": None}]
    text = shown(terminal.rows_table(rows, columns), 200)
    assert "Ada [b]L.[/b]" in text and "mem_1" not in text and "None" not in text
