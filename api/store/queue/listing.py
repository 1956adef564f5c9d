"""Lists of jobs: filters, pages, counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, func, or_, select, tuple_
from sqlalchemy.orm import Session

from api.store.states import State
from api.store.tables.jobs import Job


@dataclass(frozen=True)
class JobFilter:
    """A filter for the jobs of a project; a field that is empty or None matches everything.

    ``states``: one of them. ``labels``: all of them. ``model``: this path or Hub id. ``text``: in the name, the id, the
    model or the preset, in any case. ``created_after`` and ``created_before``: strictly.
    """

    project_id: str
    states: tuple[State, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    model: str | None = None
    text: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    sweep_id: str | None = None

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
        return clauses


def page(
    session: Session, wanted: JobFilter, *, limit: int, after: tuple[datetime, str] | None = None
) -> Sequence[Job]:
    """Return jobs, newest first. ``after`` is (created_at, id) of the last job seen: a keyset, so pages never shift."""
    jobs = select(Job).where(*wanted.conditions()).order_by(Job.created_at.desc(), Job.id.desc()).limit(limit)
    if after:
        jobs = jobs.where(tuple_(Job.created_at, Job.id) < after)
    return session.scalars(jobs).all()


def count_by_state(session: Session, wanted: JobFilter) -> dict[State, int]:
    """Return the number of jobs in each state; every state is there."""
    counted = session.execute(select(Job.state, func.count()).where(*wanted.conditions()).group_by(Job.state))
    return dict.fromkeys(State, 0) | {State(state): number for state, number in counted}
