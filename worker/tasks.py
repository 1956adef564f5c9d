"""The worker's only Celery task. It has no payload and ends at once: the supervisor's own threads do the work."""

from __future__ import annotations

from typing import Any

from api.store.queue.outbox import WAKE
from worker.app import app, supervisor


@app.task(name=WAKE)  # type: ignore[untyped-decorator]
def wake(payload: dict[str, Any]) -> None:
    supervisor.look_now()
