"""Slows down a process that says too much: one that never stops must not fill the database, or keep the worker busy."""

from __future__ import annotations

import time

FREE_BYTES = 4 << 20
BYTES_PER_S = 64 << 10
LINE_BYTES = 200
"""Cost of a line beside its bytes: a row of the database."""


class Pace:
    """A bucket of ``FREE_BYTES`` that fills up with ``BYTES_PER_S``. What is not read keeps its writer waiting."""

    def __init__(self) -> None:
        self._left = float(FREE_BYTES)
        self._at = time.monotonic()

    def keep(self, line: bytes) -> None:
        """Take ``line`` from the bucket, and sleep for as long as it lacks."""
        now = time.monotonic()
        self._left = min(FREE_BYTES, self._left + (now - self._at) * BYTES_PER_S) - len(line) - LINE_BYTES
        self._at = now
        if self._left < 0:
            time.sleep(-self._left / BYTES_PER_S)
