"""What keeps the queue moving, in every API and worker process: send waiting messages, take back expired leases."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from api.store import leases, outbox
from api.store.engine import Sessions

logger = logging.getLogger(__name__)

RELAY_BATCH = 100
REAP_BATCH = 100


class Upkeep:
    """A background thread that does the rounds every ``interval_s`` seconds, and at once when poked."""

    def __init__(self, sessions: Sessions, send: outbox.Send, *, interval_s: float) -> None:
        self._sessions = sessions
        self._send = send
        self._interval_s = interval_s
        self._poked = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._poked.set()
        self._thread.join(timeout=10)

    def poke(self) -> None:
        """Do a round now: something was just submitted."""
        self._poked.set()

    def _run(self) -> None:
        while not self._stopping:
            self._poked.clear()
            self._round(self._reap)
            self._round(self._relay)
            self._poked.wait(self._interval_s)

    def _round(self, task: Callable[[], int]) -> None:
        """One task until it has nothing left. A database that is away is normal here: the next round is soon."""
        try:
            while task() and not self._stopping:
                pass
        except SQLAlchemyError as error:
            logger.warning("upkeep: the database is away (%s)", type(error).__name__)
        except Exception:
            logger.exception("upkeep: a round failed")

    def _reap(self) -> int:
        with self._sessions.begin() as session:
            return leases.reap(session, limit=REAP_BATCH)

    def _relay(self) -> int:
        with self._sessions.begin() as session:
            return outbox.relay(session, self._send, limit=RELAY_BATCH)
