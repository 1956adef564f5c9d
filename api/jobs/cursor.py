"""Encodes the opaque cursor of a list: the place where the last page ended, and its filter."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from datetime import datetime

from api.http.errors import Problem
from api.store.queue.listing import JobFilter
from api.store.tables.jobs import Job


def encode(last: Job, wanted: JobFilter) -> str:
    place = [last.created_at.isoformat(), last.id, _name(wanted)]
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def decode(cursor: str, wanted: JobFilter) -> tuple[datetime, str]:
    """Return (created_at, id) of the last job seen. Raises Problem ``invalid_cursor``, also for another filter."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        created_at, job_id, filtered = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        place = datetime.fromisoformat(created_at), str(job_id)
        if filtered != _name(wanted) or place[0].tzinfo is None or not place[1].isascii() or "\0" in place[1]:
            raise ValueError
    except (binascii.Error, ValueError, TypeError, RecursionError) as error:
        raise Problem(
            422,
            "invalid_cursor",
            "The cursor is not one of ours, or belongs to another filter.",
            hint="Start over without it.",
        ) from error
    return place


def _name(wanted: JobFilter) -> str:
    """Return a filter's fingerprint; the order of repeated parameters makes no difference."""
    parts = {**vars(wanted), "states": sorted(wanted.states), "labels": sorted(wanted.labels)}
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:16]
