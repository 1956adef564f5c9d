"""Watches the disk while an engine writes: the engine must not use the space reserved for the database."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from api import disk
from api.settings import Settings

LOOK_S = 0.5


class RoomWatch:
    """A watch in a ``with`` block: ``on_fault`` is called once, from a thread, when the disk space is used up."""

    def __init__(self, settings: Settings, on_fault: Callable[[], None]) -> None:
        self._settings = settings
        self._on_fault = on_fault
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="room-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(LOOK_S):
            if disk.measure(self._settings).fault():
                self._on_fault()
                return
