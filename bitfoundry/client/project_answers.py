"""Answers of the service as frozen values, made by `make openapi` (api/client_answers.py)."""

from typing import Any

from pydantic import Field

from bitfoundry.client.answer import Answer
from bitfoundry.client.answers import ChatTurn


class MemberRef(Answer):
    """The id and the present name of a member, who may have been removed."""

    id: str
    name: str


class Key(Answer):
    """A key with its secret, which is shown now and never again."""

    id: str
    prefix: str
    project_id: str
    name: str
    scopes: list[str] = Field(default=[])
    created_at: str
    rotated_at: str | None = None
    last_used_at: str | None = None
    expires_at: str | None = None
    revoked_at: str | None = None
    member: MemberRef | None = None
    key: str | None = None
    """Shown once: None in later answers."""


class Member(Answer):
    """A member with the first key, whose secret is shown now and never again."""

    id: str
    name: str
    role: str
    """`viewer`, `editor` or `admin`."""
    num_keys: int
    last_used_at: str | None = None
    created_at: str
    first_key: Key | None = None
    """Shown once: None in later answers."""


class Project(Answer):
    """A project, its quotas, and how much of them it uses."""

    id: str
    name: str
    max_waiting: int | None = None
    max_running: int | None = None
    max_stored_bytes: int | None = None
    requests_per_minute: int | None = None
    max_datasets: int | None = None
    max_dataset_bytes: int | None = None
    max_uploads: int | None = None
    max_streams: int | None = None
    max_webhooks: int | None = None
    created_at: str
    usage: dict[str, Any] = Field(default={})


class QuotaUse(Answer):
    """A quota: its present usage, in `unit`, and the limit that holds. None sets none."""

    quota: str
    unit: str
    used: int
    limit: int | None = None


class HubToken(Answer):
    """The name of a stored token, never the token itself."""

    name: str
    created_at: str
    updated_at: str


class Worker(Answer):
    """A worker, its hardware and its jobs.

    `state` draining: it takes no jobs, and gives back those that it has; blocked: it takes no jobs as long as
    `blocked_reason` holds; silent: no heartbeat came in time, so it counts no more until it comes back. `sandbox` is
    the protection of its engines: `landlock` and its version, `none` or `off`. `memory_limit` is what limits their
    memory: `cgroup` (the kernel) or `watched` (the worker). Both are `unknown` for workers of an older version.
    `launcher` is what gives engines their nodes: `local`, or the name of a scheduler, as `slurm`.
    """

    id: str
    host: str
    state: str
    """`ready`, `draining`, `blocked` or `silent`."""
    num_slots: int
    memory_bytes: int
    devices: list[dict[str, Any]] = Field(default=[])
    launcher: str = "local"
    sandbox: str = "unknown"
    memory_limit: str = "unknown"
    """`cgroup`, `watched` or `unknown`."""
    started_at: str
    beat_at: str
    drain_requested_at: str | None = None
    blocked_reason: str | None = None
    jobs: list[dict[str, Any]] = Field(default=[])


class AuditEntry(Answer):
    """A change in the audit log. `key_id` is None for a change on the machine itself; `detail` holds no secret.

    `member` has the key; it is None for the key of a program.
    """

    id: int
    at: str
    project_id: str
    key_id: str | None = None
    member: MemberRef | None = None
    action: str
    object_id: str
    request_id: str | None = None
    detail: dict[str, Any] = Field(default={})


class Webhook(Answer):
    """A webhook with the secret that signs its messages, which is shown now and never again."""

    id: str
    url: str
    format: str = "json"
    """`json`, `slack` or `teams`."""
    event_types: list[str] = Field(default=[])
    created_at: str
    failing_since: str | None = None
    disabled_at: str | None = None
    disabled_reason: str | None = None
    secret: str | None = None
    """Shown once: None in later answers."""


class Delivery(Answer):
    """A message and its tries; `next_try_at` while it is pending."""

    id: str
    event_type: str
    data: dict[str, Any] = Field(default={})
    state: str
    """`pending`, `delivered` or `failed`."""
    num_tries: int
    tries: list[dict[str, Any]] = Field(default=[])
    next_try_at: str | None = None
    created_at: str
    delivered_at: str | None = None


class Share(Answer):
    """A link with its `url`, which is shown now and never again."""

    id: str
    created_at: str
    expires_at: str
    created_by: str | None = None
    url: str | None = None
    """Shown once: None in later answers."""


class RetentionPolicy(Answer):
    """The project's policy, in addition to the operator's for all projects: `service_keep_*_days`. None: no limit.

    Pinned jobs apart, whatever is older than the operator's days goes in any case.
    """

    keep_last: int | None = None
    keep_days: int | None = None
    service_keep_jobs_days: float | None = None
    service_keep_logs_days: float | None = None


class DueJob(Answer):
    """A job that the policy does not keep, and the reason."""

    id: str
    name: str | None = None
    state: str
    finished_at: str
    bytes: int
    reason: str


class DueJobs(Answer):
    """A list of jobs that a policy does not keep, the oldest first. `has_more`: there are more than the list has."""

    data: list[DueJob] = Field(default=[])
    bytes: int
    num_pinned: int
    has_more: bool


class Chat(Answer):
    """A chat. `state` is waiting (for a worker), starting (the models are loaded), open or ended.

    An ended chat has a `reason`, and if it failed an `error`; it can be read for a day. Without a chat template
    (`has_template`) the models continue each prompt by itself. `turns` are missing in the events of a stream.
    """

    id: str
    job_id: str
    seq: int
    state: str
    """`waiting`, `starting`, `open` or `ended`."""
    reason: str | None = None
    """`closed`, `idle`, `time_is_up`, `no_worker`, `worker_needed`, `worker_stopped`, `worker_lost` or `failed`."""
    error: dict[str, Any] | None = None
    has_template: bool | None = None
    max_new_tokens: int
    max_turns: int
    created_at: str
    ended_at: str | None = None
    turns: list[ChatTurn] | None = None
