"""The routes of a job's log: the output of its engines, from the store and not from a worker's disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import StreamingResponse

from api.http.deps import ContextDep, SessionsDep
from api.http.errors import Problem, may
from api.http.security import Reader
from api.jobs import stream
from api.jobs.endpoints import JobId, open_job
from api.jobs.event_log import LogLineOut, LogPage
from api.jobs.events import FromWhere, stream_of, streaming
from api.jobs.stream import Start
from api.store.engine import Sessions
from api.store.queue import logs

router = APIRouter(prefix="/jobs/{job_id}/logs", tags=["logs"], responses=may(404))

PAGE = 1000
STREAM_EXAMPLE = 'id: 7\nevent: line\ndata: {"seq": 7, "at": "...", "attempt": 1, "level": "info", "text": "..."}\n\n'

Level = Annotated[Literal["debug", "info", "warning", "error"], Query(description="Lines of at least this level.")]


@router.get("", responses=may(422))
def list_log_lines(
    job_id: JobId,
    caller: Reader,
    sessions: SessionsDep,
    level: Level = "debug",
    tail: Annotated[int | None, Query(ge=1, le=PAGE, description="The last so many lines.")] = None,
    after: Annotated[int | None, Query(ge=0, le=2**63 - 1, description="Only lines with a larger `seq`.")] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = PAGE,
) -> LogPage:
    """List the log, oldest line first: its end with ``tail``, else page by page with ``after``."""
    if tail is not None and after is not None:
        raise Problem(422, "invalid_request", "`tail` and `after` cannot be combined: give one of them.")
    with open_job(sessions, caller, job_id) as (session, _job):
        if tail is not None:
            lines, has_more = logs.read_tail(session, job_id, level=level, num_lines=tail), False
        else:
            lines = logs.read(session, job_id, level=level, after=after or 0, limit=limit + 1)
            lines, has_more = lines[:limit], len(lines) > limit
    return LogPage(data=[LogLineOut.of(line) for line in lines], has_more=has_more)


def find_start(
    job_id: JobId, caller: Reader, context: ContextDep, after: FromWhere, level: Level = "debug"
) -> Start | None:
    """Return the start of the stream as that of the events does."""
    with open_job(context.sessions, caller, job_id):
        pass
    return stream.find_log_start(context.feed, context.sessions, job_id, after, caller, level)


@router.get("/stream", response_class=StreamingResponse, responses=streaming("Lines", STREAM_EXAMPLE))
async def stream_log_lines(
    job_id: JobId, context: ContextDep, start: Annotated[Start | None, Depends(find_start)], level: Level = "debug"
) -> Response:
    """Stream the log as server-sent events: the lines since ``Last-Event-ID`` (or ``after``), then each as it comes."""
    if start is None:
        return Response(status_code=204)
    return stream_of(stream.tell_log(context.feed, context.sessions, job_id, start, level))


@router.get(
    "/download",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def download_log(job_id: JobId, caller: Reader, sessions: SessionsDep, level: Level = "debug") -> StreamingResponse:
    """Send the whole log as a text file."""
    with open_job(sessions, caller, job_id):
        pass
    headers = {"Content-Disposition": f'attachment; filename="{job_id}.log"'}
    return StreamingResponse(_text(sessions, job_id, level), media_type="text/plain", headers=headers)


def _text(sessions: Sessions, job_id: str, level: str) -> Iterator[str]:
    """Yield the log page by page, each in its own short transaction: a slow reader holds no connection."""
    after = 0
    while True:
        with sessions.begin() as session:
            lines = logs.read(session, job_id, level=level, after=after, limit=PAGE)
        if not lines:
            return
        after = lines[-1].seq
        yield "".join(f"{line.at.isoformat()} attempt {line.attempt} {line.level} {line.text}\n" for line in lines)
