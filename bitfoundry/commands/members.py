"""The commands `bitfoundry members ...`; `COMMANDS` maps names to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from bitfoundry.commands import terminal
from bitfoundry.commands.account import show_key, show_rows
from bitfoundry.commands.options import AsJson, show_deleted, with_client

if TYPE_CHECKING:
    from bitfoundry.client.service import Client

MemberId = Annotated[str, typer.Argument(help="Member: their id or the start of it, their name, or `last`.")]
ROLES = "viewer (sees jobs), editor (also submits, changes and chats) or admin (also manages the project)."
MEMBER_COLUMNS = ("id", "name", "role", "num_keys", "last_used_at", "created_at")


@with_client
def list_members(client: Client, as_json: AsJson = False) -> None:
    """List the members of the project with their roles."""
    show_rows(client.account.members(), MEMBER_COLUMNS, as_json)


@with_client
def add(
    client: Client,
    name: Annotated[str, typer.Argument(help="Name of the person.")],
    role: Annotated[str, typer.Option(help=f"Role: {ROLES}")],
    expires_at: Annotated[
        str | None, typer.Option(help="Expiry time of the key, with its time zone: 2027-01-01T00:00:00Z.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add a member to the project, and create the key to sign in with. It is shown only once."""
    member = client.account.add_member(name, role, expires_at=expires_at)
    if as_json or member.first_key is None:
        terminal.print_json(member.model_dump(mode="json"))
        return
    terminal.err.print(f"Added {member.id} as {member.role}.", soft_wrap=True)
    show_key(member.first_key, as_json)


@with_client
def edit(
    client: Client,
    member_id: MemberId,
    name: Annotated[str | None, typer.Option(help="New name.")] = None,
    role: Annotated[str | None, typer.Option(help=f"New role: {ROLES}")] = None,
    as_json: AsJson = False,
) -> None:
    """Change the name or role of a member. A new role changes what the member's keys can do at once."""
    show_rows([client.account.edit_member(member_id, name=name, role=role)], MEMBER_COLUMNS, as_json, single=True)


@with_client
def remove(client: Client, member_id: MemberId, as_json: AsJson = False) -> None:
    """Remove a member and revoke the member's keys, immediately and permanently."""
    client.account.remove_member(member_id)
    show_deleted(member_id, as_json)


COMMANDS: dict[str, Callable[..., None]] = {"list": list_members, "add": add, "edit": edit, "remove": remove}
