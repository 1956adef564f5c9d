"""The routes of a job's event log, in pages or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.responses import StreamingResponse

from api.http.deps import ContextDep, SessionsDep
from api.http.errors import Problem, may
from api.http.security import Reader
from api.jobs import stream
from api.jobs.endpoints import JobId, open_job
from api.jobs.event_log import EventOut, EventPage
from api.jobs.schemas import Printable
from api.jobs.stream import Start
from api.store.queue import events

router = APIRouter(prefix="/jobs/{job_id}/events", tags=["events"], responses=may(404))

After = Annotated[int, Query(ge=0, le=2**63 - 1, description="Only events with a larger `seq`.")]
Kind = Annotated[Printable, Query(max_length=64)]
STREAM_EXAMPLE = 'id: 7\nevent: progress\ndata: {"seq": 7, "at": "...", "kind": "progress", "data": {"done": 3}}\n\n'


@router.get("")
def list_events(
    job_id: JobId,
    caller: Reader,
    sessions: SessionsDep,
    after: After = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 500,
    kind: Annotated[list[Kind], Query(description="Only events of this kind; repeatable.")] = [],  # noqa: B006
) -> EventPage:
    """List the events after ``after``, oldest first. ``kind=layer_quantized`` gives the numbers of every layer."""
    with open_job(sessions, caller, job_id) as (session, _job):
        rows = events.read(session, job_id, after=after, limit=limit + 1, kinds=kind)
    return EventPage(data=[EventOut.of(event) for event in rows[:limit]], has_more=len(rows) > limit)


def find_after(after: After = 0, last_event_id: Annotated[str | None, Header()] = None) -> int:
    """Return the number after which a stream starts: the header is newer than the query, which stays in the address."""
    if last_event_id is None:
        return after
    if not (last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) < 19):
        raise Problem(
            400,
            "invalid_last_event_id",
            "Last-Event-ID is not the number of an event.",
            hint="Send the `id` of the last event you have seen, or leave the header out.",
        )
    return int(last_event_id)


FromWhere = Annotated[int, Depends(find_after)]


def find_start(job_id: JobId, caller: Reader, context: ContextDep, after: FromWhere) -> Start | None:
    """Return the start of the stream, None if there is nothing to come.

    All errors belong here: once the stream has begun its status is sent.
    """
    with open_job(context.sessions, caller, job_id):
        pass
    return stream.find_start(context.feed, context.sessions, job_id, after, caller)


def streaming(what: str, example: str) -> dict[int | str, dict[str, Any]]:
    """Return for OpenAPI the responses of a stream of ``what``."""
    return may(400) | {
        200: {
            "description": f"{what} as they come; `id` is `seq`; the last one is `end`.",
            "content": {"text/event-stream": {"schema": {"type": "string"}, "example": example}},
        },
        204: {"description": "The job has ended and there is nothing that you have not seen: do not come again."},
    }


def stream_of(told: AsyncIterator[str]) -> StreamingResponse:
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(told, media_type="text/event-stream", headers=headers)


@router.get("/stream", response_class=StreamingResponse, responses=streaming("Events", STREAM_EXAMPLE))
async def stream_events(
    job_id: JobId, context: ContextDep, start: Annotated[Start | None, Depends(find_start)]
) -> Response:
    """Stream events as server-sent events: those since ``Last-Event-ID`` (or ``after``), then new ones as they come."""
    if start is None:
        return Response(status_code=204)
    return stream_of(stream.tell_events(context.feed, context.sessions, job_id, start))
