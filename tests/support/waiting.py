"""Waiting for a condition, with a limit that a busy machine does not reach."""

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
PATIENCE_S = 120
"""How long a test waits for what shall happen: a busy machine is no failure."""


def wait_until(
    condition: Callable[[], Value], *, timeout_s: float = PATIENCE_S, note: Callable[[], object] = lambda: ""
) -> Value:
    """The first true value of ``condition``. Raises AssertionError with ``note()`` if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {timeout_s} s: {note()}"
        time.sleep(0.02)
    return value


def give_time(seconds: float) -> None:
    """A pause in which nothing may happen: a fault has time to show itself.

    A slow machine makes the check weaker and never makes it fail. What shall happen is waited for with ``wait_until``.
    """
    time.sleep(seconds)
