"""Waiting for a condition, with a limit that a busy machine does not reach."""

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
PATIENCE_S = 120
"""The timeout for an event that must happen: long, as a busy machine is no failure."""


def wait_until(
    condition: Callable[[], Value], *, timeout_s: float = PATIENCE_S, note: Callable[[], object] = lambda: ""
) -> Value:
    """Return the first true value of ``condition``. Raises AssertionError with ``note()`` if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {timeout_s} s: {note()}"
        time.sleep(0.02)
    return value


def give_time(seconds: float) -> None:
    """Pause while nothing may happen, so that a fault has time to show itself.

    A slow machine makes the check weaker and never makes it fail. Wait with ``wait_until`` for events that must happen.
    """
    time.sleep(seconds)
