"""Rows as a table of pandas, which is not among our requirements. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from quantcore.errors import ConfigError


def data_frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return rows with a ``name`` as a pandas DataFrame. Raises ConfigError if pandas is not installed."""
    try:
        pandas = import_module("pandas")
    except ImportError as error:
        raise ConfigError(
            "pandas is not installed.", code="missing_package", hint="Install it: pip install pandas."
        ) from error
    return pandas.DataFrame(list(rows)).set_index("name")
