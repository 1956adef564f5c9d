"""The route of a project's usage of its quotas: ``GET /v1/usage``."""

from __future__ import annotations

from fastapi import APIRouter

from api.http.deps import ContextDep
from api.http.security import Reader
from api.projects.schemas import ProjectUsage, QuotaOut
from api.store.accounts import projects
from api.store.accounts.projects import QUOTAS
from api.store.tables.jobs import Project

router = APIRouter(tags=["projects"])


@router.get("/usage")
def get_usage(caller: Reader, context: ContextDep) -> ProjectUsage:
    """Return the usage of each quota of the key's project, and the limit that holds for it."""
    with context.sessions.begin() as session:
        project = session.get_one(Project, caller.project_id)
        rows = vars(projects.measure(session, project.id))
    used = rows | {"num_streams": context.feed.count_streams(project.id)}
    return ProjectUsage(
        project_id=project.id,
        quotas=[
            QuotaOut(quota=name, unit=quota.unit, used=used[quota.used], limit=projects.limit_of(project, name))
            for name, quota in QUOTAS.items()
        ],
    )
