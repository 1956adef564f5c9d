"""The filter of a list of jobs, and the query that it becomes."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict


class JobFilter(TypedDict, total=False):
    """A filter of jobs. A job must fit every field that is given.

    It is in one of the `states`, has all of the `labels`, is of the `model` (a path or a Hub id), has `text` in its
    name, id, model or preset, was created between two times (RFC 3339), and belongs to the `sweep`.
    """

    states: Sequence[str]
    labels: Mapping[str, str] | None
    model: str | None
    text: str | None
    created_after: datetime | str | None
    created_before: datetime | str | None
    sweep: str | None


def query_of(wanted: JobFilter) -> dict[str, Any]:
    """Return the query of a filter, which lists and counts share."""
    times = {name: wanted.get(name) for name in ("created_after", "created_before")}
    query: dict[str, Any] = {
        "state": [*wanted.get("states", ())],
        "label": [f"{name}={value}" for name, value in (wanted.get("labels") or {}).items()],
        "model": wanted.get("model"),
        "q": wanted.get("text"),
        "sweep": wanted.get("sweep"),
        **{name: at.isoformat() if isinstance(at, datetime) else at for name, at in times.items()},
    }
    return {name: value for name, value in query.items() if value}
