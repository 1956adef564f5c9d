"""Removes abandoned uploads in every round, and once an hour the files that killed processes have left behind."""

from __future__ import annotations

import time

from sqlalchemy.orm import Session

from api.datasets import service, storage
from api.settings import Settings
from api.store.accounts import uploads
from api.store.engine import Sessions

LITTER_INTERVAL_S = 3600.0


class CleanupTask:
    """Removes the files of abandoned uploads; a task of ``Maintenance``."""

    def __init__(self, settings: Settings, sessions: Sessions) -> None:
        self._settings = settings
        self._sessions = sessions
        self._next_at = 0.0

    def run(self, session: Session) -> int:
        """Remove abandoned uploads. Returns how many there were."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + LITTER_INTERVAL_S
            service.remove_litter(self._settings, self._sessions)
        return uploads.purge(session, lambda upload_id: storage.remove_parts(self._settings, upload_id))
