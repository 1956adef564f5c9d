"""The threads that keep the queue moving, in every API and worker process.

They send waiting messages, take back expired leases, fail jobs that waited too long and delete rows that are over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from api.store.accounts import idempotency, webhooks
from api.store.engine import Sessions, reason_of
from api.store.queue import chat_leases, clock, leases, outbox, publication_leases, workers

logger = logging.getLogger(__name__)

RELAY_BATCH = 100
REAP_BATCH = 100

RELAY_DELAY_S = 0.05
"""Between two rounds: messages that are submitted within this time are sent to the workers together."""

Task = Callable[[Session], int]


class Maintenance:
    """Two background threads: one runs all tasks every ``interval_s`` seconds, the other sends the outbox's messages.

    The tasks never wait for the broker. ``relay_now`` sends messages at once. ``extra_task`` runs in every round too. A
    task returns how many things it did, and 0 when nothing is left.
    """

    def __init__(
        self,
        sessions: Sessions,
        send: outbox.Send,
        *,
        interval_s: float,
        lease_s: float,
        extra_task: Task | None = None,
    ) -> None:
        tasks: list[Task] = [
            *([extra_task] if extra_task else []),
            lambda session: clock.shorten_leases(session, lease_s=lease_s),
            lambda session: leases.reap(session, limit=REAP_BATCH),
            lambda session: publication_leases.reap(session, limit=REAP_BATCH),
            lambda session: chat_leases.reap(session, limit=REAP_BATCH),
            leases.expire_pending,
            workers.purge,
            idempotency.purge,
            webhooks.purge,
        ]
        self._relay = _Rounds(
            "relay", [lambda session: outbox.relay(session, send, limit=RELAY_BATCH)], sessions, interval_s
        )
        self._rounds = _Rounds("upkeep", tasks, sessions, interval_s, then=self.relay_now)

    def start(self) -> None:
        self._rounds.start()
        self._relay.start()

    def stop(self) -> None:
        self._rounds.stop()
        self._relay.stop()

    def relay_now(self) -> None:
        """Send the messages of the outbox: something was just submitted."""
        self._relay.now()

    def round_now(self) -> None:
        """Do all the tasks now."""
        self._rounds.now()


class _Rounds:
    """A thread that runs ``tasks`` every ``interval_s`` seconds and when it is woken, and then calls ``then``."""

    def __init__(
        self,
        name: str,
        tasks: Sequence[Task],
        sessions: Sessions,
        interval_s: float,
        *,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._tasks = tasks
        self._sessions = sessions
        self._interval_s = interval_s
        self._then = then
        self._woken = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._woken.set()
        self._thread.join(timeout=10)

    def now(self) -> None:
        self._woken.set()

    def _run(self) -> None:
        while not self._stopping:
            self._woken.clear()
            next_at = time.monotonic() + self._interval_s
            for task in self._tasks:
                self._round(task)
            self._then()
            time.sleep(RELAY_DELAY_S)
            self._woken.wait(max(0.0, next_at - time.monotonic()))

    def _round(self, task: Task) -> None:
        """Run a task until it has nothing left. A database that is away is normal here: the next round is soon."""
        try:
            num_done = 1
            while num_done and not self._stopping:
                with self._sessions.begin() as session:
                    num_done = task(session)
        except SQLAlchemyError as error:
            logger.warning("upkeep: the database is unavailable (%s)", reason_of(error))
        except Exception:
            logger.exception("upkeep: a round failed")
