"""Lists of jobs: filters, pages, counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sqlalchemy import ColumnElement, Double, cast, exists, func, or_, select, tuple_
from sqlalchemy.orm import Session, aliased

from api.store.states import State
from api.store.tables.jobs import QUEUE_ORDER, Job


@dataclass(frozen=True)
class JobFilter:
    """A filter for the jobs of a project; a field that is empty or None matches everything.

    ``states``: one of them. ``labels``: all of them. ``model``: this path or Hub id. ``text``: in the name, the id, the
    model or the preset, in any case. ``created_after`` and ``created_before``: strictly. ``one_per_sweep``: of the jobs
    of a sweep only the newest, whatever the other fields are.
    """

    project_id: str
    states: tuple[State, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    model: str | None = None
    text: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    sweep_id: str | None = None
    one_per_sweep: bool = False

    def conditions(self) -> list[ColumnElement[bool]]:
        clauses: list[ColumnElement[bool]] = [Job.project_id == self.project_id]
        model = Job.model["id"].astext, Job.model["path"].astext
        if self.states:
            clauses.append(Job.state.in_(self.states))
        if self.labels:
            clauses += [Job.labels.contains({name: value}) for name, value in self.labels]
        if self.model is not None:
            clauses.append(or_(*(place == self.model for place in model)))
        if self.text is not None:
            places = (Job.name, Job.id, Job.preset, *model)
            clauses.append(or_(*(place.icontains(self.text, autoescape=True) for place in places)))
        if self.created_after is not None:
            clauses.append(Job.created_at > self.created_after)
        if self.created_before is not None:
            clauses.append(Job.created_at < self.created_before)
        if self.sweep_id is not None:
            clauses.append(Job.sweep_id == self.sweep_id)
        if self.one_per_sweep:
            newer = aliased(Job)
            is_newer = tuple_(newer.created_at, newer.id) > tuple_(Job.created_at, Job.id)
            clauses.append(~exists().where(newer.sweep_id == Job.sweep_id, is_newer))
        return clauses


Order = Literal["newest", "oldest", "queue", "size", "kl", "perplexity"]
Place = tuple[datetime, str]
JOB_ID = "job_[0-9a-f]{32}"
NUMBER = r"(inf|-?\d{1,20}(\.\d{1,20})?(e[+-]\d{1,3})?)"
MEASURES: dict[Order, str] = {"size": "size_after_bytes", "kl": "kl_mean", "perplexity": "perplexity_ratio"}
"""Order -> the number in a job's summary that it sorts by, the least first; jobs without it come last."""
PLACES: dict[Order, str] = {
    "newest": ".*",
    "oldest": ".*",
    "queue": f"[0-9] {JOB_ID}",
    **dict.fromkeys(MEASURES, f"{NUMBER} {JOB_ID}"),
}
"""Order -> a regular expression for the text of a place in it."""


def place_of(job: Job, order: Order) -> Place:
    """Return where a page that ends with ``job`` ends, for the next one to begin behind."""
    if order == "queue":
        return job.run_at, f"{job.priority} {job.id}"
    if order in MEASURES:
        value = (job.summary or {}).get(MEASURES[order])
        return job.created_at, f"{math.inf if value is None else float(value)!r} {job.id}"
    return job.created_at, job.id


def page(
    session: Session, wanted: JobFilter, *, limit: int, after: Place | None = None, order: Order = "newest"
) -> Sequence[Job]:
    """Return jobs in an order. ``after`` is ``place_of`` the last job seen.

    Pages by time and of the queue never shift: a job that is inserted or that ends moves no other one to another page.
    """
    jobs = select(Job).where(*wanted.conditions()).limit(limit)
    if order == "queue":
        jobs = jobs.order_by(*QUEUE_ORDER)
        if after:
            run_at, (priority, _, job_id) = after[0], after[1].partition(" ")
            jobs = jobs.where(tuple_(-Job.priority, Job.run_at, Job.id) > (-int(priority), run_at, job_id))
    elif order in MEASURES:
        value = func.coalesce(cast(Job.summary[MEASURES[order]].astext, Double), math.inf)
        jobs = jobs.order_by(value, Job.id)
        if after:
            number, _, job_id = after[1].partition(" ")
            jobs = jobs.where(tuple_(value, Job.id) > (float(number), job_id))
    elif order == "oldest":
        jobs = jobs.order_by(Job.created_at, Job.id)
        if after:
            jobs = jobs.where(tuple_(Job.created_at, Job.id) > after)
    else:
        jobs = jobs.order_by(Job.created_at.desc(), Job.id.desc())
        if after:
            jobs = jobs.where(tuple_(Job.created_at, Job.id) < after)
    return session.scalars(jobs).all()


def count_by_state(session: Session, wanted: JobFilter) -> dict[State, int]:
    """Return the number of jobs in each state; every state is there."""
    counted = session.execute(select(Job.state, func.count()).where(*wanted.conditions()).group_by(Job.state))
    return dict.fromkeys(State, 0) | {State(state): number for state, number in counted}


def count_by_label(session: Session, wanted: JobFilter, *, limit: int) -> list[tuple[str, int]]:
    """Return (name, number of jobs with it) of labels, the most frequent first."""
    name = func.jsonb_object_keys(Job.labels).label("name")
    names = select(name).where(*wanted.conditions()).subquery()
    counted = select(names.c.name, func.count()).group_by(names.c.name)
    return [(name, n) for name, n in session.execute(counted.order_by(func.count().desc(), names.c.name).limit(limit))]


def group_by_label(
    session: Session, wanted: JobFilter, name: str, *, limit: int
) -> list[tuple[str | None, datetime, dict[State, int]]]:
    """Return (value of the label, time of its newest job, number of jobs in each state), the newest first.

    The value None stands for the jobs without the label.
    """
    value = Job.labels[name].astext
    newest = func.max(Job.created_at)
    numbers = (func.count().filter(Job.state == state) for state in State)
    groups = select(value, newest, *numbers).where(*wanted.conditions()).group_by(value)
    found = session.execute(groups.order_by(newest.desc(), value).limit(limit))
    return [(value, at, dict(zip(State, numbers, strict=True))) for value, at, *numbers in found]
