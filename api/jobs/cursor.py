"""An opaque place in a list: where the last page ended, and the filter it belongs to."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Collection
from datetime import datetime

from api.errors import Problem
from api.store.states import State
from api.store.tables import Job


def encode(last: Job, states: Collection[State]) -> str:
    place = [last.created_at.isoformat(), last.id, sorted(states)]
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def decode(cursor: str, states: Collection[State]) -> tuple[datetime, str]:
    """(created_at, id) of the last job seen. Raises Problem ``invalid_cursor``, also for another filter's cursor."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        created_at, job_id, filtered = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        place = datetime.fromisoformat(created_at), str(job_id)
        if filtered != sorted(states) or place[0].tzinfo is None or not place[1].isascii() or "\0" in place[1]:
            raise ValueError
    except (binascii.Error, ValueError, TypeError, RecursionError) as error:
        raise Problem(
            422,
            "invalid_cursor",
            "The cursor is not one of ours, or belongs to another filter.",
            hint="Start over without it.",
        ) from error
    return place
