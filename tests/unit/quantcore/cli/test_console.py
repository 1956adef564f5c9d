"""What the engine's commands show while they work."""

import pytest

from quantcore import events
from quantcore.cli.console import progress_display


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
