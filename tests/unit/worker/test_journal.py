"""Which of the engine's lines become rows."""

from typing import Any

import pytest

from worker import journal
from worker.journal import Journal, crash
from worker.redaction import Redactor


class FakeLease:
    """Keeps what would be written."""

    def __init__(self) -> None:
        self.written: list[tuple[list[str], dict[str, Any]]] = []

    def write(self, change: Any, *, happened: Any, columns: dict[str, Any]) -> None:
        self.written.append(([f"{e.kind} {e.data.get('done', '')}".strip() for e in happened], columns))


def progress(done: int) -> dict[str, Any]:
    return {"kind": "progress", "phase": "quantize", "done": done, "total": 9, "unit": "block", "eta_s": None}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(journal.time, "monotonic", lambda: now[0])
    return now


def test_progress_is_thinned_to_two_a_second(clock: list[float]) -> None:
    lease = FakeLease()
    book = Journal(lease, Redactor())  # type: ignore[arg-type]
    for done in range(100):
        book.note(progress(done))
        clock[0] += 0.02
    assert 4 <= len(lease.written) <= 5
    assert lease.written[0][0] == ["progress 0"]
    book.close()
    assert lease.written[-1][0] == ["progress 99"]
    assert lease.written[-1][1]["progress"]["done"] == 99


def test_what_waits_goes_before_the_next_event(clock: list[float]) -> None:
    lease = FakeLease()
    book = Journal(lease, Redactor())  # type: ignore[arg-type]
    book.note({"kind": "phase_started", "phase": "quantize"})
    book.note(progress(1))
    book.note(progress(2))
    book.note({"kind": "phase_started", "phase": "export"})
    book.close()
    assert lease.written == [
        (["phase_started"], {"phase": "quantize", "progress": None}),
        (["progress 1"], {"progress": {k: v for k, v in progress(1).items() if k != "kind"}}),
        (["progress 2", "phase_started"], {"phase": "export", "progress": None}),
    ]


def test_last_words(clock: list[float]) -> None:
    book = Journal(FakeLease(), Redactor())  # type: ignore[arg-type]
    book.note({"kind": "completed", "summary": {"a": 1}})
    assert book.summary == {"a": 1}
    book.note({"kind": "failed", "code": "x", "message": "m", "hint": 7, "retryable": "yes"})
    assert book.failure is not None
    assert book.failure.to_dict() == {"code": "x", "message": "m", "hint": "", "retryable": False, "detail": ""}
    book.note({"kind": "failed", "code": "rank_lost"})
    assert book.failure.code == "x", "the first counts: of several ranks the others miss the one that failed"
    silent = Journal(FakeLease(), Redactor())  # type: ignore[arg-type]
    silent.note({"kind": "failed"})
    assert silent.failure is not None and silent.failure.code == "engine_failed"


def test_a_crash_shows_no_traceback() -> None:
    traceback = ["Traceback (most recent call last):", '  File "x.py", line 3, in f', "    f()", "OSError: no"]
    printed = "\n".join(["loading", *traceback, "bye"])
    assert crash(1, printed).detail == "loading\nOSError: no\nbye"
