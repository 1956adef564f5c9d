"""The commands `keys`, `hub-tokens`, `projects`, `workers` (sub-commands in `GROUPS`), `usage` and `audit`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitfoundry.commands import terminal
from bitfoundry.commands.names import find_id
from bitfoundry.commands.options import AsJson, show_deleted, with_client

if TYPE_CHECKING:
    from bitfoundry.client.answers import Answer
    from bitfoundry.client.project_answers import Key as ApiKey
    from bitfoundry.client.project_answers import Project, Worker
    from bitfoundry.client.service import Client

KeyId = Annotated[str, typer.Argument(help="Key: its id or the start of it, its name, or `last`.")]
Name = Annotated[str, typer.Argument(help="Descriptive name.")]
Scope = Annotated[
    list[str] | None, typer.Option(help="jobs:read, jobs:write, jobs:chat, admin or operator. Repeatable.")
]
Quota = Annotated[int | None, typer.Option(min=-1, help="Limit; -1 removes it.")]
KEY_COLUMNS = ("id", "name", "member", "scopes", "last_used_at", "expires_at", "revoked_at")
TOKEN_COLUMNS = ("name", "created_at", "updated_at")
QUOTAS = (
    "max_waiting",
    "max_running",
    "max_stored_bytes",
    "requests_per_minute",
    "max_datasets",
    "max_dataset_bytes",
    "max_uploads",
    "max_streams",
    "max_webhooks",
)
PROJECT_COLUMNS = ("id", "name", "quotas", "usage")
USAGE_COLUMNS = ("quota", "used", "limit", "unit")
WorkerId = Annotated[str, typer.Argument(help="Worker: its id or the start of it, or `last`.")]
WORKER_COLUMNS = ("id", "state", "host", "devices", "beat_at", "jobs")
AUDIT_COLUMNS = ("at", "action", "object_id", "key_id", "member", "request_id")


@with_client
def create_key(
    client: Client,
    name: Name,
    scope: Scope = None,
    expires_at: Annotated[
        str | None, typer.Option(help="Expiry time, with its time zone: 2027-01-01T00:00:00Z.")
    ] = None,
    project: Annotated[str | None, typer.Option(help="Another project: its id or name (operators only).")] = None,
    member: Annotated[str | None, typer.Option(help="Member who gets the key: their id or name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create an API key. By default it has the scopes of its member's role, or jobs:read and jobs:write without one.

    It is shown only once.
    """
    project = find_id(client, "project_id", project) if project else None
    member = find_id(client, "member_id", member) if member else None
    scopes = scope or (None if member else ["jobs:read", "jobs:write"])
    key = client.account.create_key(name, scopes, expires_at=expires_at, project_id=project, member_id=member)
    show_key(key, as_json)


@with_client
def list_keys(client: Client, as_json: AsJson = False) -> None:
    """List the project's API keys."""
    show_rows(client.account.keys(), KEY_COLUMNS, as_json)


@with_client
def rotate_key(
    client: Client,
    key_id: KeyId,
    overlap_s: Annotated[int, typer.Option(min=0, help="Seconds that the current secret stays valid.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Rotate an API key: create a new secret. It is shown only once."""
    show_key(client.account.rotate_key(key_id, overlap_s=overlap_s), as_json)


@with_client
def revoke_key(client: Client, key_id: KeyId, as_json: AsJson = False) -> None:
    """Revoke an API key immediately and permanently."""
    show_rows([client.account.revoke_key(key_id)], KEY_COLUMNS, as_json, single=True)


@with_client
def put_hub_token(
    client: Client,
    name: Annotated[str, typer.Argument(help="Name of the token; jobs use it with --hub_token NAME.")],
    as_json: AsJson = False,
) -> None:
    """Save a Hugging Face token. It is prompted for or read from standard input; never pass it on the command line."""
    token = typer.prompt("token", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline().strip()
    show_rows([client.account.put_hub_token(name, token)], TOKEN_COLUMNS, as_json, single=True)


@with_client
def list_hub_tokens(client: Client, as_json: AsJson = False) -> None:
    """List the names of the project's Hub tokens."""
    show_rows(client.account.hub_tokens(), TOKEN_COLUMNS, as_json)


@with_client
def delete_hub_token(
    client: Client,
    name: Annotated[str, typer.Argument(help="Name of the token, as shown by `hub-tokens list`.")],
    as_json: AsJson = False,
) -> None:
    """Delete a Hub token."""
    client.account.delete_hub_token(name)
    show_deleted(name, as_json)


@with_client
def list_projects(client: Client, as_json: AsJson = False) -> None:
    """List the projects that this key can see, with their quotas and usage."""
    _show_projects(client.account.projects(), as_json)


@with_client
def create_project(
    client: Client,
    name: Name,
    max_waiting: Quota = None,
    max_running: Quota = None,
    max_stored_bytes: Quota = None,
    requests_per_minute: Quota = None,
    max_datasets: Quota = None,
    max_dataset_bytes: Quota = None,
    max_uploads: Quota = None,
    max_streams: Quota = None,
    max_webhooks: Quota = None,
    as_json: AsJson = False,
) -> None:
    """Create a project (operators only). Create its first key with `keys create --project`."""
    quotas = _quotas(locals())
    _show_projects([client.account.create_project(name, **quotas)], as_json, single=True)


@with_client
def edit_project(
    client: Client,
    project_id: Annotated[str, typer.Argument(help="Project: its id or the start of it, its name, or `last`.")],
    name: Annotated[str | None, typer.Option(help="New name.")] = None,
    max_waiting: Quota = None,
    max_running: Quota = None,
    max_stored_bytes: Quota = None,
    requests_per_minute: Quota = None,
    max_datasets: Quota = None,
    max_dataset_bytes: Quota = None,
    max_uploads: Quota = None,
    max_streams: Quota = None,
    max_webhooks: Quota = None,
    as_json: AsJson = False,
) -> None:
    """Change the name or quotas of a project (operators only)."""
    changes: dict[str, Any] = _quotas(locals())
    changes |= {"name": name} if name else {}
    _show_projects([client.account.edit_project(project_id, changes)], as_json, single=True)


@with_client
def usage(client: Client, as_json: AsJson = False) -> None:
    """Show the project's usage of each quota."""
    show_rows(client.account.usage(), USAGE_COLUMNS, as_json)


@with_client
def audit(
    client: Client,
    action: Annotated[str | None, typer.Option(help="Only this action, e.g. key.create.")] = None,
    object_id: Annotated[str | None, typer.Option("--object", help="Only actions on the object with this id.")] = None,
    project: Annotated[str | None, typer.Option(help="Id of another project, or `all` (operators only).")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of entries.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the audit log of the project, newest first."""
    log = client.account.audit(action=action, object_id=object_id, project_id=project, page_size=min(limit, 1000))
    entries = [entry for _, entry in zip(range(limit), log, strict=False)]
    show_rows(entries, AUDIT_COLUMNS, as_json)


@with_client
def list_workers(client: Client, as_json: AsJson = False) -> None:
    """List the live workers with their devices and jobs (operators only)."""
    workers = client.account.workers()
    if not as_json:  # a table shows names instead of whole records
        workers = [worker.model_copy(update=_names(worker)) for worker in workers]
    show_rows(workers, WORKER_COLUMNS, as_json)


@with_client
def drain_worker(client: Client, worker_id: WorkerId, as_json: AsJson = False) -> None:
    """Drain a worker: it accepts no new jobs and returns its current ones to the queue."""
    show_rows([client.account.order_worker(worker_id, "drain")], WORKER_COLUMNS[:3], as_json, single=True)


@with_client
def uncordon_worker(client: Client, worker_id: WorkerId, as_json: AsJson = False) -> None:
    """Let a drained worker accept jobs again."""
    show_rows([client.account.order_worker(worker_id, "uncordon")], WORKER_COLUMNS[:3], as_json, single=True)


GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "keys": (
        "Create, list, rotate and revoke API keys.",
        {"create": create_key, "list": list_keys, "rotate": rotate_key, "revoke": revoke_key},
    ),
    "hub-tokens": (
        "Hugging Face tokens, stored encrypted.",
        {"put": put_hub_token, "list": list_hub_tokens, "delete": delete_hub_token},
    ),
    "workers": (
        "List, drain and uncordon workers.",
        {"list": list_workers, "drain": drain_worker, "uncordon": uncordon_worker},
    ),
    "projects": (
        "Projects and their quotas.",
        {"list": list_projects, "create": create_project, "edit": edit_project},
    ),
}


def _names(worker: Worker) -> dict[str, list[str]]:
    return {"devices": [device["name"] for device in worker.devices], "jobs": [job["id"] for job in worker.jobs]}


def show_rows(rows: Iterable[Answer], columns: tuple[str, ...], as_json: bool, *, single: bool = False) -> None:
    """Print rows as a table or as JSON; with `single`, the JSON is one object instead of a list."""
    dumped = [row.model_dump(mode="json") for row in rows]
    if as_json:
        terminal.print_json(dumped[0] if single else dumped)
    else:
        terminal.out.print(terminal.rows_table(dumped, columns) if dumped else "None.")


def _show_projects(projects: Iterable[Project], as_json: bool, *, single: bool = False) -> None:
    if not as_json:  # a table shows only the limits that are set
        projects = [project.model_copy(update={"quotas": _limits(project)}) for project in projects]
    show_rows(projects, PROJECT_COLUMNS, as_json, single=single)


def _limits(project: Project) -> dict[str, int]:
    return {name: limit for name in QUOTAS if (limit := getattr(project, name)) is not None}


def show_key(key: ApiKey, as_json: bool) -> None:
    """Print only a new key on standard output, and its description on standard error; or all of it as JSON."""
    if as_json:
        terminal.print_json(key.model_dump(mode="json"))
        return
    terminal.out.print(key.key or "", soft_wrap=True)
    terminal.err.print(f"This is key {key.id} ({', '.join(key.scopes)}). It will not be shown again.", soft_wrap=True)


def _quotas(options: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the quotas that the options set; -1 becomes None (no limit)."""
    quotas = {name: options[name] for name in QUOTAS if options[name] is not None}
    return {name: None if value == -1 else value for name, value in quotas.items()}
