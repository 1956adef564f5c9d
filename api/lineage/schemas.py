"""The request and response bodies of models and their results."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.schemas import Printable, RequestBody, asked_of
from api.store.queue.lineage import Parent, UsedModel
from api.store.tables.jobs import Job
from api.store.tables.publications import Publication, PublicationState

MODEL = "/models/SmolLM2-135M-Instruct"
JOB = "job_01a200dc5edf7cfaa251b183f95c582d"
BRIEF: dict[str, Any] = {
    "job_id": JOB,
    "finished_at": "2026-11-22T08:04:10Z",
    "recipe": {"preset": "w4a16", "mix": None, "goal": None, "algorithms": ["gptq"]},
    "size_before_bytes": 269000000,
    "size_after_bytes": 90000000,
    "verdict": "good",
    "kl_mean": 0.061,
    "kl_stderr": 0.002,
}
RESULT: dict[str, Any] = {
    **BRIEF,
    "name": "nightly",
    "sha": None,
    "export": ["compressed_tensors"],
    "perplexity_ratio": 1.05,
    "cloned_from": None,
    "publication": {"state": "published", "url": "https://huggingface.co/org/SmolLM2-135M-Instruct-w4a16"},
    "derived_models": [],
}


class ModelListQuery(RequestBody):
    """The page of a list of models."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    cursor: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="`next_cursor` of the previous page."
    )


class ResultListQuery(ModelListQuery):
    """The model whose results are listed, and the page of them."""

    model: Annotated[Printable, Field(min_length=1, max_length=4096)] = Field(
        description="The model's `name` in `GET /v1/models`: an id on the Hub, or a path on the server."
    )


class RecipeOut(BaseModel):
    """The recipe of a result: a ``preset``, a ``mix`` of schemes, or a ``goal``; with none of them a whole config.

    ``algorithms`` is null with a goal: then the job chose them, and its report names them.
    """

    preset: str | None
    mix: dict[str, Any] | None
    goal: dict[str, Any] | None
    algorithms: list[str] | None

    @classmethod
    def of(cls, job: Job) -> RecipeOut:
        goal = job.spec.get("goal")
        algorithms = None if goal else [each["name"] for each in job.spec["config"].get("algo_config", ())]
        return cls(preset=job.preset, mix=asked_of(job)["mix"], goal=goal, algorithms=algorithms)


class ResultBrief(BaseModel):
    """A result in short. What was not measured is null. ``verdict`` is the level of its ``Verdict``.

    ``kl_mean`` is the mean KL divergence from the original in nats per token, and ``kl_stderr`` its standard error,
    which results of earlier versions lack.
    """

    job_id: str
    finished_at: datetime
    recipe: RecipeOut
    size_before_bytes: int | None
    size_after_bytes: int | None
    verdict: str | None
    kl_mean: float | None
    kl_stderr: float | None


class PublicationBrief(BaseModel):
    """The newest publication of a result in short; ``url`` is null until it has succeeded."""

    state: PublicationState
    url: str | None

    @classmethod
    def of(cls, publication: Publication) -> PublicationBrief:
        return cls(state=PublicationState(publication.state), url=publication.url)


class ResultOut(ResultBrief):
    """A result of a model.

    ``sha`` is the commit of a model on the Hub that was quantized. ``cloned_from`` is the id of a job, which may be
    deleted since. ``derived_models`` are the names of models in this result's artifact that other jobs quantized.
    """

    name: str | None
    sha: str | None
    export: list[str]
    perplexity_ratio: float | None
    cloned_from: str | None
    publication: PublicationBrief | None
    derived_models: list[str]

    @classmethod
    def of_job(cls, job: Job, publication: Publication | None, derived_models: list[str]) -> ResultOut:
        """Return the result of a job that has succeeded."""
        summary = job.summary or {}
        return cls(
            **brief_of(job).model_dump(),
            name=job.name,
            sha=job.model.get("sha"),
            export=job.spec["export"],
            perplexity_ratio=summary.get("perplexity_ratio"),
            cloned_from=job.cloned_from,
            publication=PublicationBrief.of(publication) if publication else None,
            derived_models=derived_models,
        )


class ParentOut(BaseModel):
    """The job whose artifact a model lies in, and the name of the model that this job quantized."""

    job_id: str
    model: str

    @classmethod
    def of(cls, parent: Parent | None) -> ParentOut | None:
        return cls(job_id=parent.job_id, model=parent.model) if parent else None


class ModelOut(BaseModel):
    """A model that jobs of the project used. ``name`` is its id on the Hub, or its path on the server.

    ``num_results`` counts the jobs that have succeeded. ``active_at`` is when one of the jobs was last submitted,
    started or ended. ``best`` is a result with the best verdict: of those at most 5 % larger than the smallest, the one
    with the smallest KL divergence. ``derived_from`` is set for a path in the artifact of a job of the project that is
    not deleted.
    """

    name: str
    num_jobs: int
    num_results: int
    active_at: datetime
    newest: ResultBrief | None
    best: ResultBrief | None
    derived_from: ParentOut | None

    @classmethod
    def of(cls, used: UsedModel) -> ModelOut:
        return cls(
            name=used.name,
            num_jobs=used.num_jobs,
            num_results=used.num_results,
            active_at=used.active_at,
            newest=brief_of(used.newest) if used.newest else None,
            best=brief_of(used.best) if used.best else None,
            derived_from=ParentOut.of(used.derived_from),
        )


class ModelPage(BaseModel):
    """A page of the list of models, newest activity first; ``next_cursor`` asks for the next page."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "data": [
                        {
                            "name": MODEL,
                            "num_jobs": 3,
                            "num_results": 2,
                            "active_at": "2026-11-22T08:04:10Z",
                            "newest": BRIEF,
                            "best": BRIEF,
                            "derived_from": None,
                        }
                    ],
                    "has_more": False,
                    "next_cursor": None,
                }
            ]
        }
    )

    data: list[ModelOut]
    has_more: bool
    next_cursor: str | None


class ResultPage(BaseModel):
    """The results of a model, newest first, and the result that the model itself came from, if any."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": MODEL, "derived_from": None, "data": [RESULT], "has_more": False, "next_cursor": None}
            ]
        }
    )

    model: str
    derived_from: ParentOut | None
    data: list[ResultOut]
    has_more: bool
    next_cursor: str | None


def brief_of(job: Job) -> ResultBrief:
    """Return the result of a job that has succeeded, in short."""
    assert job.finished_at is not None  # a constraint of the table says so
    summary = job.summary or {}
    figures = ("size_before_bytes", "size_after_bytes", "kl_mean", "kl_stderr")
    return ResultBrief(
        job_id=job.id,
        finished_at=job.finished_at,
        recipe=RecipeOut.of(job),
        verdict=(summary.get("verdict") or {}).get("level"),
        **{name: summary.get(name) for name in figures},
    )
