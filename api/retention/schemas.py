"""The request and response bodies of retention."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.schemas import RequestBody
from api.store.queue.retention import Due, Keep

KeepLast = Annotated[int, Field(strict=True, ge=1, le=1_000_000, description="Number of newest jobs to keep.")]
KeepDays = Annotated[
    int, Field(strict=True, ge=1, le=36_500, description="Days for which jobs are kept after they ended.")
]


class PolicyIn(RequestBody):
    """The request body for a policy. A job stays as long as one of the two limits keeps it; without both all jobs stay.

    Pinned jobs always stay. ``keep_last`` counts jobs that succeeded apart from those that did not: failures push no
    result out.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"keep_last": 20, "keep_days": 30}]})

    keep_last: KeepLast | None = None
    keep_days: KeepDays | None = None

    def to_keep(self) -> Keep:
        return Keep(self.keep_last, self.keep_days)


class PolicyOut(BaseModel):
    """The project's policy, in addition to the operator's for all projects: ``service_keep_*_days``. None: no limit.

    Pinned jobs apart, whatever is older than the operator's days goes in any case.
    """

    keep_last: int | None
    keep_days: int | None
    service_keep_jobs_days: float | None
    service_keep_logs_days: float | None


class DueOut(BaseModel):
    """A job that the policy does not keep, and the reason."""

    id: str
    name: str | None
    state: str
    finished_at: datetime
    bytes: int
    reason: str

    @classmethod
    def of(cls, due: Due, keep: Keep) -> DueOut:
        reasons = []
        if keep.days is not None:
            reasons.append(f"it ended {due.age_days:.1f} days ago; jobs are kept for {keep.days} days")
        if keep.last is not None:
            others = "succeeded" if due.state == "succeeded" else "failed or were cancelled"
            reasons.append(f"{due.num_newer} jobs that {others} ended after it; only {keep.last} are kept")
        shown = {name: getattr(due, name) for name in ("name", "state", "finished_at")}
        return cls(id=due.job_id, bytes=due.num_bytes, reason="; ".join(reasons), **shown)


class DueList(BaseModel):
    """A list of jobs that a policy does not keep, the oldest first. ``has_more``: there are more than the list has."""

    data: list[DueOut]
    bytes: int
    num_pinned: int
    has_more: bool

    @classmethod
    def of(cls, due: Sequence[Due], keep: Keep, num_pinned: int, has_more: bool) -> DueList:
        size = sum(job.num_bytes for job in due)
        data = [DueOut.of(job, keep) for job in due]
        return cls(data=data, bytes=size, num_pinned=num_pinned, has_more=has_more)
