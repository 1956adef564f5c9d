"""The routes that move a job: cancel, pause, resume, retry. In the wrong state each answers 409 (``WrongState``)."""

from __future__ import annotations

from fastapi import APIRouter, Response

from api.deps import Context, ContextDep
from api.errors import may
from api.jobs import view
from api.jobs.endpoints import JobId, no_such_job
from api.jobs.schemas import JobOut
from api.security import Writer
from api.store import control

router = APIRouter(prefix="/jobs/{job_id}", tags=["control"], responses=may(404, 409))


@router.post("/cancel", status_code=202)
def cancel(job_id: JobId, _: Writer, context: ContextDep, response: Response) -> JobOut:
    """End the job: at once if it waits or is paused, as soon as its worker has ended the engine if it runs."""
    return _act(control.cancel, job_id, context, response)


@router.post("/pause", status_code=202)
def pause(job_id: JobId, _: Writer, context: ContextDep, response: Response) -> JobOut:
    """Keep the job from running until it is resumed. Of a running one the engine is ended.

    A resumed job goes on behind its last block on a worker with the same disk; elsewhere it starts from its beginning.
    """
    return _act(control.pause, job_id, context, response)


@router.post("/resume", status_code=202)
def resume(job_id: JobId, _: Writer, context: ContextDep, response: Response) -> JobOut:
    """Queue a paused job again, behind the jobs of its priority that wait already."""
    return _act(control.resume, job_id, context, response)


@router.post("/retry", status_code=202)
def retry(job_id: JobId, _: Writer, context: ContextDep, response: Response) -> JobOut:
    """Queue a failed or cancelled job again, with all its tries and all its time."""
    return _act(control.retry, job_id, context, response)


def _act(action: control.Action, job_id: str, context: Context, response: Response) -> JobOut:
    with context.sessions.begin() as session:
        job = action(session, job_id)
        if job is None:
            raise no_such_job()
        shown = view.show(session, job)
    context.upkeep.poke()
    response.headers["ETag"] = shown.etag
    return shown.out
