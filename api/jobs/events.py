"""The routes of a job's story: what has happened, page by page."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from api.deps import SessionsDep
from api.errors import may
from api.jobs.endpoints import JobId, open_job
from api.jobs.schemas import EventOut, EventPage
from api.security import Reader
from api.store import events

router = APIRouter(prefix="/jobs/{job_id}/events", tags=["events"], responses=may(404))


@router.get("")
def list_events(
    job_id: JobId,
    _: Reader,
    sessions: SessionsDep,
    after: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 500,
) -> EventPage:
    """What has happened since event ``after``, oldest first."""
    with open_job(sessions, job_id) as (session, _job):
        found = events.read(session, job_id, after=after, limit=limit + 1)
    return EventPage(data=[EventOut.of(event) for event in found[:limit]], has_more=len(found) > limit)
