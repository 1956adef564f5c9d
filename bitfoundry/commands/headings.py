"""The headings of ``bitfoundry --help``, with the commands below each, in the order in which they are shown."""

from typing import Any

import typer
from typer.core import TyperGroup

HEADINGS: dict[str, tuple[str, ...]] = {
    "Quantize on this machine": ("quantize", "auto", "mix", "plan", "convert", "imatrix", "conversations"),
    "Measure and try a result": ("evaluate", "reference", "compare", "explain", "chat", "speed", "track"),
    "Presets and models": ("presets", "inspect", "models", "pull", "registry"),
    "Jobs of a service": (
        "submit",
        "sweep",
        "list",
        "show",
        "watch",
        "events",
        "logs",
        "download",
        "push",
        "clone",
        "edit",
        "cancel",
        "pause",
        "resume",
        "retry",
        "delete",
        "share",
        "shares",
        "unshare",
    ),
    "Run a service": ("up", "demo", "doctor", "selftest", "install-converter", "workers", "backup", "restore", "fsck"),
    "Project": (
        "projects",
        "members",
        "keys",
        "hub-tokens",
        "datasets",
        "retention",
        "webhooks",
        "usage",
        "audit",
    ),
}


class Commands(TyperGroup):
    """The commands in the order of HEADINGS."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in HEADINGS.values() for name in names]


def put_under_headings(app: typer.Typer) -> None:
    """Give each command and group of ``app`` its heading."""
    heading_of = {name: heading for heading, names in HEADINGS.items() for name in names}
    for command in app.registered_commands:
        command.rich_help_panel = heading_of[command.name or str(getattr(command.callback, "__name__", ""))]
    for group in app.registered_groups:
        group.rich_help_panel = heading_of[str(group.name)]
