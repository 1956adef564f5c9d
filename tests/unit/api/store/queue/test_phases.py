"""Phases of an attempt."""

from datetime import UTC, datetime
from typing import Any

import pytest

from api.store.queue import phases

FIRST, SECOND = (datetime(2026, 11, 22, 0, 0, second, tzinfo=UTC) for second in (1, 2))


def test_a_phase_ends_where_the_next_begins() -> None:
    story = phases.enter([], "plan", FIRST)
    story = phases.enter(story, "quantize", SECOND)
    assert [(each["name"], each["state"], each["ended_at"]) for each in story] == [
        ("plan", "done", SECOND.isoformat()),
        ("quantize", "running", None),
    ]
    ended = phases.leave(story, phases.STOPPED, SECOND)
    assert [each["state"] for each in ended] == ["done", "stopped"]
    assert phases.leave(ended, phases.DONE, SECOND) == ended
    assert phases.leave([], phases.DONE, SECOND) == []


def test_progress_belongs_to_the_running_phase() -> None:
    story = phases.enter(phases.enter([], "plan", FIRST), "quantize", SECOND)
    told = phases.note_progress(story, {"phase": "quantize", "done": 3, "total": 30, "unit": "block", "eta_s": 4.0})
    assert [told[1][name] for name in ("done", "total", "unit")] == [3, 30, "block"]
    assert told[0] == story[0]
    assert phases.note_progress(story, {"phase": "plan", "done": 1}) == story
    assert phases.note_progress([], {"phase": "plan"}) == []


@pytest.mark.parametrize("nonsense", ["3", True, None, [], 2**80, 10**400])
def test_an_engines_nonsense_is_no_number(nonsense: Any) -> None:
    told = phases.note_progress(phases.enter([], "p", FIRST), {"phase": "p", "done": nonsense, "unit": 7})
    assert (told[0]["done"], told[0]["unit"]) == (None, None)
