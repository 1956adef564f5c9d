"""The clock of a job's phases."""

from quantcore import events
from quantcore.events import PhaseClock, PhaseStarted, Warned


def test_the_clock_adds_up_the_seconds_of_each_phase_and_passes_events_on(monkeypatch):
    now, seen = [10.0], []
    monkeypatch.setattr(events.time, "monotonic", lambda: now[0])
    clock = PhaseClock(seen.append)
    assert clock.seconds == {}
    said = [PhaseStarted("plan"), PhaseStarted("quantize"), Warned("code", "text"), PhaseStarted("plan")]
    for event in said:
        clock(event)
        now[0] += 1.5
    assert clock.seconds == {"plan": 3.0, "quantize": 3.0} and seen == said
    now[0] += 1.0
    assert clock.seconds == {"plan": 4.0, "quantize": 3.0}
