"""The commands for read-only links to a run's report: `share`, `shares`, `unshare`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from bitfoundry.commands import terminal
from bitfoundry.commands.account import show_rows
from bitfoundry.commands.options import AsJson, JobId, show_deleted, with_client

if TYPE_CHECKING:
    from bitfoundry.client.service import Client

UNITS_S = {"d": 24 * 3600, "h": 3600, "m": 60}
COLUMNS = ("id", "created_by", "created_at", "expires_at")


def seconds_of(text: str) -> int:
    """Parse '7d', '12h' or '30m' into seconds."""
    match = re.fullmatch(r"([0-9]{1,6})([dhm])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time such as 7d, 12h or 30m; the maximum is 90d")
    return int(match[1]) * UNITS_S[match[2]]


@with_client
def share(
    client: Client,
    job_id: JobId,
    expires: Annotated[
        str, typer.Option(help="Lifetime of the link in days, hours or minutes, such as 7d; at most 90d.")
    ] = "7d",
    as_json: AsJson = False,
) -> None:
    """Make a link to the report of a job for people without a key. The link is shown only once."""
    from bitfoundry.client.transport import is_local

    made = client.shares.create(job_id, expires_in_s=seconds_of(expires))
    if as_json:
        terminal.print_json(made.model_dump(mode="json"))
        return
    terminal.out.print(made.url or "", soft_wrap=True)
    until = f"Anyone with this link can read the report until {made.expires_at}."
    if is_local(made.url or ""):
        until = f"The link works on this machine only, since the service has no other address. {until}"
    terminal.err.print(f"{until} `bitfoundry unshare {job_id} {made.id}` revokes it.", soft_wrap=True)


@with_client
def shares(client: Client, job_id: JobId, as_json: AsJson = False) -> None:
    """List the links to a job's report that have not expired."""
    show_rows(client.shares.list(job_id), COLUMNS, as_json)


@with_client
def unshare(
    client: Client,
    job_id: JobId,
    share_id: Annotated[str, typer.Argument(help="Link id, as shown by `shares`.")],
    as_json: AsJson = False,
) -> None:
    """Revoke a link to a job's report."""
    client.shares.revoke(job_id, share_id)
    show_deleted(share_id, as_json)


COMMANDS: tuple[Callable[..., None], ...] = (share, shares, unshare)
