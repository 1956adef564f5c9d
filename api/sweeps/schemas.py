"""The request and response bodies of sweeps."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from api.jobs.schemas import JobCreate, JobOut, Printable, RequestBody, Text
from api.lineage.schemas import ResultBrief, brief_of
from api.store.queue.sweeps import SweepInShort
from api.store.states import State
from api.store.tables.jobs import Sweep

MAX_SWEEP_JOBS = 100
MAX_AXES = 8


def _pointer_into_a_job(pointer: str) -> str:
    field = pointer.split("/")[1] if pointer.startswith("/") else ""
    if field not in JobCreate.model_fields:
        raise PydanticCustomError(
            "invalid_pointer",
            "an axis is a JSON pointer into a job, such as /config/preset or /calibration/num_samples",
        )
    return pointer


Pointer = Annotated[Printable, StringConstraints(max_length=200), AfterValidator(_pointer_into_a_job)]
Axis = Annotated[list[Any], Field(min_length=1, max_length=MAX_SWEEP_JOBS)]


class SweepCreate(RequestBody):
    """The request body for a sweep: one job for every combination of the values in ``matrix``.

    Each value is put into ``job`` where its pointer says.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "which scheme",
                    "job": {"model": {"path": "/models/SmolLM2-135M-Instruct"}, "export": ["compressed_tensors"]},
                    "matrix": {"/config": [{"preset": "fp8"}, {"preset": "w4a16"}], "/calibration/num_samples": [32]},
                }
            ]
        }
    )

    name: Text | None = None
    job: dict[str, Any] = Field(description="The body of `POST /v1/jobs`, without the fields that the matrix sets.")
    matrix: dict[Pointer, Axis] = Field(min_length=1, max_length=MAX_AXES)


class SweepOut(BaseModel):
    """A sweep and its current jobs, in the order of its matrix."""

    id: str
    name: str | None
    created_at: datetime
    matrix: dict[str, list[Any]]
    total: int
    by_state: dict[State, int]
    jobs: list[JobOut]

    @classmethod
    def of(cls, sweep: Sweep, jobs: list[JobOut]) -> SweepOut:
        by_state = dict.fromkeys(State, 0)
        for job in jobs:
            by_state[job.state] += 1
        columns = {name: getattr(sweep, name) for name in ("id", "name", "created_at", "matrix")}
        return cls(**columns, total=len(jobs), by_state=by_state, jobs=jobs)


class SweepBrief(BaseModel):
    """A sweep in short. ``axes`` are the JSON pointers of its matrix with their values.

    ``model`` is that of its first job. ``best`` is a result with the best verdict: of those at most 5 % larger than the
    smallest, the one with the smallest KL divergence. Jobs that were deleted do not count.
    """

    id: str
    name: str | None
    created_at: datetime
    model: str | None
    axes: dict[str, list[Any]]
    total: int
    by_state: dict[State, int]
    best: ResultBrief | None

    @classmethod
    def of(cls, sweep: SweepInShort) -> SweepBrief:
        by_state = dict.fromkeys(State, 0) | sweep.by_state
        return cls(
            id=sweep.id,
            name=sweep.name,
            created_at=sweep.created_at,
            model=sweep.model,
            axes=sweep.matrix,
            total=sum(by_state.values()),
            by_state=by_state,
            best=brief_of(sweep.best) if sweep.best else None,
        )


class SweepPage(BaseModel):
    """A page of the list of sweeps, newest first; ``next_cursor`` asks for the next page."""

    data: list[SweepBrief]
    has_more: bool
    next_cursor: str | None
