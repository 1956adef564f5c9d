"""The routes of a job's shares: make, list and revoke read-only links to its report."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from api.http import security
from api.http.deps import ContextDep, SessionsDep
from api.http.errors import Problem, may
from api.http.security import Reader, Writer
from api.http.strict_json import StrictJsonRoute
from api.jobs.endpoints import JobId, no_such_job, open_job
from api.shares import public_report
from api.shares.schemas import NewShareOut, ShareCreate, ShareList, ShareOut
from api.store.accounts import audit, keys, shares
from api.store.queue import jobs

MAX_SHARES = 20
"""Number of links that a job can have at a time."""

router = APIRouter(prefix="/jobs/{job_id}/shares", tags=["shares"], route_class=StrictJsonRoute)

ShareId = Annotated[str, Path(pattern="^shr_[0-9a-f]{32}$")]


@router.post("", status_code=201, responses=may(404, 409, 422))
def create_share(
    job_id: JobId,
    caller: Writer,
    context: ContextDep,
    request: Request,
    response: Response,
    body: ShareCreate = ShareCreate(),  # noqa: B008  it is frozen
) -> NewShareOut:
    """Make a link that opens the job's report without a key, read-only, until it expires or is revoked.

    The link is in this response and nowhere else: the service keeps only a hash of its token.
    """
    with open_job(context.sessions, caller, job_id) as (session, job):
        artifact = jobs.find_artifact(session, job)
    if artifact is None:
        raise Problem(409, "not_ready", f"The job is {job.state}: only a succeeded job has a report to share.")
    if public_report.read(artifact) is None:
        hint = "Clone the job and share the new result."
        raise Problem(409, "no_report", "The artifact has no report that this version can display.", hint=hint)
    token = security.new_secret()
    with context.sessions.begin() as session:
        if jobs.lock_own(session, caller.project_id, job_id) is None:
            raise no_such_job()
        if len(shares.find_all(session, job_id)) >= MAX_SHARES:
            detail = f"The job already has {MAX_SHARES} links, the maximum."
            raise Problem(409, "too_many_shares", detail, hint="Revoke one of them first.")
        share = shares.add(session, job_id, caller.key_id, security.hash_secret(token), body.expires_in_s)
        audit.note(session, caller, "share.create", job_id, share_id=share.id, expires_in_s=body.expires_in_s)
        shown = ShareOut.of(share, keys.find_names(session, [share.key_id] if share.key_id else []))
    response.headers["Cache-Control"] = "no-store"
    base_url = context.settings.public_url or str(request.base_url).rstrip("/")
    return NewShareOut(**shown.model_dump(), url=f"{base_url}/v1/shared/{token}")


@router.get("", responses=may(404))
def list_shares(job_id: JobId, caller: Reader, sessions: SessionsDep) -> ShareList:
    """List the links to the job that have not expired."""
    with open_job(sessions, caller, job_id) as (session, _):
        found = shares.find_all(session, job_id)
        names = keys.find_names(session, {share.key_id for share in found if share.key_id})
    return ShareList(data=[ShareOut.of(share, names) for share in found])


@router.delete("/{share_id}", status_code=204, responses=may(404))
def revoke_share(job_id: JobId, share_id: ShareId, caller: Writer, sessions: SessionsDep) -> None:
    """Revoke a link: it opens nothing from now on."""
    with sessions.begin() as session:
        if jobs.find_own(session, caller.project_id, job_id) is None:
            raise no_such_job()
        share = shares.find(session, job_id, share_id)
        if share is None:
            raise Problem(404, "share_not_found", "This job has no such link.")
        session.delete(share)
        audit.note(session, caller, "share.revoke", job_id, share_id=share_id)
