"""The routes of models: what became of each, and what it came from."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.http.conditional import UNCHANGED, PagesDep
from api.http.deps import SessionsDep
from api.http.errors import Problem, may
from api.http.security import Reader
from api.jobs import cursor as cursors
from api.lineage.schemas import ModelListQuery, ModelOut, ModelPage, ParentOut, ResultListQuery, ResultOut, ResultPage
from api.store.engine import reading
from api.store.queue import lineage, publications

router = APIRouter(prefix="/models", tags=["models"])


@router.get("", response_model=ModelPage, responses=UNCHANGED | may(422))
def list_models(
    query: Annotated[ModelListQuery, Query()],
    caller: Reader,
    sessions: SessionsDep,
    pages: PagesDep,
) -> ModelPage | Response:
    """List the models that the project's jobs used, newest activity first; the Link header leads to the next page."""
    filtered = cursors.fingerprint("models", caller.project_id)
    after = cursors.decode(query.cursor, filtered)
    with reading(sessions) as session:
        models = lineage.page_of_models(session, caller.project_id, limit=query.limit + 1, after=after)
    last = models[query.limit - 1] if len(models) > query.limit else None
    next_cursor = cursors.encode(last.active_at, last.last_job_id, filtered) if last else None
    shown = [ModelOut.of(used) for used in models[: query.limit]]
    page = ModelPage(data=shown, has_more=last is not None, next_cursor=next_cursor)
    return pages.answer(page, next_cursor)


@router.get("/results", response_model=ResultPage, responses=UNCHANGED | may(404, 422))
def list_results(
    query: Annotated[ResultListQuery, Query()],
    caller: Reader,
    sessions: SessionsDep,
    pages: PagesDep,
) -> ResultPage | Response:
    """List the results of a model, newest first, and the result that the model itself came from, if any."""
    project_id, name = caller.project_id, query.model
    filtered = cursors.fingerprint("results", project_id, name)
    after = cursors.decode(query.cursor, filtered)
    with reading(sessions) as session:
        jobs = lineage.page_of_results(session, project_id, name, limit=query.limit + 1, after=after)
        if not jobs and not lineage.is_used(session, project_id, name):
            raise Problem(
                404,
                "model_not_used",
                f"No job of this project used the model '{name}'.",
                hint="GET /v1/models lists the used models. Paths are stored without links.",
            )
        ids = [job.id for job in jobs[: query.limit]]
        published = publications.find_last(session, ids)
        children = lineage.find_children(session, project_id, ids)
        parent = lineage.find_parents(session, project_id, [name]).get(name)
    last = jobs[query.limit - 1] if len(jobs) > query.limit else None
    next_cursor = cursors.encode(last.finished_at, last.id, filtered) if last and last.finished_at else None
    page = ResultPage(
        model=name,
        derived_from=ParentOut.of(parent),
        data=[ResultOut.of_job(job, published.get(job.id), children.get(job.id, [])) for job in jobs[: query.limit]],
        has_more=last is not None,
        next_cursor=next_cursor,
    )
    return pages.answer(page, next_cursor)
