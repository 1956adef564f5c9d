"""Chooses the column of a row that holds the text."""

from __future__ import annotations

from quantcore.errors import CalibrationError

DEFAULT_COLUMNS = ("text", "messages")


def choose_column(there: list[str], column: str | None, place: str = "The data") -> str:
    """Return the column of the text among those ``there``: ``column``, else ``text`` or ``messages``.

    Raises CalibrationError ``no_text_column``, which lists the existing columns.
    """
    for name in (column,) if column else DEFAULT_COLUMNS:
        if name in there:
            return name
    raise no_column(column or DEFAULT_COLUMNS[0], there, place)


def no_column(column: str, there: list[str], place: str = "The data") -> CalibrationError:
    """Return the error for a missing column."""
    return CalibrationError(
        f"{place} has no column '{column}'; it has: {', '.join(there)}.",
        code="no_text_column",
        hint="Set calibration.column to one of these.",
        field="/calibration/column",
        allowed=there,
    )
