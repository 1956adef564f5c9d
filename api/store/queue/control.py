"""The actions of a client on a job: cancel, pause, resume, retry. Each is legal in some states only.

An action that is under way already (a pause of a pausing job) succeeds again, so a request that is sent twice does no
harm. Functions lock the job's row, so a response never races a worker.
"""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.store.accounts import projects
from api.store.queue import events, jobs, outbox, workers
from api.store.states import ACTIONS, FINAL, State, WrongState
from api.store.tables.jobs import Attempt, Job


def cancel(session: Session, job_id: str) -> Job | None:
    """Cancel a waiting job at once; ask the worker of a held one, which learns of it with its next heartbeat.

    Raises WrongState. Returns None if there is no such job: here and below.
    """
    job = _lock_for("cancel", session, job_id)
    if job is None or job.state == State.CANCELLING:
        return job
    job.cancel_requested_at = func.clock_timestamp()
    held = job.state in (State.RUNNING, State.PAUSING)
    return _move(session, job, State.CANCELLING if held else State.CANCELLED)


def pause(session: Session, job_id: str) -> Job | None:
    """Keep a waiting job from being claimed; ask the worker of a running one to end its engine. Raises WrongState."""
    job = _lock_for("pause", session, job_id)
    if job is None or job.state == State.PAUSING:
        return job
    return _move(session, job, State.PAUSING if job.state == State.RUNNING else State.PAUSED)


def resume(session: Session, job_id: str) -> Job | None:
    """Queue a paused job again, behind the jobs of its priority that already wait. Raises WrongState."""
    job = _lock_for("resume", session, job_id)
    return job and _queue_again(session, job)


def retry(session: Session, job_id: str, *, elsewhere: bool = False) -> Job | None:
    """Queue a failed or cancelled job again as if it were new, with all its tries and all its time.

    ``elsewhere``: no worker on the host of its last attempt takes it, until it is retried without this. Raises
    WrongState, QuotaExceeded.
    """
    job = _lock_for("retry", session, job_id)
    if job is None:
        return None
    projects.check_room(session, job.project_id, max_waiting=1, max_stored_bytes=1)
    last = select(Attempt.worker).where(Attempt.job_id == job.id, Attempt.number == job.attempt)
    slot = session.scalar(last) if elsewhere else None
    job.avoid_host = slot and workers.host_of(slot)
    job.failure_count = job.lost_count = 0
    job.used_runtime_s = 0
    job.cancel_requested_at = job.finished_at = None
    job.phase = job.progress = None
    job.phases = []
    return _queue_again(session, job)


def _lock_for(action: str, session: Session, job_id: str) -> Job | None:
    job = jobs.lock(session, job_id)
    if job is not None and job.state not in ACTIONS[action]:
        raise WrongState(action, job.state)
    return job


def _queue_again(session: Session, job: Job) -> Job:
    job.run_at = func.clock_timestamp()
    job.error = None
    outbox.wake(session)
    return _move(session, job, State.QUEUED)


def _move(session: Session, job: Job, state: State) -> Job:
    job.state = state
    if state in FINAL:
        job.finished_at = func.clock_timestamp()
    events.announce(session, job, state)
    session.flush()
    session.refresh(job)
    return job
