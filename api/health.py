"""Is the process up, and can it do its work? Both without a key: probes have none."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from kombu.exceptions import OperationalError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from api.deps import Context, ContextDep
from api.store.tables import Job

router = APIRouter(prefix="/healthz", tags=["health"])


@router.get("/live")
def live() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/ready")
def ready(context: ContextDep, response: Response) -> dict[str, Any]:
    """A real round trip to the database (503 if it fails). Without the broker all works, only slower: ``degraded``."""
    database, broker = _ask_database(context), _ask_broker(context)
    status = "failed" if database != "ok" else "ok" if broker == "ok" else "degraded"
    response.status_code = 503 if status == "failed" else 200
    return {"status": status, "database": database, "broker": broker}


def _ask_database(context: Context) -> str:
    try:
        with context.sessions.begin() as session:
            session.execute(select(Job.id).limit(1))
    except SQLAlchemyError:
        return "unreachable"
    return "ok"


def _ask_broker(context: Context) -> str:
    try:
        with context.celery.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=2)
    except (OperationalError, OSError):
        return "unreachable"
    return "ok"
