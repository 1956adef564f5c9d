"""The jobs of a project by their labels: the names that occur, and the jobs with each value of one of them."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field

from api.jobs.schemas import JobQuery, LabelName
from api.store.states import State

MAX_GROUPS = 100


class GroupsQuery(JobQuery):
    """The filter of the jobs, and the label that groups them."""

    by: LabelName = Field(description="Name of the label.")


class LabelNameOut(BaseModel):
    """The name of a label, and how many jobs have it."""

    name: str
    num_jobs: int


class LabelNames(BaseModel):
    """The labels that the most jobs have; ``has_more``: there are others."""

    data: list[LabelNameOut]
    has_more: bool


class GroupOut(BaseModel):
    """The jobs with one value of a label, or with None those without the label."""

    value: str | None
    total: int
    by_state: dict[State, int]
    newest_at: datetime


class Groups(BaseModel):
    """The groups with the newest jobs, the newest first; ``has_more``: there are others."""

    data: list[GroupOut]
    has_more: bool
