"""Which column of a row is the text."""

from __future__ import annotations

from quantcore.errors import CalibrationError

DEFAULT_COLUMNS = ("text", "messages")


def choose_column(there: list[str], given: str | None, place: str = "The data") -> str:
    """The column of the text: the given one, else ``text`` or ``messages``. Raises CalibrationError
    ``no_text_column``, which lists what is there."""
    for name in (given,) if given else DEFAULT_COLUMNS:
        if name in there:
            return name
    raise no_column(given or DEFAULT_COLUMNS[0], there, place)


def no_column(given: str, there: list[str], place: str = "The data") -> CalibrationError:
    """The error for a column that is not there."""
    return CalibrationError(
        f"{place} has no column '{given}'; it has: {', '.join(there)}.",
        code="no_text_column",
        hint="Name one of these in calibration.column.",
        field="/calibration/column",
        allowed=there,
    )
