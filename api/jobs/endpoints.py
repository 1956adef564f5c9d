"""The routes of jobs. Plain functions: FastAPI runs them in its thread pool, so they may wait for the database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Response
from fastapi.responses import JSONResponse
from sqlalchemy.orm import Session

from api.http.conditional import UNCHANGED, IfNoneMatch, PagesDep, matches
from api.http.deps import Context, ContextDep, SessionsDep
from api.http.disk_space import ROOM, check_room
from api.http.errors import Problem, may
from api.http.idempotent import IdempotencyKey, MadeOnce
from api.http.security import Reader, Writer
from api.http.strict_json import StrictJsonRoute
from api.jobs import cursor as cursors
from api.jobs import service, submission, view
from api.jobs.groups import MAX_GROUPS, GroupOut, Groups, GroupsQuery, LabelNameOut, LabelNames
from api.jobs.models import TURN
from api.jobs.retention_task import remove_artifacts
from api.jobs.schemas import (
    JobClone,
    JobCreate,
    JobListQuery,
    JobOut,
    JobPage,
    JobPatch,
    JobQuery,
    SummaryOut,
)
from api.store.accounts import audit, registry
from api.store.accounts.audit import Caller
from api.store.engine import Sessions, reading
from api.store.queue import jobs, listing
from api.store.tables.jobs import Job

POLL_AFTER_S = 2

router = APIRouter(prefix="/jobs", tags=["jobs"], route_class=StrictJsonRoute)

JobId = Annotated[str, Path(pattern="^job_[0-9a-f]{32}$")]
IfMatch = Annotated[str | None, Header(description="The ETag of the job that the change is based on, or `*`.")]
Responses = dict[int | str, dict[str, Any]]
PLANNED: Responses = {200: {"description": "With `dry_run`: the plan, as `POST /v1/plans` gives it"}}


@router.post("", status_code=202, response_model=JobOut, responses=PLANNED | may(410, 422, 507), dependencies=[TURN])
def submit_job(
    body: JobCreate,
    caller: Writer,
    context: ContextDep,
    response: Response,
    dry_run: Annotated[bool, Query(description="Plan only: check everything, store nothing.")] = False,
    idempotency_key: IdempotencyKey = None,
) -> JobOut | Response:
    """Plan the job, and queue it if the plan is valid: 202 means that it is safely in the database."""
    if dry_run:
        return JSONResponse(service.show(service.make_job(body, context, caller), context, caller))
    check_room(context)
    return _answer_made(submission.submit(body, caller, context, idempotency_key), context, response)


@router.get("", response_model=JobPage, responses=UNCHANGED | may(422))
def list_jobs(
    query: Annotated[JobListQuery, Query()],
    caller: Reader,
    sessions: SessionsDep,
    pages: PagesDep,
) -> JobPage | Response:
    """List the jobs, newest first or in another ``order``; the Link header leads to the next page."""
    wanted, order = query.to_filter(caller.project_id), query.order
    filtered = cursors.fingerprint_of(wanted, order)
    after = cursors.decode(query.cursor, filtered, listing.PLACES[order])
    with reading(sessions) as session:
        rows = listing.page(session, wanted, limit=query.limit + 1, after=after, order=order)
        shown = view.show_all(session, rows[: query.limit])
    last = rows[query.limit - 1] if len(rows) > query.limit else None
    next_cursor = cursors.encode(*listing.place_of(last, order), filtered) if last else None
    page = JobPage(data=[job.out for job in shown], has_more=next_cursor is not None, next_cursor=next_cursor)
    return pages.answer(page, next_cursor)


@router.get("/summary", responses=may(422))
def summarize_jobs(query: Annotated[JobQuery, Query()], caller: Reader, sessions: SessionsDep) -> SummaryOut:
    """Count the jobs in each state, with the filters of the list."""
    with reading(sessions) as session:
        counts = listing.count_by_state(session, query.to_filter(caller.project_id))
    return SummaryOut(total=sum(counts.values()), by_state=counts)


@router.get("/labels", responses=may(422))
def list_label_names(query: Annotated[JobQuery, Query()], caller: Reader, sessions: SessionsDep) -> LabelNames:
    """List the names of the jobs' labels, the most frequent first, with the filters of the list."""
    with reading(sessions) as session:
        found = listing.count_by_label(session, query.to_filter(caller.project_id), limit=MAX_GROUPS + 1)
    names = [LabelNameOut(name=name, num_jobs=number) for name, number in found[:MAX_GROUPS]]
    return LabelNames(data=names, has_more=len(found) > MAX_GROUPS)


@router.get("/groups", responses=may(422))
def group_jobs(query: Annotated[GroupsQuery, Query()], caller: Reader, sessions: SessionsDep) -> Groups:
    """Count the jobs with each value of a label, with the filters of the list."""
    with reading(sessions) as session:
        found = listing.group_by_label(session, query.to_filter(caller.project_id), query.by, limit=MAX_GROUPS + 1)
    groups = [
        GroupOut(value=value, total=sum(states.values()), by_state=states, newest_at=at)
        for value, at, states in found[:MAX_GROUPS]
    ]
    return Groups(data=groups, has_more=len(found) > MAX_GROUPS)


@router.get("/{job_id}", response_model=JobOut, responses=UNCHANGED | may(404))
def get_job(
    job_id: JobId, caller: Reader, sessions: SessionsDep, response: Response, if_none_match: IfNoneMatch = None
) -> JobOut | Response:
    """Return a job. Poll it with If-None-Match: as long as nothing has changed the response is an empty 304."""
    with open_job(sessions, caller, job_id) as (session, job):
        shown = view.show(session, job)
    if matches(if_none_match, shown.etag):
        return Response(status_code=304, headers={"ETag": shown.etag})
    response.headers["ETag"] = shown.etag
    return shown.out


@router.patch("/{job_id}", responses=may(404, 412, 422, 428))
def edit_job(
    job_id: JobId, body: JobPatch, caller: Writer, sessions: SessionsDep, response: Response, if_match: IfMatch = None
) -> JobOut:
    """Change name, labels, priority or pin, in any state. The place of a waiting job in the queue follows."""
    with sessions.begin() as session:
        job = jobs.lock_own(session, caller.project_id, job_id)
        if job is None:
            raise no_such_job()
        view.check_unchanged(if_match, job)
        changes = body.model_dump(exclude_unset=True)
        jobs.edit(session, job, changes)
        audit.note(session, caller, "job.edit", job_id, **changes)
        shown = view.show(session, job)
    response.headers["ETag"] = shown.etag
    return shown.out


@router.delete("/{job_id}", status_code=204, responses=may(404, 409))
def delete_job(job_id: JobId, caller: Writer, context: ContextDep) -> None:
    """Delete a job that has ended, with its events, its log and the files of its artifact.

    A result that is a version in the model registry must be removed there first.
    """
    with context.sessions.begin() as session:
        job = jobs.lock_own(session, caller.project_id, job_id)
        if job is None:
            raise no_such_job()
        if versions := registry.names_of(session, job_id):
            detail = f"The job's result is in the model registry: {', '.join(versions)}."
            hint = f"Remove it there first: `bitfoundry registry remove {versions[0]}`."
            raise Problem(409, "job_in_registry", detail, hint=hint)
        jobs.delete(session, job)
        audit.note(session, caller, "job.delete", job_id)
    remove_artifacts(context.settings, [job_id])


@router.post("/{job_id}/clone", status_code=202, responses=may(404, 410, 422, 507), dependencies=[ROOM, TURN])
def clone_job(
    job_id: JobId,
    caller: Writer,
    context: ContextDep,
    response: Response,
    body: JobClone = JobClone(),  # noqa: B008  it is frozen
    idempotency_key: IdempotencyKey = None,
) -> JobOut:
    """Queue a copy of this job with the given changes. The copy is planned again."""
    with open_job(context.sessions, caller, job_id) as (_, original):
        pass
    return _answer_made(submission.clone(original, body, caller, context, idempotency_key), context, response)


@contextmanager
def open_job(sessions: Sessions, caller: Caller, job_id: str) -> Iterator[tuple[Session, Job]]:
    """Yield a session to read more, and the job. Raises Problem 404, also for another project's job."""
    with reading(sessions) as session:
        job = jobs.find_own(session, caller.project_id, job_id)
        if job is None:
            raise no_such_job()
        yield session, job


def no_such_job() -> Problem:
    return Problem(404, "job_not_found", "There is no such job.")


def _answer_made(made: MadeOnce, context: Context, response: Response) -> JobOut:
    with reading(context.sessions) as session:
        job = jobs.find(session, made.id)
        if job is None:
            raise Problem(410, "job_deleted", "The job that this Idempotency-Key made was deleted.")
        shown = view.show(session, job)
    response.headers["Location"] = f"/v1/jobs/{made.id}"
    response.headers["Retry-After"] = str(POLL_AFTER_S)
    response.headers["ETag"] = shown.etag
    if made.replayed:
        response.headers["Idempotency-Replayed"] = "true"
    return shown.out
