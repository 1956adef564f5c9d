"""Finds ids: a command takes the start of an id, the name of what has it, or `last` for the newest, in its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from bitfoundry.errors import BitfoundryError

if TYPE_CHECKING:
    from bitfoundry.client.service import Client

LISTS: dict[str, tuple[str, Callable[[Client], Iterable[Any]]]] = {
    "dataset_id": ("datasets", lambda client: client.datasets.list()),
    "key_id": ("keys", lambda client: client.account.keys()),
    "member_id": ("members", lambda client: client.account.members()),
    "project_id": ("projects", lambda client: client.account.projects()),
    "request_id": ("requests", lambda client: client.registry.requests(state="pending")),
    "sweep_id": ("sweeps", lambda client: client.sweeps()),
    "webhook_id": ("webhooks", lambda client: client.webhooks.list()),
    "worker_id": ("workers", lambda client: client.account.workers()),
}
"""For an argument of a command: the group whose `list` shows the ids, and what it shows."""

LISTED_BY = {"request_id": "registry requests", "sweep_id": "sweep list"}
"""The command that shows the ids, where it is not the group's `list`."""

FULL_ID = re.compile("[a-z]+_[0-9a-f]{32}|[0-9a-f]{12}")
"""An id that need not be looked up."""


def find_id(client: Client, argument: str, text: str) -> str:
    """Return the id that ``text`` stands for as ``argument``, one of LISTS or ``job_id``.

    Raises BitfoundryError `not_found` or `not_unique`, which names the candidates.
    """
    if FULL_ID.fullmatch(text):
        return text
    if argument == "job_id":
        return client.find(text).id
    group, rows_of = LISTS[argument]
    rows = [*rows_of(client)]
    if text == "last":
        found = sorted(rows, key=lambda row: str(getattr(row, "created_at", "")))[-1:]
    else:
        found = [row for row in rows if row.id == text] or [row for row in rows if text and _is_called(row, text)]
    if not found:
        shown_by = LISTED_BY.get(argument, f"{group} list")
        hint = f"`bitfoundry {shown_by}` shows ids and names."
        raise BitfoundryError(f"None of the {group} is '{text}'.", code="not_found", hint=hint)
    if len(found) > 1:
        shown = ", ".join(f"{row.id} ({getattr(row, 'name', None) or 'no name'})" for row in found[:5])
        raise BitfoundryError(f"'{text}' fits {len(found)} {group}: {shown}.", code="not_unique", hint="Give the id.")
    return str(found[0].id)


def _is_called(row: Any, text: str) -> bool:
    return row.id.startswith(text) or row.id.partition("_")[2].startswith(text) or getattr(row, "name", None) == text
