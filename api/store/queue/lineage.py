"""The models that a project's jobs used, the results of each, and which model came from which result.

A model has the name that its jobs store: an id on the Hub, or a path on the server. It is derived from a job if its
path lies in the folder of the job's artifact, and the job is the project's and not deleted since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import TextClause, select, text, tuple_
from sqlalchemy.orm import Session

from api.store.tables.jobs import PARENT, SOURCE, Job
from quantcore.config.verdict_levels import LEVELS

_RESULTS = f"project_id = :project_id AND {SOURCE} = {{name}} AND state = 'succeeded'"
NEAR_IN_SIZE = 1.05
"""Size of a result, relative to the smallest one of its verdict, up to which the divergence decides between them."""


def best_of(jobs: str) -> str:
    """Return SQL for the id of the best result of the jobs that the condition ``jobs`` selects.

    That is one with the best verdict: of those that are hardly larger than the smallest, the one with the smallest
    divergence. Results without a verdict do not count.
    """
    return f"""
      SELECT id FROM (
        SELECT measured.*, min(size) OVER (PARTITION BY level) AS smallest FROM (
          SELECT id, finished_at, CAST(summary ->> 'kl_mean' AS double precision) AS kl,
                 CAST(summary ->> 'size_after_bytes' AS bigint) AS size,
                 array_position(ARRAY{[*LEVELS]}, summary -> 'verdict' ->> 'level') AS level
          FROM job WHERE {jobs} AND state = 'succeeded'
        ) AS measured WHERE level IS NOT NULL
      ) AS ranked WHERE size <= {NEAR_IN_SIZE} * smallest
      ORDER BY level, kl NULLS LAST, size, finished_at DESC, id DESC LIMIT 1
    """


_MODELS = text(
    f"""
    WITH used AS (
      SELECT {SOURCE} AS name, count(*) AS num_jobs, count(*) FILTER (WHERE state = 'succeeded') AS num_results,
             max(greatest(created_at, started_at, finished_at)) AS active_at, max(id) AS last_job_id
      FROM job WHERE project_id = :project_id GROUP BY 1
    ), page AS (
      SELECT * FROM used
      WHERE CAST(:after_at AS timestamptz) IS NULL OR (active_at, last_job_id) < (:after_at, CAST(:after_id AS text))
      ORDER BY active_at DESC, last_job_id DESC LIMIT :limit
    )
    SELECT page.*, newest.id AS newest_id, best.id AS best_id
    FROM page
    LEFT JOIN LATERAL (
      SELECT id FROM job WHERE {_RESULTS.format(name="page.name")} ORDER BY finished_at DESC, id DESC LIMIT 1
    ) AS newest ON true
    LEFT JOIN LATERAL (
      {best_of(f"project_id = :project_id AND {SOURCE} = page.name")}
    ) AS best ON true
    ORDER BY active_at DESC, last_job_id DESC
    """
)
_IN_ARTIFACT = "({name} = artifact.path OR starts_with({name}, artifact.path || '/'))"
_PARENTS = text(
    f"""
    SELECT given.name, job.id AS job_id, {SOURCE} AS model
    FROM unnest(CAST(:names AS text[])) AS given (name)
    JOIN artifact ON artifact.job_id = {PARENT.replace("model ->> 'path'", "given.name")}
      AND {_IN_ARTIFACT.format(name="given.name")}
    JOIN job ON job.id = artifact.job_id AND job.project_id = :project_id
    """
)
_CHILDREN = text(
    f"""
    SELECT DISTINCT artifact.job_id, model ->> 'path' AS name
    FROM job JOIN artifact ON artifact.job_id = {PARENT} AND {_IN_ARTIFACT.format(name="model ->> 'path'")}
    WHERE job.project_id = :project_id AND {PARENT} = ANY(:job_ids)
    ORDER BY 1, 2
    """
)

Place = tuple[datetime, str]


@dataclass(frozen=True)
class Parent:
    """The job whose artifact a model lies in, and the name of the model that this job quantized."""

    job_id: str
    model: str


@dataclass(frozen=True)
class UsedModel:
    """A model with its jobs in short. ``num_results``: of those that have succeeded.

    ``best``: see ``best_of``; None if no result has a verdict. ``active_at``: when one of its jobs was last submitted,
    started or ended. ``last_job_id``: the newest of its jobs.
    """

    name: str
    num_jobs: int
    num_results: int
    active_at: datetime
    last_job_id: str
    newest: Job | None
    best: Job | None
    derived_from: Parent | None


def page_of_models(session: Session, project_id: str, *, limit: int, after: Place | None = None) -> Sequence[UsedModel]:
    """Return the models of the project's jobs, newest activity first. ``after``: (active_at, last_job_id)."""
    after_at, after_id = after or (None, None)
    asked = {"project_id": project_id, "limit": limit, "after_at": after_at, "after_id": after_id}
    rows = session.execute(_MODELS, asked).mappings().all()
    ids = {row[name] for row in rows for name in ("newest_id", "best_id")} - {None}
    jobs = {job.id: job for job in session.scalars(select(Job).where(Job.id.in_(ids)))} if ids else {}
    parents = find_parents(session, project_id, [row["name"] for row in rows])
    return [_used(dict(row), jobs, parents) for row in rows]


def page_of_results(
    session: Session, project_id: str, name: str, *, limit: int, after: Place | None = None
) -> Sequence[Job]:
    """Return the jobs of the model that have succeeded, newest first. ``after``: (finished_at, id)."""
    results = select(Job).where(_of_model(_RESULTS.format(name=":name"), project_id, name))
    if after:
        results = results.where(tuple_(Job.finished_at, Job.id) < after)
    return session.scalars(results.order_by(Job.finished_at.desc(), Job.id.desc()).limit(limit)).all()


def is_used(session: Session, project_id: str, name: str) -> bool:
    """Return True if a job of the project, in whatever state, is about the model."""
    wanted = select(Job.id).where(_of_model(f"project_id = :project_id AND {SOURCE} = :name", project_id, name))
    return session.scalar(wanted.limit(1)) is not None


def find_parents(session: Session, project_id: str, names: Sequence[str]) -> dict[str, Parent]:
    """Return the parent of each model that lies in an artifact of the project, by the model's name."""
    rows = session.execute(_PARENTS, {"project_id": project_id, "names": [*names]})
    return {row.name: Parent(row.job_id, row.model) for row in rows}


def find_children(session: Session, project_id: str, job_ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the models that lie in artifacts of these jobs and that the project's jobs used, by job."""
    children: dict[str, list[str]] = {}
    for job_id, name in session.execute(_CHILDREN, {"project_id": project_id, "job_ids": [*job_ids]}):
        children.setdefault(job_id, []).append(name)
    return children


def _of_model(condition: str, project_id: str, name: str) -> TextClause:
    return text(condition).bindparams(project_id=project_id, name=name)


def _used(row: dict[str, Any], jobs: dict[str, Job], parents: dict[str, Parent]) -> UsedModel:
    newest, best = (jobs.get(row.pop(name)) for name in ("newest_id", "best_id"))
    return UsedModel(**row, newest=newest, best=best, derived_from=parents.get(row["name"]))
