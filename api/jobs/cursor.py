"""Encodes the opaque cursor of a list: the place where the last page ended, and the filter of the list."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from datetime import datetime

from api.http.errors import Problem
from api.store.queue.listing import JobFilter, Order


def encode(at: datetime, job_id: str, filtered: str) -> str:
    """Return the cursor after the row with this time and this id of a job; ``filtered`` is the filter's fingerprint."""
    place = [at.isoformat(), job_id, filtered]
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def decode(cursor: str | None, filtered: str, form: str = ".*") -> tuple[datetime, str] | None:
    """Return the time and the id of the last row seen; None without a cursor, before the first page.

    Raises Problem ``invalid_cursor``, also for another filter. ``form``: a regular expression that the id matches as a
    whole.
    """
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        at, job_id, fingerprint = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        place = datetime.fromisoformat(at), str(job_id)
        if fingerprint != filtered or place[0].tzinfo is None or not place[1].isascii() or "\0" in place[1]:
            raise ValueError
        if not re.fullmatch(form, place[1], re.DOTALL):
            raise ValueError
    except (binascii.Error, ValueError, TypeError, RecursionError) as error:
        raise Problem(
            422,
            "invalid_cursor",
            "The cursor is not one of ours, or belongs to another filter.",
            hint="Start over without it.",
        ) from error
    return place


def fingerprint_of(wanted: JobFilter, order: Order) -> str:
    """Return a list's fingerprint; the order of repeated parameters makes no difference."""
    parts = {**vars(wanted), "states": sorted(wanted.states), "labels": sorted(wanted.labels)}
    return fingerprint(order, *sorted(parts.items()))


def fingerprint(*parts: object) -> str:
    """Return the fingerprint of a list that depends on nothing but ``parts``."""
    return hashlib.sha256(repr([*parts]).encode()).hexdigest()[:16]
