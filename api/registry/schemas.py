"""The request and response bodies of the model registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.schemas import RequestBody, Text
from api.keys.schemas import KEY, MemberRef
from api.lineage.schemas import BRIEF, JOB, ResultBrief, brief_of
from api.store.accounts.registry import Entry, Listed
from api.store.tables.jobs import Member
from api.store.tables.registry import AliasRequest, RegisteredModel

MODEL_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
ALIAS = r"^[a-z][a-z0-9-]{0,62}$"
MAX_VERSION = 2**31 - 1

Alias = Annotated[str, Field(pattern=ALIAS, examples=["production"])]
VersionNumber = Annotated[int, Field(strict=True, ge=1, le=MAX_VERSION)]
RequestState = Literal["pending", "approved", "refused", "withdrawn"]

ACTOR: dict[str, Any] = {"key_id": KEY["id"], "name": KEY["name"], "member": KEY["member"]}
MODEL: dict[str, Any] = {
    "name": "support-bot",
    "num_versions": 3,
    "latest_version": 3,
    "latest_verdict": "good",
    "aliases": [
        {"alias": "candidate", "version": 3, "protected": False, "moved_at": "2026-11-22T08:00:00Z"},
        {"alias": "production", "version": 2, "protected": True, "moved_at": "2026-11-21T08:00:00Z"},
    ],
    "num_pending": 1,
    "created_at": "2026-11-20T08:00:00Z",
}
VERSION: dict[str, Any] = BRIEF | {
    "model": "support-bot",
    "version": 3,
    "aliases": ["candidate"],
    "name": "nightly",
    "source": "/models/SmolLM2-135M-Instruct",
    "export": ["compressed_tensors"],
    "bytes": 90000000,
    "sha256": "4f" * 32,
    "added_by": ACTOR,
    "created_at": "2026-11-22T08:05:00Z",
}
REQUEST: dict[str, Any] = {
    "id": "rqs_01a200dc5edf7cfaa251b183f95c582d",
    "model": "support-bot",
    "alias": "production",
    "from_version": 2,
    "to_version": 3,
    "verdict": "good",
    "reason": "It answers the new support questions.",
    "state": "pending",
    "asked_by": ACTOR,
    "created_at": "2026-11-22T08:10:00Z",
    "decided_by": None,
    "decided_at": None,
    "comment": None,
}


class VersionCreate(RequestBody):
    """The request body for a version: the job that has succeeded, whose result it is."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"job_id": JOB}]})

    job_id: Annotated[str, Field(pattern="^job_[0-9a-f]{32}$")]


class AliasPut(RequestBody):
    """The request body for an alias: the version that it points to from now on."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": 3}]})

    version: VersionNumber


class AliasRequestCreate(RequestBody):
    """The request body for a request to move a protected alias. ``version`` null: remove the alias."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"alias": "production", "version": 3, "reason": REQUEST["reason"]}]}
    )

    alias: Alias
    version: VersionNumber | None
    reason: Text


class Decision(RequestBody):
    """The request body for a decision: a comment for the one who asked."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"comment": "The KL divergence is too high."}]})

    comment: Text | None = None


class ProtectedAliases(RequestBody):
    """The aliases of all models of the project that only an approved request moves, in the order of their names."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"aliases": ["production"]}]})

    aliases: Annotated[list[Alias], Field(max_length=20)]


class RegistryQuery(RequestBody):
    """The page of the list of models."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    cursor: Annotated[str, Field(pattern=MODEL_NAME)] | None = Field(
        default=None, description="`next_cursor` of the previous page."
    )


class VersionQuery(RequestBody):
    """The page of the list of a model's versions."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    cursor: Annotated[int, Field(ge=1, le=MAX_VERSION)] | None = Field(
        default=None, description="`next_cursor` of the previous page."
    )


class RequestQuery(RequestBody):
    """The filter of the list of requests, and the page of it."""

    state: RequestState | None = Field(default=None, description="Only requests in this state.")
    model: Annotated[str, Field(pattern=MODEL_NAME)] | None = Field(default=None, description="Only of this model.")
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    cursor: Annotated[str, Field(pattern="^rqs_[0-9a-f]{32}$")] | None = Field(
        default=None, description="`next_cursor` of the previous page."
    )


class Actor(BaseModel):
    """The key of an action, and the member who has the key; null for the key of a program."""

    key_id: str
    name: str
    member: MemberRef | None


class Actors:
    """Shows the keys of actions by their ids."""

    def __init__(self, names: Mapping[str, str], members: Mapping[str, Member]) -> None:
        self._names, self._members = names, members

    def show(self, key_id: str | None) -> Actor | None:
        if key_id is None:
            return None
        return Actor(key_id=key_id, name=self._names.get(key_id, ""), member=MemberRef.of(self._members.get(key_id)))


class AliasOut(BaseModel):
    """An alias and its version. Only an approved request moves a ``protected`` one."""

    alias: str
    version: int
    protected: bool
    moved_at: datetime


class RegisteredModelOut(BaseModel):
    """A model of the registry. ``num_pending`` counts the requests that nobody has decided.

    ``latest_verdict`` is the level of the ``Verdict`` on the newest version, null for one without a verdict.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [MODEL]})

    name: str
    num_versions: int
    latest_version: int | None
    latest_verdict: str | None
    aliases: list[AliasOut]
    num_pending: int
    created_at: datetime

    @classmethod
    def of(cls, listed: Listed, protected: Sequence[str]) -> RegisteredModelOut:
        """Return the response for a model. ``protected``: the protected aliases of its project."""
        aliases = [
            AliasOut(alias=each.alias, version=each.version, protected=each.alias in protected, moved_at=each.moved_at)
            for each in listed.aliases
        ]
        return cls(
            name=listed.model.name,
            num_versions=listed.num_versions,
            latest_version=listed.latest_version,
            latest_verdict=listed.latest_verdict,
            aliases=aliases,
            num_pending=listed.num_pending,
            created_at=listed.model.created_at,
        )


class RegistryVersionOut(ResultBrief):
    """A version of a model: the result of the job ``job_id``, whose name is ``name``.

    ``source`` is the model that the job quantized, ``export`` its formats, ``sha256`` that of the MANIFEST.json, which
    has the SHA-256 of every file.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [VERSION]})

    model: str
    version: int
    aliases: list[str]
    name: str | None
    source: str
    export: list[str]
    bytes: int
    sha256: str
    added_by: Actor | None
    created_at: datetime

    @classmethod
    def of(cls, model: RegisteredModel, entry: Entry, actors: Actors) -> RegistryVersionOut:
        job = entry.job
        return cls(
            **brief_of(job).model_dump(),
            model=model.name,
            version=entry.version.version,
            aliases=[*entry.aliases],
            name=job.name,
            source=job.model.get("id") or job.model["path"],
            export=job.spec["export"],
            bytes=entry.artifact.num_bytes,
            sha256=entry.artifact.manifest_sha256,
            added_by=actors.show(entry.version.key_id),
            created_at=entry.version.created_at,
        )


class AliasRequestOut(BaseModel):
    """A request to move a protected alias ``from_version`` ``to_version``.

    ``from_version`` is null for a new alias, ``to_version`` for one that shall be removed. ``verdict`` is the level of
    the ``Verdict`` on ``to_version``; null without one.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [REQUEST]})

    id: str
    model: str
    alias: str
    from_version: int | None
    to_version: int | None
    verdict: str | None
    reason: str
    state: RequestState
    asked_by: Actor | None
    created_at: datetime
    decided_by: Actor | None
    decided_at: datetime | None
    comment: str | None

    @classmethod
    def of(
        cls,
        request: AliasRequest,
        model: RegisteredModel,
        actors: Actors,
        verdicts: Mapping[tuple[str, int | None], str | None],
    ) -> AliasRequestOut:
        names = cls.model_fields.keys() - {"model", "verdict", "asked_by", "decided_by"}
        return cls(
            **{name: getattr(request, name) for name in names},
            model=model.name,
            verdict=verdicts.get((model.id, request.to_version)),
            asked_by=actors.show(request.asked_by),
            decided_by=actors.show(request.decided_by),
        )


class RegisteredModelPage(BaseModel):
    """A page of the registry's models, in the order of their names; ``next_cursor`` asks for the next page."""

    data: list[RegisteredModelOut]
    has_more: bool
    next_cursor: str | None


class RegistryVersionPage(BaseModel):
    """A page of a model's versions, newest first; ``next_cursor`` asks for the next page."""

    data: list[RegistryVersionOut]
    has_more: bool
    next_cursor: int | None


class AliasRequestPage(BaseModel):
    """A page of requests, newest first; ``next_cursor`` asks for the next page."""

    data: list[AliasRequestOut]
    has_more: bool
    next_cursor: str | None
