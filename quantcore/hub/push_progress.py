"""Reports the bytes of an upload as events."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from quantcore.events import Emit, Eta, Progress

EVERY_S = 0.5


class ByteProgress:
    """Counts the bytes sent of each file, and reports the sum now and then. Safe to use from several threads."""

    def __init__(self, total: int, emit: Emit) -> None:
        self.total = total
        self._emit = emit
        self._eta = Eta(total)
        self._lock = threading.Lock()
        self._reached: dict[str, int] = {}
        self._said_at = 0.0
        self._say()

    def reach(self, path: str, num_bytes: int) -> None:
        """Record the number of bytes read of a file. A repeated try counts only once it is ahead of the last."""
        with self._lock:
            self._reached[path] = max(self._reached.get(path, 0), num_bytes)
            if time.monotonic() - self._said_at >= EVERY_S:
                self._say()

    def finish(self, sizes: Mapping[str, int]) -> None:
        """Record that these files are present, sent now or before."""
        with self._lock:
            self._reached |= sizes
            self._say()

    def _say(self) -> None:
        done = sum(self._reached.values())
        self._said_at = time.monotonic()
        self._emit(Progress("publish", done, self.total, "byte", self._eta.after(done)))
