"""The request and response bodies of projects."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.schemas import RequestBody, Text
from api.store.accounts.projects import Usage
from api.store.tables.jobs import Project

Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
Rate = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]


class ProjectCreate(RequestBody):
    """The request body for a project and its quotas. A null quota sets no limit, unless a default is named here.

    ``max_waiting`` counts jobs in queued, retry_wait and paused. ``max_running``: more wait in the queue.
    ``max_stored_bytes``: artifacts; the one of a running job is kept whatever its size. ``requests_per_minute``: null
    is the service's setting. ``max_datasets`` and ``max_dataset_bytes``: uploaded files. ``max_uploads``: those that
    are not complete; null is 100. ``max_streams``: of events and logs; null is 1000. ``max_webhooks``: null is 20.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "search", "max_running": 2}]})

    name: Text
    max_waiting: Count | None = None
    max_running: Count | None = None
    max_stored_bytes: Bytes | None = None
    requests_per_minute: Rate | None = None
    max_datasets: Count | None = None
    max_dataset_bytes: Bytes | None = None
    max_uploads: Count | None = None
    max_streams: Count | None = None
    max_webhooks: Count | None = None


class ProjectPatch(ProjectCreate):
    """The request body for changing a project. Fields that are not named stay."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"max_running": 4}, {"max_stored_bytes": None}]})

    name: Text = ""


class UsageOut(BaseModel):
    """The present usage of the project, in the units of its quotas."""

    num_waiting: int
    num_running: int
    stored_bytes: int
    num_datasets: int
    dataset_bytes: int
    num_uploads: int
    num_webhooks: int


class ProjectOut(BaseModel):
    """A project, its quotas, and how much of them it uses."""

    id: str
    name: str
    max_waiting: int | None
    max_running: int | None
    max_stored_bytes: int | None
    requests_per_minute: int | None
    max_datasets: int | None
    max_dataset_bytes: int | None
    max_uploads: int | None
    max_streams: int | None
    max_webhooks: int | None
    created_at: datetime
    usage: UsageOut

    @classmethod
    def of(cls, project: Project, usage: Usage) -> ProjectOut:
        columns = {name: getattr(project, name) for name in cls.model_fields if name != "usage"}
        return cls(**columns, usage=UsageOut(**vars(usage)))


class QuotaOut(BaseModel):
    """A quota: its present usage, in ``unit``, and the limit that holds. Null sets none."""

    quota: str
    unit: str
    used: int
    limit: int | None


class ProjectUsage(BaseModel):
    """All quotas of the project of the key; the header ``RateLimit`` of every response counts the requests."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "project_id": "prj_00000000000000000000000000000000",
                    "quotas": [{"quota": "max_waiting", "unit": "jobs", "used": 12, "limit": 500}],
                }
            ]
        }
    )

    project_id: str
    quotas: list[QuotaOut]


class ProjectList(BaseModel):
    """A list of projects, the oldest first."""

    data: list[ProjectOut]
