"""What the engine's commands show while they work."""

from pathlib import Path

import pytest

from quantcore import events
from quantcore.cli.console import progress_display, show_evaluation, show_report
from quantcore.cli.next_steps import command_for
from quantcore.report.evaluation_result import EvaluationResult
from quantcore.report.quality import Step, Verdict
from quantcore.report.values import Report
from tests.support import reports


def test_without_a_terminal_progress_is_a_line_now_and_then_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_display() as emit:
        emit(events.PhaseStarted("plan"))
        emit(events.PhaseStarted("quantize"))
        emit(events.Progress("quantize", 1, 30, "block", 40.0))
        emit(events.Warned("mind", "mind this"))
        monkeypatch.setattr(events, "INTERVAL_S", 0.0)
        emit(events.Progress("quantize", 2, 30, "block", None))
        emit(events.Progress("quantize", 3, 30, "block", 38.0))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "plan",
        "quantize",
        "warning mind this",
        "quantize: block 2 of 30",
        "quantize: block 3 of 30, 38 s left",
    ]


def test_the_summary_shows_what_distillation_gained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = {"kl_before": 1.7012, "kl_after": 1.25, "is_kept": True}
    show_report(Report.model_validate(reports.report() | {"distillation": result}), "out", str)
    shown = capsys.readouterr().out
    assert "distillation" in shown
    assert "KL 1.701 -> 1.25 on held-back calibration windows; the tuned scales are kept" in shown
    show_report(Report.model_validate(reports.report()), "out", str)
    assert "distillation" not in capsys.readouterr().out


def test_the_summary_shows_the_quality_of_an_embedding_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no perplexity, and nothing was shown."""
    monkeypatch.setenv("COLUMNS", "200")
    measured = {
        "num_windows": 4, "seq_len": 64, "cosine": reports.measure(0.9987), "rank_agreement": reports.measure(0.991),
        "output_error": 0.0123,
    }  # fmt: skip
    show_report(Report.model_validate(reports.report() | {"encoder": measured}), "out", str)
    shown = " ".join(capsys.readouterr().out.split())
    assert "cosine of the embeddings 1.00 (0.8 to 1.2)" in shown and "rank agreement, share of pairs 0.99" in shown


def test_an_evaluation_shows_how_much_text_an_unclear_verdict_needs(capsys):
    verdict = Verdict(level="unclear", reason="there is not enough text to decide", advice="Measure on more text.")
    found = {"model": "out", "against": "float", "environment": {}, "quality": reports.report()["quality"]}
    show_evaluation(EvaluationResult.model_validate(found | {"verdict": verdict}))
    shown = capsys.readouterr().out
    assert "advice" in shown and "Measure on more text." in shown


def test_an_evaluation_shows_behaviour_and_what_would_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    found = {"model": "out", "against": "float", "environment": {}, "quality": reports.report()["quality"]}
    show_evaluation(EvaluationResult.model_validate(found | {"behaviour": reports.behaviour()}))
    shown = " ".join(capsys.readouterr().out.split())
    assert "answers that do not end 10% 75% (worse on 9 of 12 prompts, better on 0)" in shown
    assert "no finding, about 387 prompts would tell" in shown and "<|im_end|> no longer ends an answer" in shown
    show_report(Report.model_validate(reports.report() | {"behaviour": reports.behaviour()}), "out", str)
    assert "<|im_end|> no longer ends an answer" in " ".join(capsys.readouterr().out.split())


def test_the_lines_name_the_folder_of_each_export_and_say_what_does_not_load_it(capsys):
    export = {"bytes": 1, "programs": {}, "refusals": {"vLLM": "vLLM needs [one] scheme."}}
    exports = {
        "quark": export | {"path": "quark", "load": "LLM('quark', quantization='quark')"},
        "gguf": export | {"path": ".", "load": "Llama('./model.gguf')"},
    }
    whole = reports.report()
    whole["summary"]["exports"] = exports
    show_report(Report.model_validate(whole), "it's", str)
    shown = capsys.readouterr().out
    assert """LLM("it's/quark", quantization='quark')""" in shown and """Llama("it's/model.gguf")""" in shown
    assert "vLLM needs [one] scheme." in shown


BETTER = Step(text="Use effort best.", changes={"effort": "best"}, flags="--effort best")


def test_a_poor_result_ends_with_the_verdict_in_words_and_the_command_to_try_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    sentence = "Do not ship it: of 100 next words, 20 are the original's."
    verdict = Verdict(level="broken", reason="far", sentence=sentence, advice="Use effort best.", steps=(BETTER,))
    whole = reports.report()
    whole["summary"]["verdict"] = verdict.to_dict()
    (tmp_path / "report.html").touch()
    show_report(Report.model_validate(whole), str(tmp_path), lambda step, number: f"again {step.flags} {number}")
    shown = capsys.readouterr().out
    first, second, *_, last = (line.strip() for line in shown.splitlines())
    assert first.split(maxsplit=1) == ["result", sentence] and second.split() == ["verdict", "broken:", "far"]
    assert ["answers,", "layers", f"{tmp_path}/report.html"] in [line.split() for line in shown.splitlines()]
    assert last == "again --effort best 2" and "advice" not in first + second, "each advice stands there once"


@pytest.mark.parametrize(
    ("changes", "flags", "command"),
    [
        (
            {"effort": "best"},
            "--effort best",
            "bitfoundry quantize --model_dir 'a b' --quant_scheme w4a16 --num_eval_data 6 --effort best -o out-2",
        ),
        (
            {"goal": {"runtime": "vllm"}},
            "--runtime vllm --device 24GB",
            "bitfoundry auto 'a b' --runtime vllm --device 24GB -o out-2",
        ),
    ],
)
def test_the_command_of_a_step_replaces_what_it_sets(changes: dict[str, object], flags: str, command: str) -> None:
    given = ["--model_dir", "a b", "--output-dir", "out/", "--quant_scheme", "w4a16"]
    given += ["--effort=fast", "--quant_algo", "rtn", "--num_eval_data", "6"]
    step = Step(text="x", changes=changes, flags=flags)
    assert command_for(step, 2, given, model_dir="a b", output_dir="out/") == command


def test_the_summary_shows_what_kv_caches_of_fewer_bits_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show_report(Report.model_validate(reports.report() | {"kv_caches": [reports.kv_cache("q8_0")]}), "out", str)
    shown = " ".join(capsys.readouterr().out.split())
    assert "KV cache size perplexity kl mean positions 257 to 511 verdict" in shown
    assert "q8_0 53 % +0.01 % 0.001 (0.00 to 0.03) 0.003 faithful" in shown
    show_report(Report.model_validate(reports.report()), "out", str)
    assert "KV cache" not in capsys.readouterr().out
