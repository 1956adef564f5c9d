"""Sweeps as rows: jobs that were submitted together, and are shown and cancelled together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from api.store.queue import control
from api.store.queue.lineage import Place, best_of
from api.store.states import FINAL, State
from api.store.tables.jobs import SOURCE, Job, Sweep

_PAGE = text(
    f"""
    WITH page AS (
      SELECT id, name, created_at, matrix FROM sweep
      WHERE project_id = :project_id
        AND (CAST(:after_at AS timestamptz) IS NULL OR (created_at, id) < (:after_at, CAST(:after_id AS text)))
      ORDER BY created_at DESC, id DESC LIMIT :limit
    )
    SELECT page.*, model.name AS model, counts.by_state, best.id AS best_id
    FROM page
    LEFT JOIN LATERAL (
      SELECT {SOURCE} AS name FROM job WHERE sweep_id = page.id ORDER BY created_at, id LIMIT 1
    ) AS model ON true
    LEFT JOIN LATERAL (
      SELECT json_object_agg(state, number) AS by_state
      FROM (SELECT state, count(*) AS number FROM job WHERE sweep_id = page.id GROUP BY state) AS states
    ) AS counts ON true
    LEFT JOIN LATERAL ({best_of("sweep_id = page.id")}) AS best ON true
    ORDER BY page.created_at DESC, page.id DESC
    """
)


@dataclass(frozen=True)
class SweepInShort:
    """A sweep with the number of its jobs by state; those that were deleted do not count.

    ``model``: name of the model of its first job, None if it has none any more. ``best``: see ``lineage.best_of``.
    """

    id: str
    name: str | None
    created_at: datetime
    matrix: dict[str, list[Any]]
    model: str | None
    by_state: dict[State, int]
    best: Job | None


def page_of_sweeps(
    session: Session, project_id: str, *, limit: int, after: Place | None = None
) -> Sequence[SweepInShort]:
    """Return the project's sweeps, newest first. ``after``: (created_at, id)."""
    after_at, after_id = after or (None, None)
    asked = {"project_id": project_id, "limit": limit, "after_at": after_at, "after_id": after_id}
    rows = session.execute(_PAGE, asked).mappings().all()
    ids = [row["best_id"] for row in rows if row["best_id"]]
    jobs = {job.id: job for job in session.scalars(select(Job).where(Job.id.in_(ids)))} if ids else {}
    return [
        SweepInShort(
            **{name: row[name] for name in ("id", "name", "created_at", "matrix", "model")},
            by_state={State(state): number for state, number in (row["by_state"] or {}).items()},
            best=jobs.get(row["best_id"]),
        )
        for row in rows
    ]


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
