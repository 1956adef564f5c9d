"""The request and response bodies of jobs. Requests refuse unknown fields; responses may get new ones."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    RootModel,
    StrictBool,
    StringConstraints,
    field_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from api.jobs import examples
from api.jobs.schema_of import SchemaOf
from api.jobs.stored_types import AllocationOut, FailureOut, ProgressOut
from api.store.queue.listing import JobFilter, Order
from api.store.queue.waiting import Waiting
from api.store.states import State
from api.store.tables.jobs import Artifact, Job
from api.store.tables.publications import Publication, PublicationState
from quantcore.config.job_spec import JobOptions, JobSpec, MixConfig
from quantcore.config.presets import PresetChanges
from quantcore.config.recipes import Effort
from quantcore.errors import ConfigError
from quantcore.hub.names import is_remote, is_store_url
from quantcore.hub.target import Target
from quantcore.report.values import Summary

MAX_LABELS = 16
REVISION = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"
TOKEN_NAME = r"^[a-z][a-z0-9-]{0,62}$"  # no token of the Hub matches: one that is given by mistake is refused


def _printable(text: str) -> str:
    if not text.isprintable():
        raise PydanticCustomError(
            "invalid_text", "only printable characters: no line breaks, no control or direction marks"
        )
    return text


def _name_and_value(label: str) -> str:
    if not label.partition("=")[0] or "=" not in label:
        raise PydanticCustomError("invalid_labels", "a label is asked for as name=value")
    return label


Printable = Annotated[str, AfterValidator(_printable)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_printable)]
LabelName = Annotated[str, StringConstraints(min_length=1, max_length=64), AfterValidator(_printable)]
LabelValue = Annotated[str, StringConstraints(max_length=512), AfterValidator(_printable)]
Labels = Annotated[dict[LabelName, LabelValue], Field(max_length=MAX_LABELS)]
Label = Annotated[str, StringConstraints(max_length=577), AfterValidator(_printable), AfterValidator(_name_and_value)]
Priority = Annotated[int, Field(strict=True, ge=0, le=9)]
Seconds = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]


class RequestBody(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelRef(RequestBody):
    """A folder that the service can read, or a model on the Hugging Face Hub or in an object store.

    ``id`` is org/name on the Hub, or the URL of a folder, such as s3://bucket/models/name; a store has no revisions.
    ``hub_token``: the name of a token that the project keeps (``PUT /v1/hub-tokens/{name}``), never the token itself.
    """

    path: Annotated[str, Field(min_length=1, max_length=4096, examples=["/models/SmolLM2-135M-Instruct"])] | None = None
    id: Annotated[str, Field(examples=["org/name"])] | None = None
    revision: Annotated[str, Field(pattern=REVISION)] = "main"
    hub_token: Annotated[str, Field(pattern=TOKEN_NAME)] | None = None

    @model_validator(mode="after")
    def _make_sense(self) -> ModelRef:
        if (self.path is None) == (self.id is None):
            raise PydanticCustomError(
                "invalid_model", "give either `path` (a folder) or `id` (a model on the Hub or in a store)"
            )
        if self.path is not None and not self.path.startswith("/"):
            raise PydanticCustomError("invalid_model", "`path` must be absolute: it starts with /")
        if self.id is not None and not is_remote(self.id):
            raise PydanticCustomError("invalid_model_id", "`id` must look like org/name or s3://bucket/folder")
        if self.hub_token is not None and (self.id is None or is_store_url(self.id)):
            raise PydanticCustomError("invalid_model", "`hub_token` is for a model on the Hub")
        return self


class JobRequest(JobOptions):
    """A model, a scheme, and the options of a job.

    ``config`` is a preset with its changes, as {preset, group_size?}, a whole config in the engine's names (``GET
    /v1/config-schema``), or the ``quantization_config`` of a checkpoint of AMD Quark. ``mix``: the scheme of each
    layer is chosen when the job runs; then ``config`` may be left out, or hold ``algo_config`` and nothing else.
    ``goal``: scheme, algorithms and format are all chosen by measuring candidates; then none of them is given.
    """

    model: ModelRef
    config: dict[str, Any] = Field(default={}, examples=[{"preset": "w4a16"}])
    mix: MixConfig | None = None
    effort: Annotated[
        Effort | None,
        Field(
            description="The algorithms that are recommended for the scheme: `fast` rounds to nearest, `best`"
            " takes every one that improves quality. By default `balanced` for a preset, unless `algo_config` is given."
        ),
    ] = None

    @model_validator(mode="after")
    def _has_a_scheme(self) -> Self:
        if self.mix is None and self.goal is None and "config" not in self.model_fields_set:
            raise ConfigError(
                "The request names no scheme.",
                code="config_required",
                hint='Give a config, as {"preset": "w4a16"}, a mix, or a goal.',
                field="/config",
            )
        return self


class HardwareRef(RequestBody):
    """The hardware that a plan is checked against. ``devices`` of each node: 8x80GB is eight of 80 GB; empty: CPU."""

    devices: Annotated[str, Field(max_length=40, examples=["8x80GB"])] = ""
    nodes: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    host_memory: Annotated[str, Field(max_length=40, examples=["1TB"])] = ""
    disk: Annotated[str, Field(max_length=40, examples=["4TB"])] = ""


class PlanCreate(JobRequest):
    """The request body for a plan. With ``hardware`` its ``capacity`` says if the job fits, and how long it takes."""

    model_config = ConfigDict(json_schema_extra={"examples": [examples.PLAN_ON_REQUEST]})

    hardware: HardwareRef | None = None


class Limits(RequestBody):
    """A job's time limits, after which the service gives it up. Null means no limit; a paused job uses up neither."""

    max_runtime_s: Seconds | None = Field(default=None, description="For all attempts together; a retry starts anew.")
    max_pending_s: Seconds | None = Field(default=None, description="Until a worker takes it, each time it is queued.")


class PublishTo(Target):
    """The target of an artifact: a repository on the Hub (``repo_id`` and the fields after it), or ``to`` a URL.

    The service's operator allows the URLs. ``hub_token``: the name of the project's token to write with
    (``PUT /v1/hub-tokens/{name}``); by default the one that the job's model names. The service's own token is never
    used to write.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [examples.PUBLISH]})

    hub_token: Annotated[str, Field(pattern=TOKEN_NAME)] | None = None
    force: Annotated[
        StrictBool, Field(description="Publish also a result that is degraded or broken, or that missed its goal.")
    ] = False


class JobCreate(JobRequest):
    """The request body for a job: the work, and what the queue needs to know.

    Among waiting jobs the one with the highest ``priority`` (9) goes first, then the one that has waited longest.
    ``publish`` says where the artifact goes once it is verified.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [examples.JOB_REQUEST]})

    name: Text | None = None
    labels: Labels = Field(default={})
    priority: Priority = 5
    limits: Limits = Limits()
    publish: PublishTo | None = None


class JobPatch(RequestBody):
    """The request body for changing a job. Fields that are not named stay; ``labels`` replaces all labels.

    A ``pinned`` job is deleted by no retention, only by a `DELETE`.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"priority": 9, "labels": {"team": "search"}}]})

    name: Text | None = None
    labels: Labels = {}
    priority: Priority = 5
    pinned: StrictBool = False


class JobClone(RootModel[dict[str, Any]]):
    """A patch of the cloned job: the fields of a new job that differ, which is then validated as a ``JobCreate``.

    A clone is published only if ``publish`` is given.
    """

    model_config = ConfigDict(frozen=True)
    root: dict[str, Any] = Field(default={})
    CHANGED: ClassVar[type[RequestBody] | type[JobCreate]] = JobCreate  # whose fields are changed

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of a new job in which every field is optional and has no default."""
        job = handler.resolve_ref_schema(handler(JobCreate.__pydantic_core_schema__))
        properties = {
            name: {key: value for key, value in field.items() if key != "default"}
            for name, field in job["properties"].items()
        }
        return {
            "title": cls.__name__,
            "type": "object",
            "description": cls.__doc__,
            "additionalProperties": False,
            "properties": properties,
            "examples": [{"name": "again", "config": {"preset": "fp8"}}],
        }


class JobQuery(RequestBody):
    """The filter of a list or a count of jobs. Different parameters must all match."""

    state: list[State] = Field(default=[], description="In one of these; repeat it for several.")
    label: list[Label] = Field(default=[], max_length=MAX_LABELS, description="`name=value`; repeated: all of them.")
    model: Annotated[Printable, Field(max_length=4096)] | None = Field(
        default=None, description="Exactly this path or Hub id."
    )
    q: Text | None = Field(default=None, description="Text in the name, the id, the model or the preset.")
    created_after: AwareDatetime | None = None
    created_before: AwareDatetime | None = None
    sweep: Annotated[str, Field(pattern="^swp_[0-9a-f]{32}$")] | None = None
    one_per_sweep: bool = Field(default=False, description="Of the jobs of a sweep only the newest one.")

    def to_filter(self, project_id: str) -> JobFilter:
        return JobFilter(
            project_id=project_id,
            states=tuple(self.state),
            labels=tuple((name, value) for name, _, value in (label.partition("=") for label in self.label)),
            model=self.model,
            text=self.q,
            created_after=self.created_after,
            created_before=self.created_before,
            sweep_id=self.sweep,
            one_per_sweep=self.one_per_sweep,
        )


class JobListQuery(JobQuery):
    """The filter of a list of jobs, and the page of it."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    cursor: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="`next_cursor` of the page before, with the same filter."
    )
    order: Order = Field(
        default="newest",
        description="`queue`: that in which workers take jobs, the next one first. `size`, `kl` (divergence) and "
        "`perplexity` (the ratio to the original's): the least first, then the jobs without one.",
    )


class PresetConfig(PresetChanges):
    """A named scheme with changes, and the algorithms before and during the rounding."""

    preset: str
    algo_config: Any = None


class ArtifactOut(BaseModel):
    """The result on the service's disk; its files are at ``/v1/jobs/{id}/artifacts``."""

    manifest_sha256: str
    bytes: int
    path: str

    @classmethod
    def of(cls, artifact: Artifact) -> ArtifactOut:
        return cls(manifest_sha256=artifact.manifest_sha256, bytes=artifact.num_bytes, path=artifact.path)


class PublicationOut(BaseModel):
    """The newest publication of a job's artifact.

    ``pending`` with an ``error``: it is tried again. ``revision`` is the commit on the Hub, or the SHA-256 of the
    MANIFEST.json at a URL. A ``failed`` one can be retried: ``POST .../publish`` without a body.
    """

    id: str
    state: PublicationState
    target: dict[str, Any]
    hub_token: str | None
    progress: Annotated[dict[str, Any], SchemaOf(ProgressOut)] | None
    revision: str | None
    url: str | None
    error: Annotated[dict[str, Any], SchemaOf(FailureOut)] | None
    attempt: int
    created_at: datetime
    finished_at: datetime | None

    @classmethod
    def of(cls, publication: Publication) -> PublicationOut:
        return cls(**{name: getattr(publication, name) for name in cls.model_fields})


class PhaseOut(BaseModel):
    """A phase of the present attempt and its progress: ``running``, ``done``, or ``stopped`` with the attempt."""

    name: str
    state: Literal["running", "done", "stopped"]
    started_at: datetime
    ended_at: datetime | None
    done: int | float | None
    total: int | float | None
    unit: str | None


class SubmitterOut(BaseModel):
    """The key that a job was submitted with."""

    key_id: str
    name: str


JOB_COLUMNS = {*Job.__table__.columns.keys(), "progress_kept_until"} - {"submitted_by", "spec", *JobSpec.model_fields}


def asked_of(job: Job) -> dict[str, Any]:
    """Return the stored JobSpec in the form of a request: the schemes of a mix by name alone."""
    mix = job.spec.get("mix")
    named = {name: value for name, value in mix.items() if name != "configs"} if mix else None
    return {**job.spec, "mix": named}


class JobStatus(BaseModel):
    """The name of a job, its request beside the options, and its state."""

    id: str
    name: str | None
    labels: dict[str, str]
    priority: int
    pinned: bool
    limits: Limits
    state: State
    state_times: dict[State, datetime]
    waiting_reason: str | None
    queue_position: int | None
    allocation: AllocationOut | None
    phase: str | None
    progress: Annotated[dict[str, Any], SchemaOf(ProgressOut)] | None
    eta_s: float | None
    phases: list[PhaseOut]
    model: dict[str, Any]
    preset: str | None
    config: dict[str, Any]
    mix: dict[str, Any] | None
    needs_memory_bytes: int | None
    avoid_host: str | None
    progress_kept_until: datetime | None
    cloned_from: str | None
    sweep_id: str | None
    sweep_values: dict[str, Any] | None
    submitted_by: SubmitterOut | None
    attempt: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    error: Annotated[dict[str, Any], SchemaOf(FailureOut)] | None
    summary: Annotated[dict[str, Any], SchemaOf(Summary)] | None
    artifact: ArtifactOut | None
    publish: dict[str, Any] | None
    publication: PublicationOut | None
    cancel_requested: bool


class JobOut(JobOptions, JobStatus):
    """A job as clients see it: the request, with every default filled in, and the job's state.

    ``submitted_by`` is null for a job that was submitted on the machine itself. ``state_times``: the last time at which
    it entered each state. ``waiting_reason`` and ``queue_position`` (1 is next) are there while it waits.
    ``allocation`` is None for an attempt on a worker's own machine. ``eta_s``: about the seconds left of the whole job,
    by earlier jobs of its project that did the same kind of work; null without such a job. ``progress.eta_s`` is of the
    phase alone. ``error`` has a stable ``code``, a ``hint``, and says in ``retryable`` whether a retry can help; until
    ``progress_kept_until`` that continues after the last saved block. ``publish`` is the target from the start;
    ``publication``, None if there was none, is the state of that or of a later ``POST .../publish``.
    """

    model_config = ConfigDict(
        extra="ignore", json_schema_serialization_defaults_required=True, json_schema_extra={"examples": [examples.JOB]}
    )

    @field_serializer("calibration", "evaluation", mode="wrap")
    def _without_nulls(self, value: Any, serialize: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        """Serialize without nulls. No return type is annotated, so that the JSON schema stays that of the fields."""
        return _without_nulls(serialize(value))

    @classmethod
    def of(
        cls,
        job: Job,
        artifact: Artifact | None,
        waiting: Waiting | None,
        publication: Publication | None,
        key_name: str | None,
        eta_s: float | None,
    ) -> JobOut:
        """Return the response for a job. ``key_name``: the name of the key that submitted it."""
        columns = {name: getattr(job, name) for name in cls.model_fields.keys() & JOB_COLUMNS}
        return cls(
            **asked_of(job) | columns,
            submitted_by=SubmitterOut(key_id=job.submitted_by, name=key_name or "") if job.submitted_by else None,
            artifact=ArtifactOut.of(artifact) if artifact else None,
            publication=PublicationOut.of(publication) if publication else None,
            cancel_requested=job.cancel_requested_at is not None,
            eta_s=eta_s,
            limits=Limits(max_runtime_s=job.max_runtime_s, max_pending_s=job.max_pending_s),
            waiting_reason=waiting.reason if waiting else None,
            queue_position=waiting.position if waiting else None,
        )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return [_without_nulls(member) for member in value] if isinstance(value, list | tuple) else value


class JobPage(BaseModel):
    """A page of the list of jobs, newest first; ``next_cursor`` asks for the next page."""

    data: list[JobOut]
    has_more: bool
    next_cursor: str | None


class SummaryOut(BaseModel):
    """The number of jobs, in all and in each state."""

    total: int
    by_state: dict[State, int]
