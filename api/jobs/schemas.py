"""What clients send and get. Requests refuse unknown fields; answers may grow new ones."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from api.store.states import State
from api.store.tables import Artifact, Event, Job
from quantcore.checkpoint.hub import is_model_id
from quantcore.config import CalibrationConfig

MAX_LABELS = 16
_REVISION = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"


def _printable(text: str) -> str:
    if not text.isprintable():
        raise PydanticCustomError(
            "invalid_text", "only printable characters: no line breaks, no control or direction marks"
        )
    return text


Text = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_printable)]
LabelName = Annotated[str, StringConstraints(min_length=1, max_length=64), AfterValidator(_printable)]
LabelValue = Annotated[str, StringConstraints(max_length=512), AfterValidator(_printable)]


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelRef(_Request):
    """A folder that the service can read, or a model on the Hugging Face Hub."""

    path: Annotated[str, Field(min_length=1, max_length=4096, examples=["/models/SmolLM2-135M-Instruct"])] | None = None
    id: Annotated[str, Field(examples=["org/name"])] | None = None
    revision: Annotated[str, Field(pattern=_REVISION)] = "main"

    @model_validator(mode="after")
    def _make_sense(self) -> ModelRef:
        if (self.path is None) == (self.id is None):
            raise PydanticCustomError("invalid_model", "give either `path` (a folder) or `id` (a model on the Hub)")
        if self.path is not None and not self.path.startswith("/"):
            raise PydanticCustomError("invalid_model", "`path` must be absolute: it starts with /")
        if self.id is not None and not is_model_id(self.id):
            raise PydanticCustomError("invalid_model_id", "`id` must look like org/name")
        return self


class PlanCreate(_Request):
    """What a plan needs.

    ``config`` is {preset, group_size?, exclude?, kv_cache?}, a whole config in the engine's names (``GET
    /v1/config-schema``), or the ``quantization_config`` of a checkpoint of AMD Quark.
    """

    model: ModelRef
    config: dict[str, Any] = Field(examples=[{"preset": "w4a16"}])
    calibration: CalibrationConfig = CalibrationConfig()
    export: tuple[str, ...] = Field(default=("quark",), max_length=16)


class JobCreate(PlanCreate):
    """A plan that is to be carried out, with a name and labels to find it by."""

    name: Text | None = None
    labels: dict[LabelName, LabelValue] = Field(default={}, max_length=MAX_LABELS)


class PresetConfig(_Request):
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


class JobOut(BaseModel):
    """A job as clients see it."""

    id: str
    name: str | None
    labels: dict[str, str]
    state: State
    phase: str | None
    progress: dict[str, Any] | None
    model: dict[str, Any]
    preset: str | None
    config: dict[str, Any]
    calibration: dict[str, Any]
    export: list[str]
    attempt: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    error: dict[str, Any] | None
    summary: dict[str, Any] | None
    artifact: ArtifactOut | None
    cancel_requested: bool

    @classmethod
    def of(cls, job: Job, artifact: Artifact | None) -> JobOut:
        columns = {name: getattr(job, name) for name in cls.model_fields.keys() - {"artifact", "cancel_requested"}}
        columns["artifact"] = artifact and {
            "manifest_sha256": artifact.manifest_sha256,
            "bytes": artifact.num_bytes,
            "path": artifact.path,
        }
        return cls(**columns, cancel_requested=job.cancel_requested_at is not None)


class JobPage(BaseModel):
    """Newest first; ``next_cursor`` asks for the page after this one."""

    data: list[JobOut]
    has_more: bool
    next_cursor: str | None


class EventOut(BaseModel):
    """One event; ``seq`` counts 1, 2, 3 within the job."""

    seq: int
    at: datetime
    kind: str
    data: dict[str, Any]

    @classmethod
    def of(cls, event: Event) -> EventOut:
        return cls(seq=event.seq, at=event.at, kind=event.kind, data=event.data)


class EventPage(BaseModel):
    """Oldest first; ask again with ``after`` = the last ``seq``."""

    data: list[EventOut]
    has_more: bool


class FileOut(BaseModel):
    """One file of an artifact."""

    path: str
    bytes: int
    sha256: str


class FileList(BaseModel):
    """All files of an artifact, its manifest included."""

    data: list[FileOut]
