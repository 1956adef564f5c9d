"""Work that a loop with shorter rounds does once an hour."""

from __future__ import annotations

import time

HOUR_S = 3600.0


class Hourly:
    """Says once an hour that work is due, and the first time at once. Each process counts for itself."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def is_due(self) -> bool:
        """Return True if an hour has passed since it last did."""
        if time.monotonic() < self._next_at:
            return False
        self._next_at = time.monotonic() + HOUR_S
        return True
