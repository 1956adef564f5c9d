"""The route that publishes the artifact of a succeeded job, at any later time and any number of times."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from api.http.deps import Context, ContextDep
from api.http.errors import Problem, may
from api.http.security import Writer
from api.http.strict_json import StrictJsonRoute
from api.jobs import service, targets, view
from api.jobs.artifacts import FileOut, files_of
from api.jobs.endpoints import POLL_AFTER_S, JobId, Responses, no_such_job, open_job
from api.jobs.schemas import JobOut, PublishTo
from api.jobs.targets import Checked
from api.store.accounts import audit
from api.store.accounts.audit import Caller
from api.store.queue import jobs, publications
from api.store.queue.publications import CannotPublish
from quantcore.errors import QuantError

router = APIRouter(prefix="/jobs/{job_id}", tags=["publishing"], route_class=StrictJsonRoute)


class PublishPlan(BaseModel):
    """The plan of a publication: all ``files`` and a MANIFEST.json of them, ``bytes`` at most.

    Files that are there already are not sent again. ``exists``: the repository is there; null where only the
    publication itself finds out.
    """

    target: dict[str, Any]
    url: str
    exists: bool | None
    bytes: int
    files: list[FileOut]


DRY_RUN: Responses = {
    200: {"description": "With `dry_run`: what would be published", "model": PublishPlan},
}


@router.post("/publish", status_code=202, response_model=JobOut, responses=DRY_RUN | may(404, 409, 422))
def publish_job(
    job_id: JobId,
    caller: Writer,
    context: ContextDep,
    response: Response,
    body: PublishTo | None = None,
    dry_run: Annotated[bool, Query(description="Check everything, publish nothing.")] = False,
) -> JobOut | Response:
    """Publish the artifact of a succeeded job; without a body retry the last publication, which has failed.

    The job's `publication` shows the outcome. Files that are there already are not sent again, and if all are there
    nothing is committed: to publish twice does no harm.
    """
    checked = _check(job_id, body, caller, context)
    if dry_run:
        return _plan(job_id, checked, caller, context)
    with context.sessions.begin() as session:
        job = jobs.lock_own(session, caller.project_id, job_id)
        if job is None:
            raise no_such_job()
        try:
            publication = publications.ask(session, job, checked.stored if checked else None)
        except CannotPublish as error:
            raise _cannot(error) from error
        audit.note(session, caller, "job.publish", job_id, target=publication.target)
        shown = view.show(session, job)
    context.upkeep.relay_now()
    response.headers["ETag"] = shown.etag
    response.headers["Retry-After"] = str(POLL_AFTER_S)
    return shown.out


def _check(job_id: str, body: PublishTo | None, caller: Caller, context: Context) -> Checked | None:
    """Check the target of the body. Its errors point into this body, not into that of a job."""
    with open_job(context.sessions, caller, job_id) as (_, job):
        token = job.model.get("hub_token")
    if body is None:
        return None
    if body.hub_token is None and body.to is None:
        body = body.model_copy(update={"hub_token": token})
    try:
        return targets.check(body, context, caller)
    except QuantError as error:
        error.field = error.field.removeprefix("/publish")
        raise


def _plan(job_id: str, checked: Checked | None, caller: Caller, context: Context) -> Response:
    with open_job(context.sessions, caller, job_id) as (session, job):
        artifact = jobs.find_artifact(session, job)
    if artifact is None:
        raise Problem(409, "not_ready", f"The job is {job.state}: only a succeeded job has an artifact to publish.")
    if checked is None:
        raise Problem(422, "missing_field", "A dry run needs the target.", hint="Send a body with repo_id, or to.")
    contents = service.read_manifest(artifact)
    plan = PublishPlan(
        target=checked.stored,
        url=checked.url,
        exists=checked.exists,
        bytes=contents.num_bytes,
        files=files_of(contents),
    )
    return JSONResponse(plan.model_dump(mode="json"))


def _cannot(error: CannotPublish) -> Problem:
    return Problem(409, error.code, error.message, hint=error.hint)
