"""Reports progress of work in memory: a bar in terminals and notebooks, else log lines, and a callback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from quantcore.events import Pace
from quantcore.nn.log import log

T = TypeVar("T")
Callback = Callable[[str, int, int | None], None]
"""A function of the phase, the number of finished steps, and the number of all steps (None if unknown).

The phases are ``calibrate`` (batches), ``quantize`` (decoder blocks that algorithms work on) and ``round`` (layers).
"""


class Progress:
    """Shows the progress of a quantization, and measures the seconds of each phase."""

    def __init__(self, callback: Callback | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._callback = callback

    def track(self, steps: Iterable[T], phase: str) -> Iterator[T]:
        """Yield ``steps`` one by one, and report the end of each."""
        total = len(steps) if isinstance(steps, Sized) else None
        console = Console(stderr=True)
        has_bar = console.is_terminal or console.is_jupyter
        begin, pace = time.monotonic(), Pace()
        tracked = track(steps, phase, total=total, console=console, transient=True, disable=not has_bar)
        for done, step in enumerate(tracked, start=1):
            yield step
            now = time.monotonic()
            if self._callback is not None:
                self._callback(phase, done, total)
            if not has_bar and pace.is_due():
                log.info("%s: %d%s, %.0f s", phase, done, "" if total is None else f" of {total}", now - begin)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - begin
