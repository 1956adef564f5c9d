"""What clients send and get. Requests refuse unknown fields; answers may grow new ones."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from api.jobs import examples
from api.jobs.schema_of import SchemaOf
from api.store.queue.listing import JobFilter
from api.store.queue.waiting import Waiting
from api.store.states import State
from api.store.tables.jobs import Artifact, Job
from api.store.tables.publications import Publication, PublicationState
from quantcore.config.quantization import DEFAULT_SHARD_SIZE, CalibrationConfig, parse_size
from quantcore.config.task import Evaluation, Gate, MixConfig, check_tasks
from quantcore.errors import ConfigError
from quantcore.hub.download import is_model_id
from quantcore.hub.target import Target
from quantcore.report.values import Summary

MAX_LABELS = 16
REVISION = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"
TOKEN_NAME = r"^[a-z][a-z0-9-]{0,62}$"  # no token of the Hub looks so: one that is given by mistake is refused


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
Nodes = Annotated[int, Field(strict=True, ge=1, le=64)]
Seconds = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]


class RequestBody(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelRef(RequestBody):
    """A folder that the service can read, or a model on the Hugging Face Hub.

    ``hub_token``: the name of a token that the project keeps (``PUT /v1/hub-tokens/{name}``), never the token itself.
    """

    path: Annotated[str, Field(min_length=1, max_length=4096, examples=["/models/SmolLM2-135M-Instruct"])] | None = None
    id: Annotated[str, Field(examples=["org/name"])] | None = None
    revision: Annotated[str, Field(pattern=REVISION)] = "main"
    hub_token: Annotated[str, Field(pattern=TOKEN_NAME)] | None = None

    @model_validator(mode="after")
    def _make_sense(self) -> ModelRef:
        if (self.path is None) == (self.id is None):
            raise PydanticCustomError("invalid_model", "give either `path` (a folder) or `id` (a model on the Hub)")
        if self.path is not None and not self.path.startswith("/"):
            raise PydanticCustomError("invalid_model", "`path` must be absolute: it starts with /")
        if self.id is not None and not is_model_id(self.id):
            raise PydanticCustomError("invalid_model_id", "`id` must look like org/name")
        if self.hub_token is not None and self.id is None:
            raise PydanticCustomError("invalid_model", "`hub_token` is for a model on the Hub")
        return self


class PlanCreate(RequestBody):
    """What a plan needs.

    ``config`` is {preset, group_size?, exclude?, kv_cache?}, a whole config in the engine's names (``GET
    /v1/config-schema``), or the ``quantization_config`` of a checkpoint of AMD Quark. ``file2file``: weights that need
    no data go from file to file and no model is run, nor measured. ``shard_blocks``: a worker of several processes
    holds each block in slices; null: where its devices have too little memory otherwise. ``mix``: the scheme of each
    layer is chosen when the job runs; then ``config`` may be left out, or hold ``algo_config`` and nothing else.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [examples.PLAN_REQUEST]})

    model: ModelRef
    config: dict[str, Any] = Field(default={}, examples=[{"preset": "w4a16"}])
    mix: MixConfig | None = None
    calibration: CalibrationConfig = CalibrationConfig()
    export: tuple[str, ...] = Field(default=("quark",), max_length=16)
    file2file: StrictBool = False
    shard_blocks: StrictBool | None = None

    @model_validator(mode="after")
    def _has_a_scheme(self) -> Self:
        if self.mix is None and "config" not in self.model_fields_set:
            raise ConfigError(
                "The request names no scheme.",
                code="config_required",
                hint='Give a config, as {"preset": "w4a16"}, or a mix.',
                field="/config",
            )
        return self


class HardwareRef(RequestBody):
    """What a plan is held against. ``devices`` of each node: eight of 80 GB are ``8x80GB``, none is its CPU."""

    devices: Annotated[str, Field(max_length=40, examples=["8x80GB"])] = ""
    nodes: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    host_memory: Annotated[str, Field(max_length=40, examples=["1TB"])] = ""
    disk: Annotated[str, Field(max_length=40, examples=["4TB"])] = ""


class PlanOn(PlanCreate):
    """A plan, and what it is to be held against: the answer's ``capacity`` then says whether it fits, and how long it
    would take."""

    model_config = ConfigDict(json_schema_extra={"examples": [examples.PLAN_ON_REQUEST]})

    hardware: HardwareRef | None = None


class Limits(RequestBody):
    """When the service gives a job up. Without a number there is no limit; a job that is paused uses up neither."""

    max_runtime_s: Seconds | None = Field(default=None, description="For all attempts together; a retry starts anew.")
    max_pending_s: Seconds | None = Field(default=None, description="Until a worker takes it, each time it is queued.")


def _is_a_size(text: str) -> str:
    parse_size(text)
    return text


ShardSize = Annotated[str, StringConstraints(max_length=20), AfterValidator(_is_a_size), Field(examples=["5GB"])]


class PublishTo(Target):
    """Where an artifact shall go: to a repository on the Hub (``repo_id`` and the fields after it), or ``to`` a URL
    that the service's operator allows.

    ``hub_token``: the name of the project's token to write with (``PUT /v1/hub-tokens/{name}``); of a job whose model
    names one, that one unless given. The service's own token is never used to write.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [examples.PUBLISH]})

    hub_token: Annotated[str, Field(pattern=TOKEN_NAME)] | None = None


class JobCreate(PlanCreate):
    """A plan that is to be carried out, with a name and labels to find it by.

    Of waiting jobs that of the highest ``priority`` goes first (9), then the one that has waited longest. Files of
    weights are no larger than ``max_shard_size`` (5GB, 500MB), unless a tensor is; gguf is one file. ``gate``: what a
    result that misses a limit means: ``fail`` fails the job and keeps the artifact apart, ``warn`` says so.
    ``evaluation``: how the result is measured. ``nodes``: how many workers, with one disk in common, do the job
    together. ``publish``: where the artifact shall go once it is proven.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [examples.JOB_REQUEST]})

    name: Text | None = None
    labels: Labels = {}
    priority: Priority = 5
    limits: Limits = Limits()
    max_shard_size: ShardSize = DEFAULT_SHARD_SIZE
    gate: Gate = "warn"
    evaluation: Evaluation = Evaluation()
    nodes: Nodes = 1
    publish: PublishTo | None = None

    @model_validator(mode="after")
    def _can_run_so(self) -> JobCreate:
        check_tasks(self.evaluation, file2file=self.file2file)
        return self


class JobPatch(RequestBody):
    """What to change; what is not named stays. ``labels`` takes the place of all labels. A job that is ``pinned`` is
    deleted by nobody's retention, only by a `DELETE`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"priority": 9, "labels": {"team": "search"}}]})

    name: Text | None = None
    labels: Labels = {}
    priority: Priority = 5
    pinned: StrictBool = False


class JobClone(RequestBody):
    """What shall differ from the job that is cloned, in the fields of a new job; nothing need be given. A clone is
    published only if that is asked for anew."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "again", "config": {"preset": "fp8"}}]})

    model: ModelRef | None = None
    config: dict[str, Any] | None = None
    mix: MixConfig | None = None
    calibration: CalibrationConfig | None = None
    export: tuple[str, ...] | None = Field(default=None, max_length=16)
    name: Text | None = None
    labels: Labels | None = None
    priority: Priority | None = None
    limits: Limits | None = None
    max_shard_size: ShardSize | None = None
    gate: Gate | None = None
    evaluation: Evaluation | None = None
    file2file: StrictBool | None = None
    shard_blocks: StrictBool | None = None
    nodes: Nodes | None = None
    publish: PublishTo | None = None


class JobQuery(RequestBody):
    """Which jobs a list or a count is about. Different parameters must all fit."""

    state: list[State] = Field(default=[], description="In one of these; repeat it for several.")
    label: list[Label] = Field(default=[], max_length=MAX_LABELS, description="`name=value`; repeated: all of them.")
    model: Annotated[Printable, Field(max_length=4096)] | None = Field(
        default=None, description="Exactly this path or Hub id."
    )
    q: Text | None = Field(default=None, description="Text in the name, the id, the model or the preset.")
    created_after: AwareDatetime | None = None
    created_before: AwareDatetime | None = None
    sweep: Annotated[str, Field(pattern="^swp_[0-9a-f]{32}$")] | None = None

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
        )


class JobListQuery(JobQuery):
    """A page of the list."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    cursor: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="`next_cursor` of the page before, with the same filter."
    )


class PresetConfig(RequestBody):
    """A named scheme and what people change most."""

    preset: str
    group_size: Annotated[int, Field(strict=True)] | None = None
    exclude: tuple[str, ...] | None = None
    kv_cache: str | None = None


class ArtifactOut(BaseModel):
    """Where the result is on the service's disk; its files are at ``/v1/jobs/{id}/artifacts``."""

    manifest_sha256: str
    bytes: int
    path: str


class PublicationOut(BaseModel):
    """The newest publication of a job's artifact.

    ``pending`` with an ``error``: it is tried again. ``revision`` is the commit on the Hub, or the SHA-256 of the
    MANIFEST.json at a URL. A ``failed`` one can be retried: ``POST .../publish`` without a body.
    """

    id: str
    state: PublicationState
    target: dict[str, Any]
    hub_token: str | None
    progress: dict[str, Any] | None
    revision: str | None
    url: str | None
    error: dict[str, Any] | None
    attempt: int
    created_at: datetime
    finished_at: datetime | None

    @classmethod
    def of(cls, publication: Publication) -> PublicationOut:
        return cls(**{name: getattr(publication, name) for name in cls.model_fields})


class PhaseOut(BaseModel):
    """One phase of the present attempt: ``running``, ``done``, or ``stopped`` with the attempt; how far it is."""

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


def asked_mix(job: Job) -> dict[str, Any] | None:
    """A job's mix as a request says it."""
    return job.mix and {name: value for name, value in job.mix.items() if name != "configs"}


class JobOut(BaseModel):
    """A job as clients see it.

    ``submitted_by`` is null for what was submitted on the machine itself. ``state_times``: when it last entered each
    state. ``waiting_reason`` and ``queue_position`` (1 is next) are there
    while it waits; ``error`` has a stable ``code``, a ``hint``, and says in ``retryable`` whether a retry can help.
    ``publish`` is where the artifact was to go from the start; ``publication``, None if there was none, is what became
    of that or of a later ``POST .../publish``.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [examples.JOB]})

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
    phase: str | None
    progress: dict[str, Any] | None
    phases: list[PhaseOut]
    model: dict[str, Any]
    preset: str | None
    config: dict[str, Any]
    mix: dict[str, Any] | None
    calibration: dict[str, Any]
    export: list[str]
    max_shard_size: str
    gate: str
    evaluation: dict[str, Any]
    file2file: bool
    shard_blocks: bool | None
    nodes: int
    needs_memory_bytes: int | None
    cloned_from: str | None
    sweep_id: str | None
    sweep_values: dict[str, Any] | None
    submitted_by: SubmitterOut | None
    attempt: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    error: dict[str, Any] | None
    summary: Annotated[dict[str, Any], SchemaOf(Summary)] | None
    artifact: ArtifactOut | None
    publish: dict[str, Any] | None
    publication: PublicationOut | None
    cancel_requested: bool

    @classmethod
    def of(
        cls,
        job: Job,
        artifact: Artifact | None,
        waiting: Waiting | None,
        publication: Publication | None,
        key_name: str | None,
    ) -> JobOut:
        """``key_name``: of the key that submitted it."""
        made_here = {"artifact", "publication", "cancel_requested", "limits", "waiting_reason", "queue_position"}
        made_here |= {"submitted_by", "mix"}
        columns = {name: getattr(job, name) for name in cls.model_fields.keys() - made_here}
        columns["artifact"] = artifact and {
            "manifest_sha256": artifact.manifest_sha256,
            "bytes": artifact.num_bytes,
            "path": artifact.path,
        }
        return cls(
            **columns,
            mix=asked_mix(job),
            submitted_by=SubmitterOut(key_id=job.submitted_by, name=key_name or "") if job.submitted_by else None,
            publication=PublicationOut.of(publication) if publication else None,
            cancel_requested=job.cancel_requested_at is not None,
            limits=Limits(max_runtime_s=job.max_runtime_s, max_pending_s=job.max_pending_s),
            waiting_reason=waiting.reason if waiting else None,
            queue_position=waiting.position if waiting else None,
        )


class JobPage(BaseModel):
    """Newest first; ``next_cursor`` asks for the page after this one."""

    data: list[JobOut]
    has_more: bool
    next_cursor: str | None


class SummaryOut(BaseModel):
    """How many jobs there are, in all and in each state."""

    total: int
    by_state: dict[State, int]


class FileOut(BaseModel):
    """One file of an artifact."""

    path: str
    bytes: int
    sha256: str


class FileList(BaseModel):
    """All files of an artifact, its manifest included."""

    data: list[FileOut]
