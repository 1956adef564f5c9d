"""The thread that keeps the queue moving, in every API and worker process.

It sends waiting messages, takes back expired leases, fails jobs that waited too long and deletes rows that are over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from api.store.accounts import idempotency, webhooks
from api.store.engine import Sessions, reason_of
from api.store.queue import chat_leases, leases, outbox, publication_leases, workers

logger = logging.getLogger(__name__)

RELAY_BATCH = 100
REAP_BATCH = 100

RELAY_DELAY_S = 0.05
"""Messages that are submitted within this time are sent to the workers together."""

Task = Callable[[Session], int]


class Upkeep:
    """A background thread that runs all tasks every ``interval_s`` seconds.

    ``relay_now`` makes it send the messages of the outbox at once.

    ``extra_task`` runs in every round too. A task returns how many things it did, and 0 when nothing is left.
    """

    def __init__(
        self, sessions: Sessions, send: outbox.Send, *, interval_s: float, extra_task: Task | None = None
    ) -> None:
        self._relay: Task = lambda session: outbox.relay(session, send, limit=RELAY_BATCH)
        self._tasks: list[Task] = [
            *([extra_task] if extra_task else []),
            lambda session: leases.reap(session, limit=REAP_BATCH),
            lambda session: publication_leases.reap(session, limit=REAP_BATCH),
            lambda session: chat_leases.reap(session, limit=REAP_BATCH),
            self._relay,  # after what writes messages
            leases.expire_pending,
            workers.purge,
            idempotency.purge,
            webhooks.purge,
        ]
        self._sessions = sessions
        self._interval_s = interval_s
        self._next_round = 0.0
        self._woken = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._woken.set()
        self._thread.join(timeout=10)

    def relay_now(self) -> None:
        """Send the messages of the outbox: something was just submitted."""
        self._woken.set()

    def round_now(self) -> None:
        """Do all the tasks now."""
        self._next_round = 0.0
        self._woken.set()

    def _run(self) -> None:
        while not self._stopping:
            self._woken.clear()
            if time.monotonic() < self._next_round:
                self._round(self._relay)
            else:
                self._next_round = time.monotonic() + self._interval_s
                for task in self._tasks:
                    self._round(task)
            time.sleep(RELAY_DELAY_S)
            self._woken.wait(max(0.0, self._next_round - time.monotonic()))

    def _round(self, task: Task) -> None:
        """Run a task until it has nothing left. A database that is away is normal here: the next round is soon."""
        try:
            num_done = 1
            while num_done and not self._stopping:
                with self._sessions.begin() as session:
                    num_done = task(session)
        except SQLAlchemyError as error:
            logger.warning("upkeep: the database is away (%s)", reason_of(error))
        except Exception:
            logger.exception("upkeep: a round failed")
