"""Finds the one thing that a name means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from bitfoundry.errors import BitfoundryError

SHOWN = 5
"""Candidates that the error for a name of several names."""


class Named(Protocol):
    """Something with an id, and perhaps a name."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str | None: ...


N = TypeVar("N", bound=Named)


def the_one(found: Sequence[N], name: str, what: str) -> N:
    """Return the only one of those ``found`` for ``name``.

    Raises BitfoundryError ``job_not_found``, or ``job_not_unique`` with the candidates.
    """
    if not found:
        raise BitfoundryError(
            f"There is no {what} '{name}'.", code="job_not_found", hint="`bitfoundry list` shows ids and names."
        )
    if len(found) > 1:
        shown = ", ".join(f"{each.id[:12]} ({each.name or 'no name'})" for each in found[:SHOWN])
        raise BitfoundryError(
            f"'{name}' fits {len(found)} of them: {shown}{' ...' if len(found) > SHOWN else ''}.",
            code="job_not_unique",
            hint=f"Give more of the id; `last` is the newest {what}.",
        )
    return found[0]
