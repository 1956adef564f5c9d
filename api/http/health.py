"""The health routes: is the process up, and can it do its work? Both need no key: probes have none.

Neither takes anything that requests use: ``Readiness`` has a thread and a connection of its own, and all who ask at the
same time get one answer.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import redis
from celery import Celery
from fastapi import APIRouter, Request, Response
from kombu.exceptions import OperationalError
from sqlalchemy import text
from sqlalchemy.exc import OperationalError as DatabaseError
from sqlalchemy.exc import SQLAlchemyError

from api import confinement, disk
from api.store import broker, migrate
from api.store.engine import DatabaseReadOnly, Sessions, dispose
from api.store.queue import integrity, workers
from quantcore.config.time_limits import BROKER_S

router = APIRouter(prefix="/healthz", tags=["health"])

READY_KEY = "bitfoundry:ready"
READY_KEY_S = 60
WRITE_EVERY_S = 1.0
WRITES = ("TRUNCATE write_probe", "INSERT INTO write_probe VALUES ('ready')")
"""They need a new file and a page in it, and leave nothing behind when they are taken back."""
Findings = dict[str, int] | None


@dataclass(frozen=True)
class State:
    """The state of what jobs need. ``database``: ``ok``, ``unreachable``, ``read_only`` or ``full``; ``broker``:
    ``ok``, ``unreachable`` or ``takes_no_messages``.

    ``schema`` compares the database's schema with this code's: ``current``, ``older``, or ``newer`` (a rolling deploy);
    None without an answer. ``findings``: the number of damaged files of each kind. ``memory_limits``: what limits the
    memory of engines on the live workers.
    """

    database: str
    broker: str
    schema: str | None = None
    findings: Findings = None
    memory_limits: tuple[str, ...] = ()


class Readiness:
    """Asks the database and the broker whether a job could be taken in and started now."""

    def __init__(self, sessions: Sessions, celery: Celery) -> None:
        self._sessions = sessions
        self._celery = celery
        self._broker = broker.connect(celery.conf.broker_url, BROKER_S)
        self._thread = ThreadPoolExecutor(1, "readiness")
        self._under_way: Future[State] | None = None
        self._wrote_at = float("-inf")

    async def ask(self) -> State:
        if self._under_way is None or self._under_way.done():
            self._under_way = self._thread.submit(lambda: replace(self._ask_database(), broker=self._ask_broker()))
        return await asyncio.shield(asyncio.wrap_future(self._under_way))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        dispose(self._sessions)
        if self._broker is not None:
            self._broker.close()

    def _ask_database(self) -> State:
        try:
            with self._sessions.begin() as session:
                revision = migrate.current(session)
                if revision != migrate.newest() and (revision is None or revision in migrate.revisions()):
                    return State("ok", "", "older")
                schema = "current" if revision == migrate.newest() else "newer"
                findings = integrity.count(session)
                limits = sorted({worker.memory_limit for worker in workers.find_live(session)})
            self._write()
            return State("ok", "", schema, findings, tuple(limits))
        except DatabaseReadOnly:
            return State("read_only", "")
        except DatabaseError as error:
            return State("full" if isinstance(error.orig, psycopg.errors.DiskFull) else "unreachable", "")
        except SQLAlchemyError:
            return State("unreachable", "")

    def _write(self) -> None:
        """Write to the database and take it back, at most once in ``WRITE_EVERY_S``: anyone may ask for readiness."""
        if time.monotonic() < self._wrote_at + WRITE_EVERY_S:
            return
        with self._sessions() as session:  # without a commit
            for statement in WRITES:
                session.execute(text(statement))
        self._wrote_at = time.monotonic()

    def _ask_broker(self) -> str:
        try:
            if self._broker is not None:
                self._broker.set(READY_KEY, 1, ex=READY_KEY_S)
            else:
                with self._celery.connection_for_write() as connection:
                    connection.ensure_connection(max_retries=1, interval_start=0, timeout=BROKER_S)
        except (redis.ConnectionError, redis.TimeoutError, OperationalError, OSError):
            return "unreachable"
        except redis.RedisError:  # a replica, or one without memory or disk
            return "takes_no_messages"
        return "ok"


@router.get("/live")
async def get_liveness() -> dict[str, str]:
    """Report that the process is up."""
    return {"status": "ok"}


@router.get("/ready")
async def get_readiness(request: Request, response: Response) -> dict[str, Any]:
    """Check whether a job could be taken in and started now: the database, the broker, the disk. Each is written to.

    503 if the database fails, is read-only or has a full disk, or if its schema is older than this code. ``degraded``
    if the broker takes no messages (all works, only slower), or without room on the disk (nothing new is taken in).
    ``sandbox`` is the protection of the API's processes that read models: ``landlock`` and its version, ``none`` or
    ``off``. ``memory_limits`` is what limits the memory of engines on the live workers: ``cgroup`` (the kernel),
    ``watched`` (the worker), or both. ``integrity`` counts the faults of stored files.
    """
    readiness: Readiness = request.app.state.readiness
    state = await readiness.ask()
    fault = disk.look(request.app.state.context.settings).fault()
    failed = state.database != "ok" or state.schema in (None, "older")
    status = "failed" if failed else "ok" if state.broker == "ok" and fault is None else "degraded"
    response.status_code = 503 if failed else 200
    backends = {"database": state.database, "broker": state.broker, "schema": state.schema}
    settings = request.app.state.context.settings
    limits = {"sandbox": confinement.describe(settings), "memory_limits": state.memory_limits}
    return {"status": status, **backends, "disk": fault or "ok", **limits, "integrity": state.findings}
