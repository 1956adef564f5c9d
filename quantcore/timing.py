"""How long the rest will take."""

from __future__ import annotations

import time


class Eta:
    """Seconds left of ``total`` equal steps, from the mean of those done."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def after(self, done: int) -> float | None:
        """Seconds left when ``done`` steps are done, None before the first."""
        return round(self.elapsed_s / done * (self._total - done), 1) if done else None
