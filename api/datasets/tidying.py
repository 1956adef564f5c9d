"""What is left of uploads is removed: abandoned ones at once, once an hour what killed processes have left behind."""

from __future__ import annotations

import time

from sqlalchemy.orm import Session

from api.datasets import service, storage
from api.settings import Settings
from api.store.accounts import uploads
from api.store.engine import Sessions

LITTER_INTERVAL_S = 3600.0


class Tidying:
    """A task of the upkeep."""

    def __init__(self, settings: Settings, sessions: Sessions) -> None:
        self._settings = settings
        self._sessions = sessions
        self._next_at = 0.0

    def run(self, session: Session) -> int:
        """Forget abandoned uploads; how many."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + LITTER_INTERVAL_S
            service.remove_litter(self._settings, self._sessions)
        return uploads.purge(session, lambda upload_id: storage.remove_parts(self._settings, upload_id))
