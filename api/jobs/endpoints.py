"""The routes of jobs. Plain functions: FastAPI runs them in its thread pool, so they may wait for the database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import FileResponse
from sqlalchemy.orm import Session

from api.deps import ContextDep, SessionsDep
from api.errors import Problem
from api.jobs import cursor as cursors
from api.jobs import service
from api.jobs.schemas import EventOut, EventPage, FileList, FileOut, JobCreate, JobOut, JobPage
from api.security import Reader, Writer
from api.store import events, jobs, manifest
from api.store.engine import Sessions
from api.store.states import State
from api.store.tables import Artifact, Job
from api.strict_json import StrictJsonRoute

POLL_AFTER_S = 2

router = APIRouter(prefix="/jobs", tags=["jobs"], route_class=StrictJsonRoute)

JobId = Annotated[str, Path(pattern="^job_[0-9a-f]{32}$")]
IfNoneMatch = Annotated[str | None, Header()]


@router.post("", status_code=202)
def submit(body: JobCreate, key: Writer, context: ContextDep, response: Response) -> JobOut:
    """Plan the job, and queue it if the plan stands: 202 means that it is safely in the database."""
    planned = service.make_plan(body, context.settings)
    with context.sessions.begin() as session:
        job = jobs.submit(
            session,
            submitted_by=key.id,
            name=body.name,
            labels=body.labels,
            model=planned.model,
            preset=planned.preset,
            config=planned.config.to_dict(),
            calibration=planned.calibration.model_dump(mode="json"),
            export=list(body.export),
        )
    context.upkeep.poke()  # after the commit: the message must not overtake the row
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    response.headers["Retry-After"] = str(POLL_AFTER_S)
    response.headers["ETag"] = _etag(job)
    return JobOut.of(job, None)


@router.get("")
def list_jobs(
    _: Reader,
    sessions: SessionsDep,
    request: Request,
    response: Response,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
    state: Annotated[list[State], Query()] = [],  # noqa: B006  FastAPI copies it
) -> JobPage:
    """Jobs, newest first."""
    after = cursors.decode(cursor, state) if cursor is not None else None
    with sessions.begin() as session:
        found = jobs.page(session, limit=limit + 1, states=state, after=after)
        shown = found[:limit]
        artifacts = jobs.find_artifacts(session, shown)
    next_cursor = cursors.encode(shown[-1], state) if len(found) > limit else None
    if next_cursor:
        following = request.url.include_query_params(cursor=next_cursor)
        response.headers["Link"] = f'<{following.path}?{following.query}>; rel="next"'
    data = [JobOut.of(job, artifacts.get(job.id)) for job in shown]
    return JobPage(data=data, has_more=next_cursor is not None, next_cursor=next_cursor)


@router.get("/{job_id}", response_model=JobOut)
def get(
    job_id: JobId, _: Reader, sessions: SessionsDep, response: Response, if_none_match: IfNoneMatch = None
) -> JobOut | Response:
    """One job. Poll it with If-None-Match: as long as nothing has changed the answer is an empty 304."""
    with _open(sessions, job_id) as (session, job):
        artifact = jobs.find_artifact(session, job)
    if _matches(if_none_match, _etag(job)):
        return Response(status_code=304, headers={"ETag": _etag(job)})
    response.headers["ETag"] = _etag(job)
    return JobOut.of(job, artifact)


@router.get("/{job_id}/events")
def list_events(
    job_id: JobId,
    _: Reader,
    sessions: SessionsDep,
    after: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 500,
) -> EventPage:
    """What has happened since event ``after``, oldest first."""
    with _open(sessions, job_id) as (session, _job):
        found = events.read(session, job_id, after=after, limit=limit + 1)
    return EventPage(data=[EventOut.of(event) for event in found[:limit]], has_more=len(found) > limit)


@router.post("/{job_id}/cancel", status_code=202)
def cancel(job_id: JobId, _: Writer, sessions: SessionsDep, response: Response) -> JobOut:
    """End the job: at once if it waits, as soon as its worker has ended the engine if it runs."""
    try:
        with sessions.begin() as session:
            job = jobs.request_cancel(session, job_id)
    except jobs.AlreadyFinal as error:
        raise Problem(409, "job_already_final", "The job has already ended.") from error
    if job is None:
        raise _no_such_job()
    response.headers["ETag"] = _etag(job)
    return JobOut.of(job, None)


@router.get("/{job_id}/artifacts")
def list_artifacts(job_id: JobId, _: Reader, sessions: SessionsDep) -> FileList:
    """The files of the result with their sizes and hashes."""
    artifact = _find_artifact(sessions, job_id)
    found = service.read_manifest(artifact)
    files = [FileOut(path=file.path, bytes=file.num_bytes, sha256=file.sha256) for file in found.files.values()]
    size = found.num_bytes - sum(file.bytes for file in files)
    return FileList(data=[*files, FileOut(path=manifest.MANIFEST, bytes=size, sha256=found.sha256)])


@router.get("/{job_id}/artifacts/{path:path}", response_class=FileResponse)
def download(job_id: JobId, path: str, _: Reader, sessions: SessionsDep, if_none_match: IfNoneMatch = None) -> Response:
    """One file, whole or in ranges. Its ETag is its SHA-256, and a file that no longer has that hash is not sent."""
    file_path, file = service.find_file(_find_artifact(sessions, job_id), path)
    headers = {"ETag": f'"{file.sha256}"', "Cache-Control": "private, max-age=31536000, immutable"}
    if _matches(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return FileResponse(file_path, headers=headers, media_type="application/octet-stream", filename=file_path.name)


@contextmanager
def _open(sessions: Sessions, job_id: str) -> Iterator[tuple[Session, Job]]:
    """A transaction and the job in it, or 404."""
    with sessions.begin() as session:
        job = jobs.find(session, job_id)
        if job is None:
            raise _no_such_job()
        yield session, job


def _find_artifact(sessions: Sessions, job_id: str) -> Artifact:
    with _open(sessions, job_id) as (session, job):
        artifact = jobs.find_artifact(session, job)
    if artifact is None:
        raise Problem(409, "not_ready", f"The job is {job.state}: only a succeeded job has artifacts.")
    return artifact


def _no_such_job() -> Problem:
    return Problem(404, "job_not_found", "There is no such job.")


def _etag(job: Job) -> str:
    return f'"{job.version}"'


def _matches(if_none_match: str | None, etag: str) -> bool:
    given = {tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")}
    return etag in given or "*" in given
