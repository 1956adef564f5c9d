"""Checks the stored files while the service runs, at a low pace: each artifact and dataset once a week."""

from __future__ import annotations

import logging
import threading

from sqlalchemy.exc import SQLAlchemyError

from api.integrity import check
from api.settings import Settings
from api.store.engine import Sessions, reason_of
from api.store.queue import integrity
from api.store.queue.hourly import Hourly

logger = logging.getLogger(__name__)

BYTES_PER_S = 20 << 20  # a disk has other things to do
IDLE_S = 60.0


class _Stopped(Exception):
    pass


class Watch:
    """A background thread of the API process that checks stored files."""

    def __init__(self, settings: Settings, sessions: Sessions) -> None:
        self._settings = settings
        self._sessions = sessions
        self._survey = Hourly()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="integrity", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=10)

    def step(self) -> bool:
        """Check the next artifact or dataset that is due, return False if none is. Once an hour also run the survey."""
        if self._survey.is_due():
            findings = check.survey(self._settings, self._sessions)
            with self._sessions.begin() as session:
                integrity.record_survey(session, findings)
        with self._sessions.begin() as session:
            thing = integrity.claim_due(session)
        if thing is None:
            return False
        findings = check.check(thing, self._settings, self._wait)
        with self._sessions.begin() as session:
            noted = integrity.record_check(session, thing, findings)
        for finding in noted:
            logger.error("%s is %s: %s", finding.path, finding.kind, finding.detail)
        return True

    def _run(self) -> None:
        while not self._stopping.is_set():
            did = False
            try:
                did = self.step()
            except _Stopped:
                return
            except SQLAlchemyError as error:
                logger.warning("integrity: the database is unavailable (%s)", reason_of(error))
            except Exception:
                logger.exception("integrity: a check failed")
            if not did:
                self._stopping.wait(IDLE_S)

    def _wait(self, num_bytes: int) -> None:
        if self._stopping.wait(num_bytes / BYTES_PER_S):
            raise _Stopped
