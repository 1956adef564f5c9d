"""A process that says too much waits; one that says what engines say does not."""

import pytest

from worker import pace
from worker.pace import BYTES_PER_S, FREE_BYTES, LINE_BYTES, Pace


def test_what_is_said_too_fast_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    monkeypatch.setattr(pace.time, "monotonic", lambda: now)
    monkeypatch.setattr(pace.time, "sleep", sleep)
    kept = Pace()
    line = bytes(1000)
    num_free = FREE_BYTES // (len(line) + LINE_BYTES)
    for _ in range(num_free):
        kept.keep(line)
    assert not slept
    for _ in range(100):
        kept.keep(line)
    assert now == pytest.approx(100 * (len(line) + LINE_BYTES) / BYTES_PER_S, rel=0.02)
    now += FREE_BYTES / BYTES_PER_S  # it is full again, and holds no more
    slept.clear()
    now += 1000
    for _ in range(num_free):
        kept.keep(line)
    assert not slept
    kept.keep(line)
    kept.keep(line)
    assert slept
