"""Is the process up, and can it do its work? Both without a key: probes have none."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import APIRouter, Response
from kombu.exceptions import OperationalError
from sqlalchemy.exc import SQLAlchemyError

from api.deps import Context, ContextDep
from api.store import integrity, migrate

_threads = ThreadPoolExecutor(2, "health")  # of its own: requests may hold all the others

router = APIRouter(prefix="/healthz", tags=["health"])


@router.get("/live")
async def live() -> dict[str, str]:
    """The process answers. It waits for no thread: requests may hold them all."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(context: ContextDep, response: Response) -> dict[str, Any]:
    """A real round trip to the database (503 if it fails, or if its schema is older than this code). Without the broker
    all works, only slower: ``degraded``. ``integrity`` counts what is wrong with stored files."""
    loop = asyncio.get_running_loop()
    schema, findings = await loop.run_in_executor(_threads, _ask_database, context)
    broker = await loop.run_in_executor(_threads, _ask_broker, context)
    failed = schema in (None, "older")
    status = "failed" if failed else "ok" if broker == "ok" else "degraded"
    response.status_code = 503 if failed else 200
    database = "ok" if schema else "unreachable"
    return {"status": status, "database": database, "broker": broker, "schema": schema, "integrity": findings}


def _ask_database(context: Context) -> tuple[str | None, dict[str, int] | None]:
    """How its schema compares with this code's: ``current``, ``older`` or ``newer`` (a rolling deploy); None without an
    answer. And how many findings of integrity there are, of each kind."""
    try:
        with context.sessions.begin() as session:
            revision = migrate.current(session)
            if revision != migrate.newest() and (revision is None or revision in migrate.revisions()):
                return "older", None
            return "current" if revision == migrate.newest() else "newer", integrity.count(session)
    except SQLAlchemyError:
        return None, None


def _ask_broker(context: Context) -> str:
    try:
        with context.celery.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=2)
    except (OperationalError, OSError):
        return "unreachable"
    return "ok"
