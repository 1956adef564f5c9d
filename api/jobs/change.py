"""The route that says whether one job's result is worse than another's: a paired test on the same tokens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from api.http.deps import SessionsDep
from api.http.errors import may
from api.http.security import Reader
from api.jobs import service
from api.jobs.artifacts import find_artifact
from api.jobs.endpoints import JobId
from quantcore.errors import ConfigError
from quantcore.report.compare import paired_change
from quantcore.report.quality import PairedChange

router = APIRouter(prefix="/jobs/{job_id}/change", tags=["jobs"], responses=may(404, 409, 422))


class ChangeOut(BaseModel):
    """The change from one result to another; without a test on the same tokens, why there is none."""

    change: PairedChange | None = None
    not_tested: str | None = None


@router.get("")
def get_change(
    job_id: JobId,
    base: Annotated[str, Query(pattern="^job_[0-9a-f]{32}$", description="The job whose result is the baseline.")],
    caller: Reader,
    sessions: SessionsDep,
) -> ChangeOut:
    """Compare the result of a job with that of ``base``, by what the reports of both keep of each window of text."""
    artifacts = [find_artifact(sessions, caller, each)[0] for each in (job_id, base)]
    new, old = (service.read_report(artifact) for artifact in artifacts)
    if new is None or old is None:
        return ChangeOut(not_tested="The report of one was written by another version.")
    try:
        return ChangeOut(change=paired_change(new, old))
    except ConfigError as error:
        return ChangeOut(not_tested=error.message)
