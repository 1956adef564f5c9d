"""Reads the documents of a source of calibration text, one after the other. No torch.

A source is *prose*, one text in order (a text file), or *rows* (the built-in text, JSON, CSV, Parquet, a dataset on the
Hub). Each row is a document, and one of its columns holds the text: a string, or a chat as a list of messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantcore.checkpoint.opening import resolved
from quantcore.config.texts import BUILTIN, TextPart
from quantcore.data import files, hub_dataset
from quantcore.data.builtin_text import Render, read_builtin
from quantcore.data.columns import choose_column, no_column
from quantcore.data.files import MAX_ROW_BYTES, Row
from quantcore.errors import CalibrationError


def is_prose(text: TextPart) -> bool:
    """Return True for a single text in order; False for rows, which may be taken in any order."""
    path = _file(text)
    return path is not None and files.format_of(path.name) == "txt"


def read_documents(text: TextPart, render: Render | None = None) -> Iterator[str]:
    """Yield the documents of the source, in its order; an empty one for a row without text.

    ``render`` is needed for chats. Raises CalibrationError as ``files.read_rows`` and ``hub_dataset.read_rows`` do;
    ``no_text_column``, ``no_chat_template``, ``calibration_not_found``.
    """
    if text.source == BUILTIN:
        yield from read_builtin(render)
        return
    path = _file(text)
    if path is None and not hub_dataset.is_resolved(text):
        text = hub_dataset.resolve(text)
    column: str | None = None
    for row in hub_dataset.read_rows(text) if path is None else files.read_rows(path):
        column = column or choose_column(list(row.values), text.column, row.place)
        yield text_of(row, column, render)


def text_of(row: Row, column: str, render: Render | None) -> str:
    """Return the text of a row, "" if it has none."""
    if column not in row.values:
        raise no_column(column, list(row.values), row.place)
    value = row.values[column]
    if is_chat(value):
        text = _rendered(row, value, render)
    elif isinstance(value, str) or value is None:
        text = value or ""
    else:
        raise CalibrationError(
            f"{row.place}: the column '{column}' is no text, but of type {type(value).__name__}.",
            code="no_text_column",
            hint='A text, or a chat: a list of {"role": ..., "content": ...}. Name another column?',
            field="/calibration/column",
            allowed=[name for name, other in row.values.items() if isinstance(other, str) or is_chat(other)],
        )
    if len(text) > MAX_ROW_BYTES:
        raise CalibrationError(f"{row.place} is longer than {MAX_ROW_BYTES >> 20} MiB.", code="row_too_large")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise CalibrationError(f"{row.place} has half a surrogate pair, which is no text.", code="bad_row")
    return "" if text.isspace() else text


def is_chat(value: Any) -> bool:
    """Return True for a list of messages, each with a role."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and "role" in message for message in value)


def _rendered(row: Row, messages: list[dict[str, Any]], render: Render | None) -> str:
    if render is None:
        raise CalibrationError(
            f"{row.place} is a chat, and there is no model whose template could make a text of it.",
            code="no_chat_template",
            hint="Name a column that holds text in calibration.column.",
            field="/calibration/column",
        )
    try:
        return render(messages)
    except CalibrationError as error:
        error.message = f"{row.place}: {error.message}"
        raise


def _file(text: TextPart) -> Path | None:
    """Return the source's file; None for a dataset on the Hub. Raises CalibrationError ``calibration_not_found``."""
    source, path = text.source, Path(text.source)
    if source == BUILTIN or text.revision is not None:
        return None
    if resolved(path).is_file():
        return path
    if path.is_absolute() or source.startswith(".") or source.count("/") > 1 or not hub_dataset.is_hub_name(source):
        raise CalibrationError(
            f"There is no data file at {source}.",
            code="calibration_not_found",
            hint="Give 'builtin', a data file that the worker can read, or the name of a Hub dataset.",
            field="/calibration/source",
        )
    return None
