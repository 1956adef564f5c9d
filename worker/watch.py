"""Looks again and again, in a thread, whether something is wrong, for as long as a ``with`` block lasts."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Watch(ABC):
    """Calls ``on_fault`` once, from its thread, when ``is_fault`` returns True; it looks every ``look_s`` seconds."""

    def __init__(self, name: str, look_s: float, on_fault: Callable[[], None]) -> None:
        self._look_s = look_s
        self._on_fault = on_fault
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def is_fault(self) -> bool: ...

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._look_s):
            if self.is_fault():
                self._on_fault()
                return
