"""Sweeps as rows: jobs that were submitted together, and are shown and cancelled together."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.store.queue import control
from api.store.states import FINAL
from api.store.tables.jobs import Job, Sweep


def find_own(session: Session, project_id: str, sweep_id: str) -> Sweep | None:
    """Return the sweep if it is the project's; all of its jobs are, then."""
    sweep = session.get(Sweep, sweep_id)
    return sweep if sweep is not None and sweep.project_id == project_id else None


def find_jobs(session: Session, sweep_id: str) -> Sequence[Job]:
    """Return the sweep's jobs in the order of its matrix; those that were deleted are missing."""
    wanted = select(Job).where(Job.sweep_id == sweep_id).order_by(Job.created_at, Job.id)
    return session.scalars(wanted).all()


def cancel_all(session: Session, sweep_id: str) -> None:
    """Cancel every job of the sweep that has not ended, as ``control.cancel`` does."""
    # Locked in one order, so that two cancels at the same time wait for each other and never deadlock.
    ids = select(Job.id).where(Job.sweep_id == sweep_id, Job.state.not_in(FINAL)).order_by(Job.id).with_for_update()
    for job_id in session.scalars(ids).all():
        control.cancel(session, job_id)
