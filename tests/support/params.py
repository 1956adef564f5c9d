"""Parameters of tests: the usual ones run with ``make test``, all of them with ``make test-all``."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def with_rare(values: Iterable[Any], rare: Container[Any]) -> list[Any]:
    """Return ``values`` with the ``rare`` ones marked as slow: each of these is much like a usual one.

    A tuple has the values of several arguments."""
    return [pytest.param(*_tuple(value), marks=pytest.mark.slow) if value in rare else value for value in values]


def with_usual(values: Iterable[Any], usual: Container[Any]) -> list[Any]:
    """Return ``values`` with all but the ``usual`` ones marked as slow, as ``with_rare`` does."""
    values = list(values)
    return with_rare(values, [value for value in values if value not in usual])


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
