"""Is the process up, and can it do its work? Both without a key: probes have none."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from kombu.exceptions import OperationalError
from sqlalchemy.exc import SQLAlchemyError

from api import disk
from api.deps import Context, ContextDep
from api.store import migrate

router = APIRouter(prefix="/healthz", tags=["health"])


@router.get("/live")
def live() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/ready")
def ready(context: ContextDep, response: Response) -> dict[str, Any]:
    """A real round trip to the database (503 if it fails, or if its schema is older than this code). Without the broker
    all works, only slower, and without room on the disk nothing new is taken in: ``degraded``."""
    schema, broker = _ask_database(context), _ask_broker(context)
    fault = disk.look(context.settings).fault()
    failed = schema in (None, "older")
    status = "failed" if failed else "ok" if broker == "ok" and fault is None else "degraded"
    response.status_code = 503 if failed else 200
    found = {"database": "ok" if schema else "unreachable", "broker": broker, "schema": schema}
    return {"status": status, **found, "disk": fault or "ok"}


def _ask_database(context: Context) -> str | None:
    """How its schema compares with this code's: ``current``, ``older`` or ``newer`` (a rolling deploy); None without an
    answer."""
    try:
        with context.sessions.begin() as session:
            revision = migrate.current(session)
    except SQLAlchemyError:
        return None
    if revision == migrate.newest():
        return "current"
    return "older" if revision is None or revision in migrate.revisions() else "newer"


def _ask_broker(context: Context) -> str:
    try:
        with context.celery.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=2)
    except (OperationalError, OSError):
        return "unreachable"
    return "ok"
