"""Parts that end are started again, ever more rarely, and never given up."""

from pathlib import Path

import pytest

from bitfoundry.errors import StackError
from bitfoundry.local import supervision
from bitfoundry.local.supervision import MAX_PAUSE_S, STEADY_S, Supervised


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Stub:
    """A part that runs for `lives_s` after each start; None is for ever."""

    name = "the stub"
    log = Path("stub.log")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.starts = [clock.now]
        self.lives_s: float | None = None
        self.fails = False

    def poll(self) -> int | None:
        return None if self.lives_s is None or self._clock.now < self.starts[-1] + self.lives_s else -9

    def start_again(self) -> None:
        if self.fails:
            raise StackError("no room")
        self.starts.append(self._clock.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(supervision.time, "monotonic", clock.monotonic)
    return clock


def watch(tended: Supervised, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1
        tended.look()


def test_it_is_never_given_up(clock: Clock) -> None:
    part, said = Stub(clock), []
    tended = Supervised(part, said.append)
    part.lives_s = 0
    watch(tended, clock, 3600)
    gaps = [after - before for before, after in zip(part.starts, part.starts[1:], strict=False)]
    assert gaps[:4] == sorted(gaps[:4])
    assert set(gaps[8:]) <= {MAX_PAUSE_S, MAX_PAUSE_S + 1} and len(gaps) > 50
    assert said[0] == "the stub ended (status -9): restarting it"
    assert len(said) == len(set(said)) < 10  # each once, though it ended 60 times

    part.lives_s = None
    watch(tended, clock, int(MAX_PAUSE_S + STEADY_S) + 2)
    assert said[-1] == "the stub is running again"


def test_deaths_far_apart_are_not_counted_together(clock: Clock) -> None:
    part, said = Stub(clock), []
    tended = Supervised(part, said.append)
    for _ in range(20):
        part.lives_s = None
        watch(tended, clock, int(STEADY_S) + 1)
        part.lives_s = 0
        tended.look()
        part.lives_s = None
        assert part.starts[-1] == clock.now  # at once
    assert said == ["the stub ended (status -9): restarting it"] * 20


def test_a_start_that_fails_is_tried_again(clock: Clock) -> None:
    part, said = Stub(clock), []
    tended = Supervised(part, said.append)
    part.lives_s, part.fails = 0, True
    watch(tended, clock, 10)
    assert len(part.starts) == 1
    assert any("no room" in line for line in said)
    part.lives_s, part.fails = 0, False
    watch(tended, clock, 20)
    assert len(part.starts) > 1
