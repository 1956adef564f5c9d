"""The routes of retention. The policy itself is carried out once an hour (``api.jobs.retention_task``)."""

from __future__ import annotations

from fastapi import APIRouter

from api.http.deps import Context, ContextDep, SessionsDep
from api.http.errors import may
from api.http.security import Admin, Reader
from api.http.strict_json import StrictJsonRoute
from api.jobs.retention_task import remove_artifacts
from api.retention.schemas import DueList, PolicyIn, PolicyOut
from api.store.accounts import audit
from api.store.queue import retention
from api.store.queue.retention import Due, Keep

MAX_SHOWN = 1000

router = APIRouter(prefix="/retention", tags=["retention"], route_class=StrictJsonRoute)


@router.get("")
def get_retention(caller: Reader, context: ContextDep) -> PolicyOut:
    """Return the project's policy for jobs that have ended."""
    with context.sessions.begin() as session:
        return _show(retention.find_policy(session, caller.project_id), context)


@router.put("", responses=may(422))
def put_retention(body: PolicyIn, caller: Admin, context: ContextDep) -> PolicyOut:
    """Set the project's policy. Jobs that it does not keep are deleted within the hour: look at the preview first."""
    with context.sessions.begin() as session:
        retention.set_policy(session, caller.project_id, body.to_keep())
        audit.note(session, caller, "retention.set", caller.project_id, **body.model_dump())
    return _show(body.to_keep(), context)


@router.post("/preview", responses=may(422))
def preview_retention(caller: Reader, sessions: SessionsDep, body: PolicyIn | None = None) -> DueList:
    """List the jobs that would go, and why: by the policy that is set, or the one in the body. Nothing is changed."""
    with sessions.begin() as session:
        keep = body.to_keep() if body else retention.find_policy(session, caller.project_id)
        due = retention.find_due(session, caller.project_id, keep, limit=MAX_SHOWN + 1)
        num_pinned = retention.count_pinned(session, caller.project_id)
    return DueList.of(due[:MAX_SHOWN], keep, num_pinned, has_more=len(due) > MAX_SHOWN)


@router.post("/run")
def run_retention(caller: Admin, context: ContextDep) -> DueList:
    """Delete now the jobs that the policy does not keep, as `DELETE` of each does; at most a thousand at a time."""
    removed: list[Due] = []
    while len(removed) < MAX_SHOWN:
        with context.sessions.begin() as session:
            keep = retention.find_policy(session, caller.project_id)
            gone = retention.purge_due(session, caller, keep)
        remove_artifacts(context.settings, [job.job_id for job in gone])
        removed += gone
        if not gone:
            break
    with context.sessions.begin() as session:
        left = retention.find_due(session, caller.project_id, keep, limit=1)
        num_pinned = retention.count_pinned(session, caller.project_id)
    return DueList.of(removed, keep, num_pinned, has_more=bool(left))


def _show(keep: Keep, context: Context) -> PolicyOut:
    return PolicyOut(
        keep_last=keep.last,
        keep_days=keep.days,
        service_keep_jobs_days=context.settings.keep_jobs_days,
        service_keep_logs_days=context.settings.keep_logs_days,
    )
