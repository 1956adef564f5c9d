"""Reports the progress of a download as events."""

from __future__ import annotations

import threading
import time
from typing import Any

from quantcore.events import Emit, Eta, Progress

PROGRESS_EVERY_S = 1.0


class ByteCounter:
    """Turns the progress bars of huggingface_hub, which many threads move, into one event a second."""

    def __init__(self, total: int, emit: Emit) -> None:
        self._total = total
        self._emit = emit
        self._eta = Eta(total)
        self._lock = threading.Lock()
        self._done = 0
        self._last_s = 0.0

    def bar_class(self) -> type[Any]:
        """Return a silent tqdm class that counts bytes.

        The library moves two bars, bytes received and written; the larger value counts.
        """
        from tqdm import tqdm  # type: ignore[import-untyped]

        counter = self

        class Bar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._counts = kwargs.get("unit") == "B"
                self._bytes = 0.0
                super().__init__(*args, **{**kwargs, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                if self._counts:
                    self._bytes += n or 0
                    counter.move(int(self._bytes))
                return None

        return Bar

    def move(self, done: int) -> None:
        with self._lock:
            self._done = max(self._done, min(done, self._total))
            if time.monotonic() - self._last_s >= PROGRESS_EVERY_S:
                self._last_s = time.monotonic()
                self._emit(Progress("download", self._done, self._total, "byte", self._eta.after(self._done)))

    def finish(self) -> None:
        """Report that all bytes are present, downloaded now or before."""
        self._emit(Progress("download", self._total, self._total, "byte", 0.0))
