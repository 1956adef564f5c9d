"""The estimate of a whole job, with figures."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from api.store.queue import remaining
from api.store.queue.phases import Phase
from api.store.queue.remaining import Earlier, estimate

EARLIER_S = {"resolve": 1.0, "plan": 9.0, "quantize": 60.0, "export": 10.0, "verify": 20.0}
START = datetime(2026, 11, 26, tzinfo=UTC)


def phases(**seconds: float | None) -> list[Phase]:
    """The phases of an attempt, one after the other; None for the one that is running."""
    story: list[Phase] = []
    at = START
    for name, took_s in seconds.items():
        end = None if took_s is None else at + timedelta(seconds=took_s)
        state = "running" if end is None else "done"
        times = {"started_at": at.isoformat(), "ended_at": None if end is None else end.isoformat()}
        story.append({"name": name, "state": state, **times})
        at = end or at
    return story


def progress(phase: str, eta_s: Any, done: Any = 10, total: Any = 30) -> dict[str, Any]:
    return {"phase": phase, "done": done, "total": total, "unit": "block", "eta_s": eta_s}


def left_s(story: list[Phase], told: dict[str, Any] | None, elapsed_s: float, *, is_whole: bool = True) -> float | None:
    return estimate(story, told, elapsed_s, EARLIER_S, is_whole=is_whole)


def test_the_phases_to_come_are_scaled_by_those_so_far() -> None:
    story = phases(resolve=2, plan=18, quantize=None)
    told = progress("quantize", 80.0)  # 10 of 30 blocks: 120 s in all, twice the 60 s of the earlier job
    assert left_s(story, told, 40.0) == pytest.approx(80 + 2 * (10 + 20))
    slow_start = phases(resolve=2, plan=158, quantize=None)
    assert left_s(slow_start, told, 40.0) == pytest.approx(80 + 280 / 70 * (10 + 20))


def test_a_phase_without_an_estimate_of_its_own_is_scaled_too() -> None:
    story = phases(resolve=2, plan=18, quantize=120, export=None)
    assert left_s(story, None, 5.0) == pytest.approx(2 * 10 - 5 + 2 * 20)
    assert left_s(story, None, 50.0) == pytest.approx(2 * 20)  # it takes longer than it should
    assert left_s(story, progress("quantize", 7.0), 5.0) == pytest.approx(55)  # of the phase before
    tail = phases(resolve=2, plan=18, quantize=None)
    assert left_s(tail, progress("quantize", 0.0, done=30), 120.0) == pytest.approx(2 * 30)


def test_a_phase_of_several_passes_lasts_as_long_as_it_did() -> None:
    story = phases(resolve=2, plan=18, quantize=120, export=20, verify=None)
    assert left_s(story, progress("verify", 3.0), 10.0) == pytest.approx(2 * 20 - 10)
    assert left_s(story, progress("verify", 70.0), 10.0) == pytest.approx(70)  # never below the engine's own


def test_a_resumed_attempt_counts_what_its_engine_estimates_alone() -> None:
    story = phases(resolve=2, plan=18, quantize=None)
    told = progress("quantize", 20.0, done=25)  # 4 s a block, of which 24 were done by the attempt before
    assert left_s(story, told, 4.0, is_whole=False) == pytest.approx(20 + 2 * (10 + 20))
    assert left_s(phases(quantize=20, export=None), None, 1.0, is_whole=False) is None
    assert left_s(story, progress("quantize", 0.0, done=30), 20.0, is_whole=False) is None


def test_nothing_is_known_without_a_basis() -> None:
    assert left_s(phases(resolve=None), None, 1.0) is None
    assert left_s(phases(resolve=4, plan=None), None, 1.0) is None  # a hundredth of the earlier job scales nothing
    assert left_s(phases(resolve=1, download=None), progress("download", 60.0), 1.0) is None
    assert estimate(phases(quantize=None), progress("quantize", 5.0), 1.0, {}, is_whole=True) is None
    assert estimate(phases(a=1, b=None), None, 1.0, {"a": 0.0, "b": 0.0}, is_whole=True) is None


@pytest.mark.parametrize("nonsense", ["3", True, None, [], -4, 2**80, float("nan")])
def test_an_engines_nonsense_is_no_estimate(nonsense: Any) -> None:
    story = phases(resolve=2, plan=18, quantize=None)
    told = {"phase": "quantize", "done": nonsense, "total": nonsense, "eta_s": nonsense}
    assert left_s(story, told, 40.0) == pytest.approx(2 * 60 - 40 + 2 * 30)  # as without any progress


def test_the_time_of_other_settings_is_a_rough_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there only without a run of the same kind, and of the same model and preset alone."""
    model, spec = {"path": "/m"}, {"evaluation": {"num_windows": 12}}
    same, other = (remaining._work_of({"evaluation": {"num_windows": number}}) for number in (12, 99))

    def expect(*earlier: Earlier, preset: str | None = "w4a16") -> tuple[float | None, float | None]:
        monkeypatch.setattr(remaining, "_find_earlier", lambda session, project: [*earlier])
        return remaining.expect(None, "p", model, spec, preset)  # type: ignore[arg-type]

    alike = Earlier(model, "w4a16", other, {"quantize": 60.0, "verify": 30.0})
    assert expect(alike) == (None, 90.0)
    assert (
        expect(alike, preset="fp8") == expect(Earlier({"path": "/n"}, "w4a16", same, {"quantize": 1.0})) == (None, None)
    )
    assert expect(Earlier(model, None, other, {"quantize": 1.0}), preset=None) == (None, None)
    assert expect(alike, Earlier(model, "w4a16", same, {"quantize": 7.0})) == (7.0, None)
