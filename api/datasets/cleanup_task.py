"""Removes abandoned uploads in every round, and once an hour the files that killed processes have left behind."""

from __future__ import annotations

from sqlalchemy.orm import Session

from api.datasets import service, storage
from api.settings import Settings
from api.store.accounts import uploads
from api.store.engine import Sessions
from api.store.queue.hourly import Hourly


class CleanupTask:
    """Removes the files of abandoned uploads; a task of ``Maintenance``."""

    def __init__(self, settings: Settings, sessions: Sessions) -> None:
        self._settings = settings
        self._sessions = sessions
        self._litter = Hourly()

    def run(self, session: Session) -> int:
        """Remove abandoned uploads. Returns how many there were."""
        if self._litter.is_due():
            service.remove_litter(self._settings, self._sessions)
        return uploads.purge(session, lambda upload_id: storage.remove_parts(self._settings, upload_id))
