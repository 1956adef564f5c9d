"""The routes of sweeps."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from sqlalchemy.orm import Session

from api.http.conditional import UNCHANGED, IfNoneMatch, PagesDep, etag_of, matches
from api.http.deps import ContextDep, SessionsDep
from api.http.disk_space import ROOM
from api.http.errors import Problem, may
from api.http.idempotent import IdempotencyKey, make_once, request_of
from api.http.security import Reader, Writer
from api.http.strict_json import StrictJsonRoute
from api.jobs import cursor as cursors
from api.jobs import submission, view
from api.jobs.endpoints import POLL_AFTER_S
from api.jobs.models import TURN
from api.lineage.schemas import ModelListQuery
from api.store.accounts import audit
from api.store.accounts.audit import Caller
from api.store.engine import reading
from api.store.ids import new_id
from api.store.queue import sweeps
from api.store.tables.jobs import Sweep
from api.sweeps import matrix
from api.sweeps.matrix import SweepJob
from api.sweeps.schemas import SweepBrief, SweepCreate, SweepOut, SweepPage

router = APIRouter(prefix="/sweeps", tags=["sweeps"], route_class=StrictJsonRoute)

SweepId = Annotated[str, Path(pattern="^swp_[0-9a-f]{32}$")]


@router.post("", status_code=202, responses=may(422, 507), dependencies=[ROOM, TURN])
def submit_sweep(
    body: SweepCreate, caller: Writer, context: ContextDep, response: Response, idempotency_key: IdempotencyKey = None
) -> SweepOut:
    """Queue one job for every combination of the matrix: all of them in one transaction, or none."""

    def store(session: Session, sweep_id: str, planned: list[SweepJob]) -> None:
        session.add(
            Sweep(
                id=sweep_id,
                project_id=caller.project_id,
                submitted_by=caller.key_id,
                name=body.name,
                matrix=body.matrix,
            )
        )
        session.flush()
        audit.note(session, caller, "sweep.submit", sweep_id, num_jobs=len(planned))
        for job in planned:
            more = {"sweep_id": sweep_id, "sweep_values": job.values}
            submission.store(session, new_id("job"), job.body, job.planned, caller, **more)

    made = make_once(
        context.sessions,
        request_of(caller, "POST /v1/sweeps", idempotency_key, body),
        "swp",
        lambda: matrix.plan_all(body, context, caller),
        store,
    )
    context.upkeep.relay_now()
    response.headers["Location"] = f"/v1/sweeps/{made.id}"
    response.headers["Retry-After"] = str(POLL_AFTER_S)
    if made.replayed:
        response.headers["Idempotency-Replayed"] = "true"
    with context.sessions.begin() as session:
        return _show(session, caller, made.id)


@router.get("", response_model=SweepPage, responses=UNCHANGED | may(422))
def list_sweeps(
    query: Annotated[ModelListQuery, Query()],
    caller: Reader,
    sessions: SessionsDep,
    pages: PagesDep,
) -> SweepPage | Response:
    """List the project's sweeps, newest first; the Link header leads to the next page."""
    filtered = cursors.fingerprint("sweeps", caller.project_id)
    after = cursors.decode(query.cursor, filtered)
    with reading(sessions) as session:
        found = sweeps.page_of_sweeps(session, caller.project_id, limit=query.limit + 1, after=after)
    last = found[query.limit - 1] if len(found) > query.limit else None
    next_cursor = cursors.encode(last.created_at, last.id, filtered) if last else None
    shown = [SweepBrief.of(sweep) for sweep in found[: query.limit]]
    page = SweepPage(data=shown, has_more=last is not None, next_cursor=next_cursor)
    return pages.answer(page, next_cursor)


@router.get("/{sweep_id}", response_model=SweepOut, responses=UNCHANGED | may(404))
def get_sweep(
    sweep_id: SweepId, caller: Reader, sessions: SessionsDep, response: Response, if_none_match: IfNoneMatch = None
) -> SweepOut | Response:
    """Return the sweep: its jobs as they are now, and the number in each state."""
    with sessions.begin() as session:
        shown = _show(session, caller, sweep_id)
    etag = etag_of(shown)
    if matches(if_none_match, etag):
        return Response(status_code=304, headers={"ETag": etag})
    response.headers["ETag"] = etag
    return shown


@router.post("/{sweep_id}/cancel", status_code=202, responses=may(404))
def cancel_sweep(sweep_id: SweepId, caller: Writer, sessions: SessionsDep) -> SweepOut:
    """Cancel all jobs of the sweep that have not ended. The others stay as they are."""
    with sessions.begin() as session:
        _open(session, caller, sweep_id)
        sweeps.cancel_all(session, sweep_id)
        audit.note(session, caller, "sweep.cancel", sweep_id)
        return _show(session, caller, sweep_id)


def _open(session: Session, caller: Caller, sweep_id: str) -> Sweep:
    sweep = sweeps.find_own(session, caller.project_id, sweep_id)
    if sweep is None:
        raise Problem(404, "sweep_not_found", "There is no such sweep.")
    return sweep


def _show(session: Session, caller: Caller, sweep_id: str) -> SweepOut:
    sweep = _open(session, caller, sweep_id)
    return SweepOut.of(sweep, [job.out for job in view.show_all(session, sweeps.find_jobs(session, sweep_id))])
