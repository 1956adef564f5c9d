"""The commands `bitfoundry retention ...`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from bitfoundry.commands import terminal
from bitfoundry.commands.account import show_rows
from bitfoundry.commands.options import AsJson, with_client

if TYPE_CHECKING:
    from bitfoundry.client.project_answers import DueJobs
    from bitfoundry.client.service import Client

KeepLast = Annotated[int | None, typer.Option(min=1, help="Keep the newest N succeeded jobs, and the newest N others.")]
KeepDays = Annotated[int | None, typer.Option(min=1, help="Keep jobs that ended within the last N days.")]
POLICY_COLUMNS = ("keep_last", "keep_days", "service_keep_jobs_days", "service_keep_logs_days")
DUE_COLUMNS = ("id", "name", "state", "finished_at", "bytes", "reason")


@with_client
def show(client: Client, as_json: AsJson = False) -> None:
    """Show the project's retention policy and the operator's limits."""
    show_rows([client.retention.show()], POLICY_COLUMNS, as_json, single=True)


@with_client
def set_policy(
    client: Client,
    keep_last: KeepLast = None,
    keep_days: KeepDays = None,
    as_json: AsJson = False,
) -> None:
    """Set the retention policy. All other jobs are deleted: try `run --dry-run` first. No options: keep all."""
    policy = client.retention.set(keep_last=keep_last, keep_days=keep_days)
    show_rows([policy], POLICY_COLUMNS, as_json, single=True)


@with_client
def run(
    client: Client,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which jobs would be deleted, and why.")] = False,
    keep_last: KeepLast = None,
    keep_days: KeepDays = None,
    as_json: AsJson = False,
) -> None:
    """Delete the jobs that the policy does not keep. With --dry-run, you can try another policy."""
    if not dry_run and (keep_last, keep_days) != (None, None):
        raise typer.BadParameter("--keep-last and --keep-days need --dry-run; set the policy with `retention set`")
    retention = client.retention
    due = retention.preview(keep_last=keep_last, keep_days=keep_days) if dry_run else retention.run()
    if as_json:
        terminal.print_json(due.model_dump(mode="json"))
        return
    show_rows(due.data, DUE_COLUMNS, as_json)
    terminal.err.print(_summary(due, dry_run), soft_wrap=True)


def _summary(due: DueJobs, dry_run: bool) -> str:
    more = " (there are more)" if due.has_more else ""
    done = "would be deleted" if dry_run else "deleted"
    return f"{len(due.data)} jobs {done}, {due.bytes} bytes{more}; {due.num_pinned} pinned jobs kept"


COMMANDS: dict[str, Callable[..., None]] = {"show": show, "set": set_policy, "run": run}
