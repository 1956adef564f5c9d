"""The operations of workers on jobs. A claim takes a new fence number and every later write carries it.

A worker that was paused, cut off or declared lost still holds its old fence: its writes find no row and raise
``LeaseLost``. So a job is never finished by a worker that no longer owns it, however late that worker wakes up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import Any

from pydantic import ValidationError
from sqlalchemy import ColumnElement, DateTime, Float, Select, case, cast, delete, func, select, update
from sqlalchemy.orm import Session

from api.store.accounts import hub_tokens, projects
from api.store.ids import new_id
from api.store.queue import events, logs, outbox, phases, placement, publications
from api.store.queue.clock import from_now
from api.store.queue.events import NewEvent
from api.store.queue.logs import NewLine
from api.store.queue.workers import host_of
from api.store.states import CLAIMABLE, FINAL, HELD, State
from api.store.tables.jobs import FENCE, QUEUE_ORDER, Artifact, Attempt, Job
from api.store.tables.node_slots import NodeSlot
from quantcore.config.job_spec import JobSpec
from quantcore.config.values import config_error

MAX_LOST = 3  # a job that takes its worker down with it may lose so many workers; with the next one it fails
MAX_BACKOFF_S = 1800


class LeaseLost(Exception):
    """The job is no longer ours: write nothing, end the engine."""


class Order(StrEnum):
    """The reason why a worker must end its engine, learnt with a heartbeat."""

    CANCEL = "cancel"
    PAUSE = "pause"
    TIME_IS_UP = "time_is_up"
    NODE_LOST = "node_lost"  # of a job on several nodes: see ``node_slots``
    NODE_LEFT = "node_left"  # it was drained
    WORKER_NEEDED = "worker_needed"  # of a chat: a job waits for its worker
    IDLE = "idle"  # of a chat


_ORDERS: dict[str, Order] = {State.CANCELLING: Order.CANCEL, State.PAUSING: Order.PAUSE}


@dataclass(frozen=True)
class Lease:
    """The right to work on one job, and the job's request."""

    job_id: str
    fence: int
    attempt: int
    project_id: str
    model: dict[str, Any]
    stored_spec: dict[str, Any]
    nodes: int
    sealed_hub_token: bytes | None  # the token that ``model`` names, as it is now; None if it names none or it is gone
    traceparent: str | None = None  # of the request that made the job
    needs_memory_bytes: int | None = None  # the plan's estimate

    @cached_property
    def spec(self) -> JobSpec:
        """The job's spec. Raises ConfigError ``unsupported_job`` if only another version of the service can read it."""
        try:
            return JobSpec.model_validate(self.stored_spec)
        except ValidationError as error:
            hint = "Upgrade this worker to the version of the API, then retry the job."
            raise config_error(error, "The stored job", code="unsupported_job", hint=hint) from error


@dataclass(frozen=True)
class Failure:
    """The reason why an attempt failed. ``max_failures``: how many such failures a job may have when ``retryable``.

    ``rank``: the process of several that failed; ``block``: its decoder block. None where that is not known.
    """

    code: str
    message: str
    hint: str = ""
    retryable: bool = False
    detail: str = ""
    max_failures: int = 3
    rank: int | None = None
    block: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "max_failures" and value is not None}


def claim(
    session: Session, *, worker: str, lease_s: float, memory_bytes: int | None = None, brings_nodes: bool = False
) -> Lease | None:
    """Take the job of the highest priority that has waited longest, or return None.

    Two workers never get the same one (SKIP LOCKED). Jobs that need more than ``memory_bytes``, or avoid the worker's
    host, are left to others. Jobs are passed over if their project already runs as many as it may, or if they need more
    workers than there are. If the next job needs several workers and not enough of them are idle, no later job is
    taken: otherwise it would wait for ever. A worker that ``brings_nodes`` asks a scheduler for them.
    """
    due = (
        _due(worker, memory_bytes, brings_nodes=brings_nodes)
        .order_by(*QUEUE_ORDER)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    while (job := session.scalar(due)) is not None:
        if not projects.may_run(session, job.project_id):
            due = due.where(Job.project_id != job.project_id)
        elif not brings_nodes and not placement.are_enough_ready(session, job):
            due = due.where(Job.id != job.id)
        else:
            break
    if job is None or not (brings_nodes or placement.are_enough_idle(session, job)):
        return None
    fence = session.execute(FENCE.next_value()).scalar_one()
    job.state = State.RUNNING
    job.attempt += 1
    job.fence, job.worker, job.lease_expires_at = fence, worker, from_now(lease_s)
    job.started_at = func.coalesce(job.started_at, func.clock_timestamp())
    job.phase = job.progress = job.error = job.allocation = None
    job.phases = []
    session.add(Attempt(job_id=job.id, number=job.attempt, fence=fence, worker=worker))
    events.announce(session, job, State.RUNNING, attempt=job.attempt)
    session.flush()
    if not brings_nodes:
        placement.open_seats(session, job)
    token = job.model.get("hub_token")
    sealed = token and hub_tokens.find_sealed(session, job.project_id, token)
    return Lease(
        job.id,
        fence,
        job.attempt,
        job.project_id,
        job.model,
        job.spec,
        job.nodes,
        sealed,
        job.traceparent,
        job.needs_memory_bytes,
    )


def is_any_due(session: Session, *, worker: str, waits_s: float, memory_bytes: int) -> bool:
    """Return True if ``worker`` could run a job in ``memory_bytes`` that has waited ``waits_s`` seconds for a slot."""
    due = _due(worker, memory_bytes).where(Job.run_at <= from_now(-waits_s)).order_by(Job.project_id).limit(1)
    while (job := session.scalar(due)) is not None:
        if projects.may_run(session, job.project_id):
            return True
        due = due.where(Job.project_id > job.project_id)
    return False


def _due(worker: str, memory_bytes: int | None, *, brings_nodes: bool = False) -> Select[Job]:
    """Return the query for the jobs whose time has come, that may run there, and for which there are enough workers."""
    due = select(Job).where(
        Job.state.in_(CLAIMABLE), Job.run_at <= func.clock_timestamp(), placement.may_run_on(host_of(worker))
    )
    if not brings_nodes:
        due = due.where(placement.has_enough_workers())
    if memory_bytes is not None:
        due = due.where(func.coalesce(Job.needs_memory_bytes, 0) <= memory_bytes)
    return due


def renew(session: Session, lease: Lease, *, lease_s: float) -> Order | None:
    """Extend the lease (its heartbeat). Returns what the worker must do now, if anything.

    Raises LeaseLost, also when the lease has run out.
    """
    beat = (
        update(Job)
        .where(Job.id == lease.job_id, Job.fence == lease.fence, Job.lease_expires_at > func.clock_timestamp())
        .values(lease_expires_at=from_now(lease_s))
        .returning(Job.state, Job.used_runtime_s + _running_s() > Job.max_runtime_s)
    )
    row = session.execute(beat).one_or_none()
    if row is None:
        raise LeaseLost
    state, time_is_up = row
    return _ORDERS.get(state) or (Order.TIME_IS_UP if time_is_up else None)


def record(session: Session, lease: Lease, *, happened: Sequence[NewEvent], columns: dict[str, Any]) -> Order | None:
    """Append events and set the columns that show them (``phase``, ``progress``; ``phases`` follow from the events).

    Returns what the worker must do now.
    """
    job = _held(session, lease)
    for name, value in columns.items():
        setattr(job, name, value)
    for event in happened:
        if event.kind == "phase_started":
            job.phases = phases.enter(job.phases, str(event.data.get("phase")), _now(session))
        elif event.kind == "progress":
            job.phases = phases.note_progress(job.phases, event.data)
    events.add(session, job, *happened)
    return _ORDERS.get(job.state)


def note_allocation(session: Session, lease: Lease, *, told: dict[str, str], is_running: bool) -> Order | None:
    """Record what a scheduler says of the job's allocation. The time in its queue is no running time of the job.

    Returns what the worker must do now.
    """
    job = _held(session, lease)
    before = job.allocation or {"used_s": 0.0, "running_since": None}
    used_s, since, now = before["used_s"], before["running_since"], _now(session)
    if since is not None and not is_running:
        used_s, since = used_s + (now - datetime.fromisoformat(since)).total_seconds(), None
    elif since is None and is_running:
        since = now.isoformat()
    job.allocation = told | {"used_s": used_s, "running_since": since}
    events.add(session, job, NewEvent("allocation", dict(told)))
    return _ORDERS.get(job.state)


def write_log(session: Session, lease: Lease, *, lines: Sequence[NewLine]) -> Order | None:
    """Append the engine's output to the log. Returns what the worker must do now."""
    job = _held(session, lease)
    logs.append(session, job, lines)
    return _ORDERS.get(job.state)


def succeed(
    session: Session, lease: Lease, *, manifest_sha256: str, path: str, num_bytes: int, summary: dict[str, Any]
) -> None:
    """Store the artifact's row and the job's success, together."""
    job = _held(session, lease)
    artifact = Artifact(
        id=new_id("art"),
        job_id=job.id,
        fence=lease.fence,
        manifest_sha256=manifest_sha256,
        path=path,
        num_bytes=num_bytes,
    )
    session.add(artifact)
    session.flush()
    job.artifact_id, job.summary = artifact.id, summary
    _end(session, job, State.SUCCEEDED, outcome="succeeded")
    publications.ask_with_success(session, job)


def fail(session: Session, lease: Lease, failure: Failure, *, retry_base_s: float) -> None:
    """Schedule another try if that can help and the job has tries left; else the job has failed.

    A job being cancelled is cancelled; one being paused is paused if it would have been tried again.
    """
    job = _held(session, lease)
    job.failure_count += 1
    error = failure.to_dict()
    if job.state == State.CANCELLING:
        _end(session, job, State.CANCELLED, outcome="cancelled")
    elif not failure.retryable or job.failure_count >= failure.max_failures:
        _end(session, job, State.FAILED, outcome="failed", error=error)
    elif job.state == State.PAUSING:
        _end(session, job, State.PAUSED, outcome="retry", error=error)
    else:
        job.run_at = from_now(_backoff_s(job.failure_count, retry_base_s))
        _end(session, job, State.RETRY_WAIT, outcome="retry", error=error)


def release(session: Session, lease: Lease) -> None:
    """Give back a job whose engine was ended from outside: cancelled or paused if a client asked for that.

    Else (a drain) it is queued again. It is charged to nobody. The job's state decides, not what the worker remembers:
    a cancel may have followed a pause.
    """
    job = _held(session, lease)
    if job.state == State.CANCELLING:
        _end(session, job, State.CANCELLED, outcome="cancelled")
    elif job.state == State.PAUSING:
        _end(session, job, State.PAUSED, outcome="paused")
    else:
        _end(session, job, State.QUEUED, outcome="drained")
        outbox.wake(session)


def put_back(session: Session, lease: Lease) -> None:
    """Queue the job as if nobody had claimed it: the other workers that it needs did not come.

    A client's request meanwhile counts, as in ``release``.
    """
    job = _held(session, lease)
    if job.state == State.RUNNING:
        session.execute(delete(Attempt).where(Attempt.job_id == job.id, Attempt.fence == lease.fence))
        job.attempt -= 1
        used_runtime_s = job.used_runtime_s
        _end(session, job, State.QUEUED, outcome="not_gathered")
        job.used_runtime_s = used_runtime_s
    else:
        release(session, lease)


def reap(session: Session, *, limit: int = 100) -> int:
    """Take back jobs whose lease ran out: queued again, or what a client requested; failed beyond MAX_LOST."""
    expired = select(Job).where(Job.state.in_(HELD), Job.lease_expires_at < func.clock_timestamp())
    lost = session.scalars(expired.order_by(Job.lease_expires_at).limit(limit).with_for_update(skip_locked=True)).all()
    for job in lost:
        job.lost_count += 1
        if job.state == State.CANCELLING:
            _end(session, job, State.CANCELLED, outcome="lost")
        elif job.lost_count > MAX_LOST:
            gave_up = Failure(
                "worker_lost",
                f"{job.lost_count} workers were lost while running this job.",
                hint="The job may need more memory than the workers' hosts have. See their system logs.",
            )
            _end(session, job, State.FAILED, outcome="lost", error=gave_up.to_dict())
        elif job.state == State.PAUSING:
            _end(session, job, State.PAUSED, outcome="lost")
        else:
            _end(session, job, State.QUEUED, outcome="lost")
            outbox.wake(session)
    return len(lost)


def expire_pending(session: Session, *, limit: int = 100) -> int:
    """Fail the jobs that no worker has taken within their ``max_pending_s``."""
    waited_s = func.extract("epoch", func.clock_timestamp() - _entered(State.QUEUED))
    expired = select(Job).where(Job.state == State.QUEUED, Job.max_pending_s < waited_s)
    late = session.scalars(expired.order_by(Job.id).limit(limit).with_for_update(skip_locked=True)).all()
    for job in late:
        job.error = Failure(
            "max_pending_exceeded",
            f"No worker took the job within {job.max_pending_s} s.",
            hint="Retry it when more workers are available, or with a higher priority or a larger "
            "limits.max_pending_s.",
            retryable=True,
        ).to_dict()
        job.state, job.finished_at = State.FAILED, func.clock_timestamp()
        events.announce(session, job, State.FAILED, error=job.error)
        session.flush()
    return len(late)


def _held(session: Session, lease: Lease) -> Job:
    """Return the leased job, its row locked. Raises LeaseLost if another fence number has taken over."""
    mine = select(Job).where(Job.id == lease.job_id, Job.fence == lease.fence, Job.state.in_(HELD)).with_for_update()
    job = session.scalar(mine.execution_options(populate_existing=True))
    if job is None:
        raise LeaseLost
    return job


def _end(session: Session, job: Job, state: State, *, outcome: str, error: dict[str, Any] | None = None) -> None:
    """Close the attempt and let go of the job, which moves on to ``state``."""
    session.execute(
        delete(NodeSlot).where(NodeSlot.job_id == job.id)
    )  # their workers learn from it that the attempt is over
    ended = update(Attempt).where(Attempt.job_id == job.id, Attempt.ended_at.is_(None))
    session.execute(ended.values(ended_at=func.clock_timestamp(), outcome=outcome, error=error))
    more: dict[str, Any] = {"error": error} if error else {}
    if state == State.SUCCEEDED:
        more |= _judged(job.summary or {})
    events.announce(session, job, state, attempt=job.attempt, outcome=outcome, **more)
    job.used_runtime_s = Job.used_runtime_s + _running_s()
    job.phases = phases.leave(job.phases, phases.DONE if state == State.SUCCEEDED else phases.STOPPED, _now(session))
    job.state, job.error = state, error
    job.fence = job.worker = job.lease_expires_at = None
    if state in FINAL:
        job.finished_at = func.clock_timestamp()
    session.flush()


def _judged(summary: dict[str, Any]) -> dict[str, str]:
    """Return the payload of the job-succeeded event: the result's verdict, and whether it missed its goal."""
    told: dict[str, str] = {}
    if verdict := summary.get("verdict"):
        told |= {"verdict": verdict["level"], "verdict_reason": verdict["reason"]}
    if (goal := summary.get("goal")) and not goal["is_met"]:
        told["goal_missed"] = goal["why"]
    return told


def _entered(state: State) -> ColumnElement[Any]:
    """Return the time at which the job last entered ``state``."""
    return cast(Job.state_times.op("->>")(str(state)), DateTime(timezone=True))


def _running_s() -> ColumnElement[Any]:
    """Return the seconds of the present attempt so far, without those in a scheduler's queue.

    0 where a job from before ``state_times`` cannot tell.
    """
    running_since = cast(Job.allocation["running_since"].astext, DateTime(timezone=True))
    on_nodes = cast(Job.allocation["used_s"].astext, Float) + func.coalesce(_seconds_since(running_since), 0)
    here = _seconds_since(_entered(State.RUNNING))
    return func.coalesce(case((Job.allocation.is_not(None), on_nodes), else_=here), 0)


def _seconds_since(time: ColumnElement[Any]) -> ColumnElement[Any]:
    return func.extract("epoch", func.clock_timestamp() - time)


def _now(session: Session) -> datetime:
    now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return now


def _backoff_s(failure_count: int, base_s: float) -> float:
    """Return the wait before a retry: 30 s, 1 min, 2 min ... half an hour, with jitter so that a crowd spreads out."""
    return min(base_s * 2.0 ** (failure_count - 1), MAX_BACKOFF_S) * random.uniform(1.0, 1.25)
