"""The health routes: is the process up, and can it do its work? Both need no key: probes have none.

Neither takes anything that requests use: ``Readiness`` has a thread and a connection of its own, and all who ask at the
same time get one answer.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from celery import Celery
from fastapi import APIRouter, Request, Response
from kombu.exceptions import OperationalError
from sqlalchemy.exc import SQLAlchemyError

from api import disk
from api.store import migrate
from api.store.engine import Sessions, dispose
from api.store.queue import integrity

router = APIRouter(prefix="/healthz", tags=["health"])

Findings = dict[str, int] | None


class Readiness:
    """Asks the database and the broker."""

    def __init__(self, sessions: Sessions, celery: Celery) -> None:
        self._sessions = sessions
        self._celery = celery
        self._thread = ThreadPoolExecutor(1, "readiness")
        self._under_way: Future[tuple[tuple[str | None, Findings], str]] | None = None

    async def ask(self) -> tuple[tuple[str | None, Findings], str]:
        """Return ((schema, findings), broker): the state of the database and of the broker.

        ``schema`` compares the database's schema with this code's: ``current``, ``older``, or ``newer`` (a rolling
        deploy); None without an answer. ``findings``: the number of damaged files of each kind. ``broker``: ``ok`` or
        ``unreachable``.
        """
        if self._under_way is None or self._under_way.done():
            self._under_way = self._thread.submit(lambda: (self._ask_database(), self._ask_broker()))
        return await asyncio.shield(asyncio.wrap_future(self._under_way))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        dispose(self._sessions)

    def _ask_database(self) -> tuple[str | None, Findings]:
        try:
            with self._sessions.begin() as session:
                revision = migrate.current(session)
                if revision != migrate.newest() and (revision is None or revision in migrate.revisions()):
                    return "older", None
                return "current" if revision == migrate.newest() else "newer", integrity.count(session)
        except SQLAlchemyError:
            return None, None

    def _ask_broker(self) -> str:
        try:
            with self._celery.connection_for_write() as connection:
                connection.ensure_connection(max_retries=1, interval_start=0, timeout=2)
        except (OperationalError, OSError):
            return "unreachable"
        return "ok"


@router.get("/live")
async def get_liveness() -> dict[str, str]:
    """Report that the process is up."""
    return {"status": "ok"}


@router.get("/ready")
async def get_readiness(request: Request, response: Response) -> dict[str, Any]:
    """Check the service: the database (a real round trip), the broker, the disk.

    503 if the database fails, or if its schema is older than this code. ``degraded`` without the broker (all works,
    only slower), or without room on the disk (nothing new is taken in). ``integrity`` counts the faults of stored
    files.
    """
    readiness: Readiness = request.app.state.readiness
    (schema, findings), broker = await readiness.ask()
    fault = disk.look(request.app.state.context.settings).fault()
    failed = schema in (None, "older")
    status = "failed" if failed else "ok" if broker == "ok" and fault is None else "degraded"
    response.status_code = 503 if failed else 200
    backends = {"database": "ok" if schema else "unreachable", "broker": broker, "schema": schema}
    return {"status": status, **backends, "disk": fault or "ok", "integrity": findings}
