"""Keeps a lease alive: a thread sends heartbeats while the engine works, and writes are retried until they succeed.

If no heartbeat succeeds for long enough, the lease may run out and another worker may take the job. The engine is ended
*before* that moment (self-fencing), and nothing is written any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from api import json_log
from api.settings import Settings
from api.store.engine import Sessions, reason_of
from api.store.queue import leases
from api.store.queue.chat_leases import ChatLease
from api.store.queue.leases import Lease, LeaseLost, Order
from api.store.queue.node_slots import NodeSlotLease
from api.store.queue.publication_leases import PublicationLease

logger = logging.getLogger(__name__)

Renew = Callable[..., Order | None]
SAFETY_S = 20.0  # from our own end to the lease's
DATABASE_AWAY = (OperationalError, InterfaceError, PoolTimeoutError)


class HeldLease:
    """A lease that is renewed in the background; ``write`` runs one fenced transaction. Use it in a ``with`` block.

    ``claimed_at`` is the monotonic time *before* the claim was sent. ``on_order`` and ``on_lost`` are called from the
    background thread (``on_order`` perhaps many times).
    """

    def __init__(
        self,
        lease: Lease | PublicationLease | NodeSlotLease | ChatLease,
        sessions: Sessions,
        settings: Settings,
        *,
        claimed_at: float,
        renew: Renew = leases.renew,
        on_order: Callable[[Order], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.lease = lease
        self._sessions = sessions
        self._heartbeat_s = settings.heartbeat_s
        self._lease_s = settings.lease_s
        self._safe_s = settings.lease_s - min(SAFETY_S, settings.lease_s / 3)
        self._safe_until = claimed_at + self._safe_s
        self._renew = renew
        self._on_order = on_order
        self._on_lost = on_lost
        self._done = threading.Event()
        self._lost = threading.Event()
        self._losing = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=f"{name}-{lease.job_id}", daemon=True)
            for name, target in (("heartbeat", self._run), ("fence", self._watch))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def write(self, change: Callable[..., Any], **arguments: Any) -> None:
        """Run ``change(session, lease, **arguments)`` in a transaction, again and again while the database is away.

        Raises LeaseLost when the job is no longer ours.
        """
        while not self._lost.is_set():
            try:
                with self._sessions.begin() as session:
                    order = change(session, self.lease, **arguments)
            except DATABASE_AWAY as error:
                logger.warning(
                    "%s: the database is unavailable (%s), trying again", self.lease.job_id, reason_of(error)
                )
                self._lost.wait(min(self._heartbeat_s, 1.0))
            else:
                if order:
                    self._on_order(order)
                return
        raise LeaseLost

    def _run(self) -> None:
        json_log.job_id.set(self.lease.job_id)
        try:
            self._beat_until_done()
        except LeaseLost:
            logger.warning("%s: lease %d is lost, ending the engine", self.lease.job_id, self.lease.fence)
        except Exception:
            logger.exception("%s: the heartbeat failed, ending the engine", self.lease.job_id)
        if not self._done.is_set():
            self._lose()

    def _watch(self) -> None:
        """End the engine in time, even while the heartbeat itself is blocked."""
        json_log.job_id.set(self.lease.job_id)
        while not self._done.wait(max(0.0, self._safe_until - time.monotonic())):
            if time.monotonic() >= self._safe_until:
                logger.warning("%s: no heartbeat in time, ending the engine", self.lease.job_id)
                self._lose()
                return

    def _lose(self) -> None:
        with self._losing:
            if not self._lost.is_set():
                self._lost.set()
                self._on_lost()

    def _beat_until_done(self) -> None:
        pause_s = self._heartbeat_s
        while not self._done.wait(pause_s) and not self._lost.is_set():
            sent_at = time.monotonic()
            try:
                with self._sessions.begin() as session:
                    order = self._renew(session, self.lease, lease_s=self._lease_s)
            except SQLAlchemyError as error:
                logger.warning("%s: no heartbeat (%s)", self.lease.job_id, type(error).__name__)
                pause_s = min(self._heartbeat_s, 1.0)
                continue
            self._safe_until = sent_at + self._safe_s
            pause_s = self._heartbeat_s
            if order:
                self._on_order(order)
