"""Reads the documents of a source of calibration text, one after the other. No torch.

A source is *prose*, one text in order (a text file), or *rows* (the built-in text, JSON, CSV, Parquet, a dataset on the
Hub). Each row is a document, and one of its columns holds the text: a string, or a chat as a list of messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from quantcore.config.texts import BUILTIN, TextPart
from quantcore.data import files, hub_dataset
from quantcore.data.builtin_text import Render, read_builtin
from quantcore.data.columns import choose_column, no_column
from quantcore.data.files import MAX_ROW_BYTES, Row
from quantcore.data.messages import MEDIA_COLUMNS, Reference, holds_media, sounds_of, texts_of, without_references
from quantcore.errors import CalibrationError
from quantcore.sandbox.opening import resolved

TOOLS = "tools"
"""Name of the column with the tools that a chat may call."""


@dataclass(frozen=True)
class Document:
    """A rendered document with its images and sounds, in the order of the text.

    ``text_alone`` is the text without them; ``place`` is that of the row.
    """

    text: str
    text_alone: str
    place: str
    media: tuple[Reference, ...] = ()

    def __len__(self) -> int:
        return len(self.text) + sum(len(reference.source) for reference in self.media)

    def without_media(self) -> Document:
        return replace(self, text=self.text_alone, media=())


def is_prose(text: TextPart) -> bool:
    """Return True for a single text in order; False for rows, which may be taken in any order.

    A file with one row is a single text as well: calibration and evaluation share it.
    """
    path = find_file(text)
    if path is None or files.format_of(path.name) == "txt":
        return path is not None
    return len(list(islice(files.read_rows(path), 2))) == 1


def read_documents(text: TextPart, render: Render | None = None) -> Iterator[str]:
    """Yield the documents of the source, in its order; an empty one for a row without text.

    ``render`` is needed for chats. Raises CalibrationError as ``files.read_rows`` and ``hub_dataset.read_rows`` do;
    ``no_text_column``, ``no_chat_template``, ``calibration_not_found``.
    """
    if text.source == BUILTIN:
        yield from read_builtin(render)
        return
    for row, column in _rows(text, (TOOLS,)):
        yield text_of(row, column, render)


def read_documents_with_media(text: TextPart, render: Render) -> Iterator[Document]:
    """Yield the documents of a source that is not built in, with their images and sound.

    ``render`` renders messages that have parts. Raises CalibrationError as ``read_documents`` and
    ``without_references`` do.
    """
    for row, column in _rows(text, (*MEDIA_COLUMNS, TOOLS)):
        value = row.values.get(column)
        if not isinstance(value, list) or not is_chat(value) or not holds_media(value):
            plain = text_of(row, column, render)
            yield Document(plain, plain, row.place, sounds_of(row.values))
            continue
        with at_row(row.place):
            messages, media = without_references(value, row.values)
            tools = _tools(row)
            texts = render(messages, *tools), render(texts_of(messages), *tools)
            yield Document(*texts, row.place, media)


def has_sound(text: TextPart, hears: Callable[[], bool]) -> bool:
    """Return True if the model ``hears``, and the first row of a source has audio with its text."""
    if text.source == BUILTIN or is_prose(text) or not hears():
        return False
    return any(sounds_of(row.values) for row, _ in islice(_rows(text, MEDIA_COLUMNS), 1))


def _rows(text: TextPart, others: Iterable[str] = ()) -> Iterator[tuple[Row, str]]:
    """Yield the rows of a source, each with the name of its column with the text.

    Of a dataset on the Hub they have only this column, and the ``others`` that it has.
    """
    path = find_file(text)
    if path is None and not hub_dataset.is_resolved(text):
        text = hub_dataset.resolve(text)
    column: str | None = None
    for row in hub_dataset.read_rows(text, others) if path is None else files.read_rows(path):
        column = column or choose_column([name for name in row.values if name not in others], text.column, row.place)
        yield row, column


def media_folder(text: TextPart) -> Path | None:
    """Return the folder that paths of images in ``text`` are relative to; None for a dataset on the Hub."""
    path = find_file(text)
    return None if path is None else resolved(path).parent


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
            f"{row.place}: the column '{column}' is not text, but of type {type(value).__name__}.",
            code="no_text_column",
            hint='It must be a text or a chat: a list of {"role": ..., "content": ...}. Is it the right column?',
            field="/calibration/column",
            allowed=[name for name, other in row.values.items() if isinstance(other, str) or is_chat(other)],
        )
    if len(text) > MAX_ROW_BYTES:
        raise CalibrationError(f"{row.place} is longer than {MAX_ROW_BYTES >> 20} MiB.", code="row_too_large")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise CalibrationError(f"{row.place} has half a surrogate pair, which is not text.", code="bad_row")
    return "" if text.isspace() else text


def is_chat(value: Any) -> bool:
    """Return True for a list of messages, each with a role."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and "role" in message for message in value)


@contextmanager
def at_row(place: str) -> Iterator[None]:
    """Let errors inside begin with the ``place`` of a row."""
    try:
        yield
    except CalibrationError as error:
        error.message = f"{place}: {error.message}"
        raise


def _rendered(row: Row, messages: list[dict[str, Any]], render: Render | None) -> str:
    if render is None:
        raise CalibrationError(
            f"{row.place} is a chat, but there is no model whose chat template could render it.",
            code="no_chat_template",
            hint="Set calibration.column to a column that contains text.",
            field="/calibration/column",
        )
    with at_row(row.place):
        return render(messages, *_tools(row))


def _tools(row: Row) -> tuple[list[Any], ...]:
    """Return the tools of a chat, in a column beside it, as further arguments of a template; none if it has none.

    Raises CalibrationError for anything but a list of them, which may be JSON in a string.
    """
    tools = row.values.get(TOOLS)
    if isinstance(tools, str) and tools.strip():
        with suppress(ValueError, RecursionError):
            tools = json.loads(tools)
    if not tools:
        return ()
    if not isinstance(tools, list):
        raise CalibrationError(
            f"the column '{TOOLS}' is of type {type(tools).__name__}, not a list of tools.",
            code="bad_row",
            hint="Use a list of JSON schemas of functions, or remove the column.",
        )
    return (tools,)


def find_file(text: TextPart) -> Path | None:
    """Return the source's file; None for a dataset on the Hub. Raises CalibrationError ``calibration_not_found``.

    What ends as a data file does is none on the Hub: ``chats.jsonl``.
    """
    source, path = text.source, Path(text.source)
    if source == BUILTIN or text.revision is not None:
        return None
    if resolved(path).is_file():
        return path
    is_path = path.is_absolute() or source.startswith(".") or source.count("/") > 1 or files.is_data_file(source)
    if is_path or not hub_dataset.is_hub_name(source):
        raise CalibrationError(
            f"There is no data file at {source}.",
            code="calibration_not_found",
            hint="Use 'builtin', a data file that the worker can read, or the name of a Hub dataset.",
            field="/calibration/source",
        )
    return None
