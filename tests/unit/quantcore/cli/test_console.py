"""What the engine's commands show while they work."""

import pytest

from quantcore import events
from quantcore.cli.console import progress_display, show_evaluation, show_report
from quantcore.report.quality import EvaluationResult, Verdict
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
    show_report(Report.model_validate(reports.report() | {"distillation": result}), "out")
    shown = capsys.readouterr().out
    assert "distillation" in shown
    assert "KL 1.701 -> 1.25 on held-back calibration windows; the tuned scales are kept" in shown
    show_report(Report.model_validate(reports.report()), "out")
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
    show_report(Report.model_validate(reports.report() | {"encoder": measured}), "out")
    shown = " ".join(capsys.readouterr().out.split())
    assert "cosine of the embeddings 0.9987" in shown and "rank agreement, share of pairs 0.991" in shown


def test_an_evaluation_shows_how_much_text_an_unclear_verdict_needs(capsys):
    verdict = Verdict(level="unclear", reason="there is not enough text to decide", advice="Measure on more text.")
    found = {"model": "out", "against": "float", "environment": {}, "quality": reports.report()["quality"]}
    show_evaluation(EvaluationResult.model_validate(found | {"verdict": verdict}))
    shown = capsys.readouterr().out
    assert "advice" in shown and "Measure on more text." in shown


def test_the_lines_name_the_folder_of_each_export_and_say_what_does_not_load_it(capsys):
    export = {"bytes": 1, "programs": {}, "refusals": {"vLLM": "vLLM needs [one] scheme."}}
    exports = {
        "quark": export | {"path": "quark", "load": "LLM('quark', quantization='quark')"},
        "gguf": export | {"path": ".", "load": "Llama('./model.gguf')"},
    }
    whole = reports.report()
    whole["summary"]["exports"] = exports
    show_report(Report.model_validate(whole), "it's")
    shown = capsys.readouterr().out
    assert """LLM("it's/quark", quantization='quark')""" in shown and """Llama("it's/model.gguf")""" in shown
    assert "vLLM needs [one] scheme." in shown
