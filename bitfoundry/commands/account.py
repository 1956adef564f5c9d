"""The commands `keys`, `hub-tokens`, `projects`, `workers` (`GROUPS` has their sub-commands by name) and `audit`."""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from bitfoundry.client.account import Key as ApiKey
from bitfoundry.client.account import Project, Worker
from bitfoundry.client.answers import Answer
from bitfoundry.client.service import Client
from bitfoundry.commands import terminal
from bitfoundry.commands.options import AsJson, show_deleted, with_client

KeyId = Annotated[str, typer.Argument(help="The key's id, as `keys list` shows it.")]
Name = Annotated[str, typer.Argument(help="A name to know it by.")]
Scope = Annotated[list[str] | None, typer.Option(help="jobs:read, jobs:write, admin or operator; repeatable.")]
Quota = Annotated[int | None, typer.Option(min=-1, help="-1 takes the limit away.")]
KEY_COLUMNS = ("id", "name", "scopes", "last_used_at", "expires_at", "revoked_at")
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
WorkerId = Annotated[str, typer.Argument(help="As `workers list` shows it.")]
WORKER_COLUMNS = ("id", "state", "host", "devices", "beat_at", "jobs")
AUDIT_COLUMNS = ("at", "action", "object_id", "key_id", "request_id")


@with_client
def create_key(
    client: Client,
    name: Name,
    scope: Scope = None,
    expires_at: Annotated[str | None, typer.Option(help="A time with its zone: 2027-01-01T00:00:00Z.")] = None,
    project: Annotated[str | None, typer.Option(help="The id of another project (for an operator).")] = None,
    as_json: AsJson = False,
) -> None:
    """Make an API key, by default one that reads and writes jobs. It is shown once."""
    scopes = scope or ["jobs:read", "jobs:write"]
    _show_key(client.account.create_key(name, scopes, expires_at=expires_at, project_id=project), as_json)


@with_client
def list_keys(client: Client, as_json: AsJson = False) -> None:
    """List the project's API keys."""
    show_rows(client.account.keys(), KEY_COLUMNS, as_json)


@with_client
def rotate_key(
    client: Client,
    key_id: KeyId,
    overlap_s: Annotated[int, typer.Option(min=0, help="How long the present key shall work on.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Give a key a new secret. It is shown once."""
    _show_key(client.account.rotate_key(key_id, overlap_s=overlap_s), as_json)


@with_client
def revoke_key(client: Client, key_id: KeyId, as_json: AsJson = False) -> None:
    """End a key, at once and for ever."""
    show_rows([client.account.revoke_key(key_id)], KEY_COLUMNS, as_json, single=True)


@with_client
def put_hub_token(
    client: Client,
    name: Annotated[str, typer.Argument(help="Jobs say --hub-token NAME to use it.")],
    as_json: AsJson = False,
) -> None:
    """Keep a token for the Hugging Face Hub. It is asked for, or read from standard input; never an argument."""
    token = typer.prompt("token", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline().strip()
    show_rows([client.account.put_hub_token(name, token)], TOKEN_COLUMNS, as_json, single=True)


@with_client
def list_hub_tokens(client: Client, as_json: AsJson = False) -> None:
    """List the names of the tokens that the project keeps."""
    show_rows(client.account.hub_tokens(), TOKEN_COLUMNS, as_json)


@with_client
def delete_hub_token(
    client: Client,
    name: Annotated[str, typer.Argument()],
    as_json: AsJson = False,
) -> None:
    """Forget a token."""
    client.account.delete_hub_token(name)
    show_deleted(name, as_json)


@with_client
def list_projects(client: Client, as_json: AsJson = False) -> None:
    """List the projects that this key may see, their quotas and what they take of them."""
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
    """Make a project (for an operator). `keys create --project` makes its first key."""
    quotas = _quotas(locals())
    _show_projects([client.account.create_project(name, **quotas)], as_json, single=True)


@with_client
def edit_project(
    client: Client,
    project_id: Annotated[str, typer.Argument(help="The project's id, as `projects list` shows it.")],
    name: Annotated[str | None, typer.Option(help="A new name.")] = None,
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
    """Change a project's name or quotas (for an operator)."""
    changes: dict[str, Any] = _quotas(locals())
    changes |= {"name": name} if name else {}
    _show_projects([client.account.edit_project(project_id, changes)], as_json, single=True)


@with_client
def usage(client: Client, as_json: AsJson = False) -> None:
    """Show how much of each of its quotas the project uses."""
    show_rows(client.account.usage(), USAGE_COLUMNS, as_json)


@with_client
def audit(
    client: Client,
    action: Annotated[str | None, typer.Option(help="Only this, as key.create.")] = None,
    object_id: Annotated[str | None, typer.Option("--object", help="Only what was done to this id.")] = None,
    project: Annotated[str | None, typer.Option(help="Another project's id, or `all` (for an operator).")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show who did what in the project, newest first."""
    asked = client.account.audit(action=action, object_id=object_id, project_id=project, page_size=min(limit, 1000))
    found = [entry for _, entry in zip(range(limit), asked, strict=False)]
    show_rows(found, AUDIT_COLUMNS, as_json)


@with_client
def list_workers(client: Client, as_json: AsJson = False) -> None:
    """List the workers that live, their devices and the jobs that they have (for an operator)."""
    found = client.account.workers()
    if not as_json:  # people want names
        found = [each.model_copy(update=_names(each)) for each in found]
    show_rows(found, WORKER_COLUMNS, as_json)


@with_client
def drain_worker(client: Client, worker_id: WorkerId, as_json: AsJson = False) -> None:
    """Let a worker take no more jobs and give back those that it has."""
    show_rows([client.account.order_worker(worker_id, "drain")], WORKER_COLUMNS[:3], as_json, single=True)


@with_client
def uncordon_worker(client: Client, worker_id: WorkerId, as_json: AsJson = False) -> None:
    """Let a drained worker take jobs again."""
    show_rows([client.account.order_worker(worker_id, "uncordon")], WORKER_COLUMNS[:3], as_json, single=True)


GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "keys": (
        "API keys of the project: made, listed, rotated, revoked.",
        {"create": create_key, "list": list_keys, "rotate": rotate_key, "revoke": revoke_key},
    ),
    "hub-tokens": (
        "Tokens for the Hugging Face Hub, kept sealed.",
        {"put": put_hub_token, "list": list_hub_tokens, "delete": delete_hub_token},
    ),
    "workers": (
        "The workers of the service, and orders to take no jobs.",
        {"list": list_workers, "drain": drain_worker, "uncordon": uncordon_worker},
    ),
    "projects": (
        "Projects and their quotas.",
        {"list": list_projects, "create": create_project, "edit": edit_project},
    ),
}


def _names(worker: Worker) -> dict[str, list[str]]:
    return {"devices": [each["name"] for each in worker.devices], "jobs": [each["id"] for each in worker.jobs]}


def show_rows(rows: Iterable[Answer], columns: tuple[str, ...], as_json: bool, *, single: bool = False) -> None:
    """Rows of a table, for people or for programs; `single`: the one row is an object and not a list."""
    dumped = [row.model_dump(mode="json") for row in rows]
    if as_json:
        terminal.print_json(dumped[0] if single else dumped)
    else:
        terminal.out.print(terminal.rows_table(dumped, columns) if dumped else "none", soft_wrap=True)


def _show_projects(projects: Iterable[Project], as_json: bool, *, single: bool = False) -> None:
    if not as_json:  # people want to see the limits that there are
        projects = [each.model_copy(update={"quotas": _limits(each)}) for each in projects]
    show_rows(projects, PROJECT_COLUMNS, as_json, single=single)


def _limits(project: Project) -> dict[str, int]:
    return {name: limit for name in QUOTAS if (limit := getattr(project, name)) is not None}


def _show_key(key: ApiKey, as_json: bool) -> None:
    if as_json:
        terminal.print_json(key.model_dump(mode="json"))
        return
    terminal.out.print(key.key or "", soft_wrap=True)
    terminal.err.print(f"this is key {key.id} ({', '.join(key.scopes)}): it is not shown again", soft_wrap=True)


def _quotas(given: Mapping[str, Any]) -> dict[str, int | None]:
    """What was given of the options that are quotas; -1 is no limit."""
    found = {name: given[name] for name in QUOTAS if given[name] is not None}
    return {name: None if value == -1 else value for name, value in found.items()}
