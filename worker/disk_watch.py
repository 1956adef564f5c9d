"""Watches the disk while an engine writes: the engine must not use the space reserved for the database."""

from __future__ import annotations

from collections.abc import Callable

from api import disk
from api.settings import Settings
from worker.watch import Watch

LOOK_S = 0.5


class DiskWatch(Watch):
    """A watch in a ``with`` block for the moment when the disk space is used up."""

    def __init__(self, settings: Settings, on_fault: Callable[[], None]) -> None:
        super().__init__("room-watch", LOOK_S, on_fault)
        self._settings = settings

    def is_fault(self) -> bool:
        return disk.measure(self._settings).fault() is not None
