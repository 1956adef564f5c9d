"""The routes that move a job: cancel, pause, resume, retry. In the wrong state each answers 409 (``WrongState``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from api.http.deps import Context, ContextDep
from api.http.disk_space import ROOM
from api.http.errors import may
from api.http.security import Writer
from api.jobs import view
from api.jobs.endpoints import JobId, no_such_job
from api.jobs.schemas import JobOut
from api.store.accounts import audit
from api.store.accounts.audit import Caller
from api.store.queue import control, jobs
from api.store.tables.jobs import Job

router = APIRouter(prefix="/jobs/{job_id}", tags=["control"], responses=may(404, 409))


@router.post("/cancel", status_code=202)
def cancel_job(job_id: JobId, caller: Writer, context: ContextDep, response: Response) -> JobOut:
    """Cancel the job: at once if it waits or is paused, as soon as its worker has ended the engine if it runs."""
    return _act("cancel", job_id, caller, context, response)


@router.post("/pause", status_code=202)
def pause_job(job_id: JobId, caller: Writer, context: ContextDep, response: Response) -> JobOut:
    """Pause the job until it is resumed. The engine of a running job is ended.

    A resumed job continues after its last block on a worker with the same disk; elsewhere it starts from its beginning.
    """
    return _act("pause", job_id, caller, context, response)


@router.post("/resume", status_code=202)
def resume_job(job_id: JobId, caller: Writer, context: ContextDep, response: Response) -> JobOut:
    """Queue a paused job again, behind the jobs of its priority that already wait."""
    return _act("resume", job_id, caller, context, response)


@router.post("/retry", status_code=202, responses=may(507), dependencies=[ROOM])
def retry_job(
    job_id: JobId,
    caller: Writer,
    context: ContextDep,
    response: Response,
    elsewhere: Annotated[bool, Query(description="Not on the host of the last attempt.")] = False,
) -> JobOut:
    """Queue a failed or cancelled job again, with its full number of tries and its full time.

    With `elsewhere`, no worker on the host of its last attempt takes it: `avoid_host` names that host.
    """
    options = {"elsewhere": True} if elsewhere else {}
    return _act("retry", job_id, caller, context, response, **options)


_ACTIONS: dict[str, Callable[..., Job | None]] = {
    "cancel": control.cancel,
    "pause": control.pause,
    "resume": control.resume,
    "retry": control.retry,
}


def _act(action: str, job_id: str, caller: Caller, context: Context, response: Response, **options: Any) -> JobOut:
    with context.sessions.begin() as session:
        own = jobs.find_own(session, caller.project_id, job_id)
        job = own and _ACTIONS[action](session, job_id, **options)
        if job is None:
            raise no_such_job()
        audit.note(session, caller, f"job.{action}", job_id, **options)
        shown = view.show(session, job)
    context.upkeep.relay_now()
    response.headers["ETag"] = shown.etag
    return shown.out
