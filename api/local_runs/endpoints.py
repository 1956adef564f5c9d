"""The routes of local runs: results that the command line made on this machine, for the operator of ``bitfoundry up``.

They are shown if the settings say so (``show_local_runs``), and only with a key that has the scope ``operator``: the
index belongs to the person who started the service.
"""

from __future__ import annotations

from pathlib import Path as FolderPath
from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict

from api.http import docs
from api.http.deps import Context, ContextDep
from api.http.errors import Problem, may
from api.http.security import Operator
from quantcore.errors import ConfigError
from quantcore.report import html, local_runs
from quantcore.report.compare import read_report
from quantcore.report.local_runs import LocalRun

MAX_LISTED = 100
HEADERS = docs.HEADERS | {"Cache-Control": "no-store"}

router = APIRouter(prefix="/local-runs", tags=["local runs"])

RunId = Annotated[str, Path(pattern="^run_[0-9a-f]{32}$")]


class LocalRunOut(BaseModel):
    """A result of the command line: its ``folder`` on the machine, the model and the config that made it."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    name: str
    created_at: str
    folder: str
    model: str
    config: str
    size_bytes: int
    verdict: str | None


class LocalRunList(BaseModel):
    """The newest local runs, and the number of all."""

    data: list[LocalRunOut]
    total: int


@router.get("")
def list_local_runs(
    _: Operator, context: ContextDep, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20
) -> LocalRunList:
    """List the newest results that the command line made on this machine. Only `bitfoundry up` shows them."""
    runs = _all(context)
    return LocalRunList(data=[LocalRunOut.model_validate(run) for run in runs[:limit]], total=len(runs))


@router.get("/{run_id}/report", response_class=HTMLResponse, responses=may(404))
def show_local_report(run_id: RunId, _: Operator, context: ContextDep) -> HTMLResponse:
    """Show the report of a local run as a page that runs no script and loads nothing."""
    run = next((run for run in _all(context) if run.id == run_id), None)
    if run is None:
        hint = "GET /v1/local-runs lists them; a run whose folder was removed is gone."
        raise Problem(404, "local_run_not_found", "There is no such local run.", hint=hint)
    try:
        report = read_report(FolderPath(run.folder))
    except ConfigError as error:
        raise Problem(404, error.code, error.message, hint="Quantize the model again.") from error
    return HTMLResponse(
        html.page(report, f"{run.folder}, made on {run.created_at[:10]} with {run.config}."), 200, HEADERS
    )


def _all(context: Context) -> list[LocalRun]:
    return local_runs.runs() if context.settings.show_local_runs else []
