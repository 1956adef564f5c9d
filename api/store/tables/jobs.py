"""The tables of jobs and projects. Constraints rule out what must never happen; the code alone could not.

(They are not called models: in this project a model is a language model.)
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Computed,
    FetchedValue,
    ForeignKey,
    Identity,
    Index,
    LargeBinary,
    MetaData,
    Sequence,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSON, JSONB, TIMESTAMP
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from api.store.states import CLAIMABLE, FINAL, HELD, OUTCOMES, State

NOW = text("clock_timestamp()")
PROGRESS_KEPT = timedelta(days=1)  # of a failed job, for a retry
LOG_LEVELS = ("debug", "info", "warning", "error")  # in order


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: TIMESTAMP(timezone=True),
        dict[str, Any]: JSONB(none_as_null=True),
        dict[str, str]: JSONB(none_as_null=True),
        list[dict[str, Any]]: JSONB(none_as_null=True),
        list[str]: ARRAY(Text),
        str: Text,
        bytes: LargeBinary,
    }


def _one_of(column: str, values: object) -> str:
    names = sorted(values)  # type: ignore[call-overload]
    return f"{column} IN ({', '.join(repr(str(name)) for name in names)})"


NODES = "COALESCE((spec ->> 'nodes')::smallint, 1)"
SOURCE = "COALESCE(model ->> 'id', model ->> 'path')"
"""The name of a job's model: its id on the Hub, or its path on the server."""
PARENT = "substring(model ->> 'path', '/(job_[0-9a-f]{32})/')"
"""The id of the job in whose artifact the model lies, if it lies in one: artifacts are in ``<job id>/<hash>``."""
FENCE = Sequence("fence_seq", metadata=Base.metadata, data_type=BigInteger)


class Project(Base):
    """The owner of keys, jobs and sweeps, and so of all that hangs on them.

    ``projects.QUOTAS`` has the default for a limit that is None.
    """

    __tablename__ = "project"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    max_waiting: Mapped[int | None]
    max_running: Mapped[int | None]
    max_stored_bytes: Mapped[int | None] = mapped_column(BigInteger)
    requests_per_minute: Mapped[int | None]
    max_datasets: Mapped[int | None]
    max_dataset_bytes: Mapped[int | None] = mapped_column(BigInteger)
    max_uploads: Mapped[int | None]
    max_streams: Mapped[int | None]
    max_webhooks: Mapped[int | None]
    protected_aliases: Mapped[list[str]] = mapped_column(server_default="{production}")  # of the registry
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (
        CheckConstraint(
            "max_waiting >= 0 AND max_running >= 0 AND max_stored_bytes >= 0 AND requests_per_minute > 0",
            name="limits",
        ),
        CheckConstraint(
            "max_datasets >= 0 AND max_uploads >= 0 AND max_streams >= 0 AND max_webhooks >= 0 "
            "AND max_dataset_bytes >= 0",
            name="more_limits",
        ),
    )


class Member(Base):
    """A person of a project, who signs in with a key. Rows of removed members stay for the audit log.

    Whoever signs in through an OpenID provider has an ``issuer`` and a ``subject`` there, one row for each project, and
    one key, whose secret nobody knows.
    """

    __tablename__ = "member"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    name: Mapped[str]
    role: Mapped[str]
    issuer: Mapped[str | None]
    subject: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    removed_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("role IN ('admin', 'editor', 'viewer')", name="role"),
        Index("uq_member_name", "project_id", "name", unique=True, postgresql_where=text("removed_at IS NULL")),
        Index("uq_member_subject", "issuer", "subject", "project_id", unique=True),  # rows without them are no doubles
    )


class ApiKey(Base):
    """A bearer key ``bf_<id>_<secret>``; only the SHA-256 of the secret is kept.

    Without a member it is the key of a program, as a pipeline. The key of a member ``follows_role``, unless its scopes
    were named when it was made: then it never gains any.

    After a rotation the secret before it (``previous_sha256``) works until ``previous_until``.
    """

    __tablename__ = "api_key"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"), index=True)
    member_id: Mapped[str | None] = mapped_column(ForeignKey("member.id"), index=True)
    name: Mapped[str]
    secret_sha256: Mapped[bytes]
    previous_sha256: Mapped[bytes | None]
    previous_until: Mapped[datetime | None]
    scopes: Mapped[list[str]]
    follows_role: Mapped[bool] = mapped_column(server_default=text("false"))
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    rotated_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]

    member: Mapped[Member | None] = relationship(lazy="joined")


class Sweep(Base):
    """Jobs that were submitted together: a matrix of values, one job for every combination."""

    __tablename__ = "sweep"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    submitted_by: Mapped[str | None] = mapped_column(ForeignKey("api_key.id"))
    name: Mapped[str | None]
    matrix: Mapped[dict[str, Any]] = mapped_column(JSON)  # not JSONB: the order of the axes is the order of the jobs
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Dataset(Base):
    """An uploaded data file. The file carries the hash of its content: two rows may share one (``datasets.file_name``).

    ``format`` is the suffix of its name: ``jsonl``, ``csv.gz``. ``text_column`` has the text unless a job says
    otherwise.
    """

    __tablename__ = "dataset"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"), index=True)
    submitted_by: Mapped[str | None] = mapped_column(ForeignKey("api_key.id"))
    name: Mapped[str]
    format: Mapped[str]
    sha256: Mapped[str] = mapped_column(index=True)
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    columns: Mapped[list[str]]
    text_column: Mapped[str]
    statistics: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    checked_at: Mapped[datetime | None]  # when its file was last hashed


class Upload(Base):
    """A data file that arrives in parts. ``dataset_id``: the dataset that it became."""

    __tablename__ = "upload"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"), index=True)
    submitted_by: Mapped[str | None] = mapped_column(ForeignKey("api_key.id"))
    name: Mapped[str]
    format: Mapped[str]
    text_column: Mapped[str | None]
    dataset_id: Mapped[str | None] = mapped_column(ForeignKey("dataset.id", ondelete="CASCADE"))
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime] = mapped_column(index=True)


class UploadPart(Base):
    """A part that is safely on disk, in a file named after its number and hash."""

    __tablename__ = "upload_part"

    upload_id: Mapped[str] = mapped_column(ForeignKey("upload.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]


class Job(Base):
    """A quantization job: its request, its state, and the worker that holds it."""

    __tablename__ = "job"
    # the trigger's version and updated_at come back with every UPDATE
    __mapper_args__ = {"eager_defaults": True}  # noqa: RUF012

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    submitted_by: Mapped[str | None] = mapped_column(ForeignKey("api_key.id"))
    name: Mapped[str | None]
    labels: Mapped[dict[str, str]]

    # the request, with every default filled in
    model: Mapped[dict[str, Any]]
    preset: Mapped[str | None]
    # ``quantcore.config.job_spec.JobSpec``; not JSONB, which would sort the patterns: the first one counts
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    nodes: Mapped[int] = mapped_column(SmallInteger, Computed(NODES, persisted=True))  # workers that do it together
    dataset_id: Mapped[str | None] = mapped_column(ForeignKey("dataset.id", ondelete="SET NULL"))
    evaluation_dataset_id: Mapped[str | None] = mapped_column(ForeignKey("dataset.id", ondelete="SET NULL"))
    priority: Mapped[int] = mapped_column(SmallInteger, server_default="5")  # 9 goes first
    pinned: Mapped[bool] = mapped_column(server_default="false")  # retention passes it over
    max_runtime_s: Mapped[int | None]  # of all attempts together
    max_pending_s: Mapped[int | None]  # from each time that it is queued
    needs_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # the plan's estimate
    avoid_host: Mapped[str | None]  # no worker there takes it: see ``control.retry``
    cloned_from: Mapped[str | None]  # the id of a job, which may be deleted since
    traceparent: Mapped[str | None]  # of the request that made it (W3C Trace Context)
    publish: Mapped[dict[str, Any] | None]  # where the artifact shall go, and by which token
    sweep_id: Mapped[str | None] = mapped_column(ForeignKey("sweep.id"))
    sweep_values: Mapped[dict[str, Any] | None]  # JSON pointer into the request -> this job's value

    # its state
    state: Mapped[str] = mapped_column(server_default=State.QUEUED)
    # state -> when it was last entered: the trigger writes it
    state_times: Mapped[dict[str, str]] = mapped_column(server_default="{}", server_onupdate=FetchedValue())
    phase: Mapped[str | None]
    progress: Mapped[dict[str, Any] | None]
    phases: Mapped[list[dict[str, Any]]] = mapped_column(server_default="[]")  # of the present attempt
    # of the present attempt: launcher, id, state, reason and nodes as the scheduler names them; used_s, running_since
    allocation: Mapped[dict[str, Any] | None]
    summary: Mapped[dict[str, Any] | None]
    error: Mapped[dict[str, Any] | None]
    artifact_id: Mapped[str | None] = mapped_column(ForeignKey("artifact.id", use_alter=True))
    cancel_requested_at: Mapped[datetime | None]
    version: Mapped[int] = mapped_column(BigInteger, server_default="1", server_onupdate=FetchedValue())
    num_events: Mapped[int] = mapped_column(BigInteger, server_default="0")
    num_log_lines: Mapped[int] = mapped_column(BigInteger, server_default="0")

    # its holder; three counters, because a lost worker and a drained one are not the job's fault
    attempt: Mapped[int] = mapped_column(server_default="0")
    failure_count: Mapped[int] = mapped_column(server_default="0")
    lost_count: Mapped[int] = mapped_column(server_default="0")
    used_runtime_s: Mapped[float] = mapped_column(server_default="0")  # of the attempts that have ended
    fence: Mapped[int | None] = mapped_column(BigInteger)
    worker: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    run_at: Mapped[datetime] = mapped_column(server_default=NOW)

    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW, server_onupdate=FetchedValue())
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]

    @property
    def progress_kept_until(self) -> datetime | None:
        """Until when what a failed job has saved is kept, so that a retry continues there; None: it is not."""
        is_kept = self.state == State.FAILED and self.attempt > 0 and self.error and self.error["retryable"]
        return self.finished_at + PROGRESS_KEPT if is_kept and self.finished_at else None

    __table_args__ = (
        CheckConstraint(_one_of("state", State), name="state"),
        CheckConstraint("priority BETWEEN 0 AND 9", name="priority"),
        CheckConstraint("nodes BETWEEN 1 AND 64", name="nodes"),
        CheckConstraint("max_runtime_s > 0 AND max_pending_s > 0", name="limits"),
        CheckConstraint(
            f"num_nulls(fence, worker, lease_expires_at) = CASE WHEN {_one_of('state', HELD)} THEN 0 ELSE 3 END",
            name="held_has_lease",
        ),
        CheckConstraint(f"({_one_of('state', FINAL)}) = (finished_at IS NOT NULL)", name="final_has_finished_at"),
        CheckConstraint("state <> 'succeeded' OR artifact_id IS NOT NULL", name="succeeded_has_artifact"),
        CheckConstraint("state <> 'failed' OR error ->> 'code' IS NOT NULL", name="failed_has_code"),
        Index(
            "ix_job_claim",
            text("priority DESC"),
            "run_at",
            "id",
            postgresql_where=text(_one_of("state", CLAIMABLE)),
        ),
        Index("ix_job_lease", "lease_expires_at", postgresql_where=text(_one_of("state", HELD))),
        Index("ix_job_list", "project_id", text("created_at DESC"), text("id DESC")),
        Index(
            "ix_job_open", "project_id", "state", postgresql_where=text(f"NOT ({_one_of('state', FINAL)})")
        ),  # for quotas
        Index(
            "ix_job_results",
            "project_id",
            text(SOURCE),
            text("finished_at DESC"),
            text("id DESC"),
            postgresql_where=text(f"state = '{State.SUCCEEDED}'"),
        ),
        Index("ix_job_parent", text(PARENT), postgresql_where=text(f"{PARENT} IS NOT NULL")),
        Index("ix_job_sweep_id", "sweep_id", postgresql_where=text("sweep_id IS NOT NULL")),
        Index("ix_job_dataset_id", "dataset_id", postgresql_where=text("dataset_id IS NOT NULL")),
        Index(
            "ix_job_evaluation_dataset_id",
            "evaluation_dataset_id",
            postgresql_where=text("evaluation_dataset_id IS NOT NULL"),
        ),
        Index("ix_job_labels", "labels", postgresql_using="gin", postgresql_ops={"labels": "jsonb_path_ops"}),
    )


QUEUE_ORDER = (Job.priority.desc(), Job.run_at, Job.id)  # who is next: one order for claims and for places in the queue


class Attempt(Base):
    """A worker's attempt at a job. At most one is open per job: a unique index says so."""

    __tablename__ = "attempt"

    job_id: Mapped[str] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    fence: Mapped[int] = mapped_column(BigInteger, unique=True)
    worker: Mapped[str]
    started_at: Mapped[datetime] = mapped_column(server_default=NOW)
    ended_at: Mapped[datetime | None]
    outcome: Mapped[str | None]
    error: Mapped[dict[str, Any] | None]

    __table_args__ = (
        CheckConstraint(_one_of("outcome", OUTCOMES), name="outcome"),
        CheckConstraint("(ended_at IS NULL) = (outcome IS NULL)", name="ended_has_outcome"),
        Index("uq_attempt_open", "job_id", unique=True, postgresql_where=text("ended_at IS NULL")),
    )


class Event(Base):
    """An entry of a job's event log. ``seq`` counts 1, 2, 3 within the job, without gaps, in order of commit."""

    __tablename__ = "event"

    job_id: Mapped[str] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    kind: Mapped[str]
    data: Mapped[dict[str, Any]]


class LogLine(Base):
    """A line that an engine printed. ``seq`` counts within the job, over all its attempts."""

    __tablename__ = "log_line"

    job_id: Mapped[str] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    attempt: Mapped[int]
    level: Mapped[str]
    text: Mapped[str]

    __table_args__ = (CheckConstraint(_one_of("level", LOG_LEVELS), name="level"),)


class Artifact(Base):
    """The folder of a finished and proven result; ``path`` ends in the SHA-256 of its manifest."""

    __tablename__ = "artifact"

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"))
    fence: Mapped[int] = mapped_column(BigInteger)
    manifest_sha256: Mapped[str]
    path: Mapped[str]
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    checked_at: Mapped[datetime | None]  # when its files were last hashed

    __table_args__ = (Index("uq_artifact_manifest", "job_id", "manifest_sha256", unique=True),)


class Worker(Base):
    """A worker, which sends a heartbeat every few seconds. Jobs are held by leases, never by this row."""

    __tablename__ = "worker"

    id: Mapped[str] = mapped_column(primary_key=True)
    host: Mapped[str]
    num_slots: Mapped[int]
    memory_bytes: Mapped[int] = mapped_column(BigInteger)
    devices: Mapped[list[dict[str, Any]]] = mapped_column(server_default="[]")
    launcher: Mapped[str] = mapped_column(server_default="local")
    """What gives its engines their nodes: ``local``, or the name of a scheduler."""
    sandbox: Mapped[str] = mapped_column(server_default="unknown")
    """The kernel's protection of its engines (``confinement.describe``)."""
    memory_limit: Mapped[str] = mapped_column(server_default="unknown")
    """What limits the memory of its engines: ``cgroup`` or ``watched``."""
    started_at: Mapped[datetime] = mapped_column(server_default=NOW)
    beat_at: Mapped[datetime] = mapped_column(server_default=NOW)
    live_until: Mapped[datetime]
    blocked_reason: Mapped[str | None]
    """The reason why it can take no jobs now, though nobody has drained it."""
    drain_requested_at: Mapped[datetime | None]


class Outbox(Base):
    """A message that must go out if, and only if, the transaction that wrote it commits. Deleted once sent."""

    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    topic: Mapped[str]
    payload: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


write_probe = Table("write_probe", Base.metadata, Column("content", Text, nullable=False))
"""What readiness writes to (``api.http.health``), and takes back."""
