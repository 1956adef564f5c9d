"""Reads the rows of a data file one by one: JSON lines, JSON, CSV, Parquet or text, each also as .gz. No torch.

The file is not trusted. It is never read as a whole, rows and unpacked .gz files have limits, and errors name the line.
The suffix of a file's name is its format.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quantcore.errors import CalibrationError
from quantcore.sandbox.opening import open_named

MAX_ROW_BYTES = 16 << 20
MAX_UNPACKED_BYTES = 8 << 30
MAX_RATIO = 100  # unpacked to packed bytes; small files of equal lines may exceed it, a gigabyte of text does not
RATIO_COUNTS_FROM_BYTES = 64 << 20
TEXT_CHUNK_BYTES = 4 << 20
_READ_BYTES = 1 << 16
_BATCH_ROWS = 64  # of Parquet, in memory at a time


@dataclass(frozen=True)
class Row:
    """A row of data. ``place`` is its place in the file as a message shows it: ``Line 3``."""

    place: str
    values: dict[str, Any]


def is_data_file(name: str) -> bool:
    """Return True if the name ends as that of a data file does."""
    return _format_by_name(name) in FORMATS


def _format_by_name(name: str) -> str:
    suffix = Path(name.lower().removesuffix(".gz")).suffix.removeprefix(".")
    return {"md": "txt"}.get(suffix, suffix)


def format_of(name: str) -> str:
    """Return the format of a file by its name: ``jsonl`` for ``rows.jsonl.gz``.

    Raises CalibrationError ``unsupported_format``.
    """
    name_of_format = _format_by_name(name)
    if name_of_format not in FORMATS:
        raise CalibrationError(
            f"'{Path(name).name[:100]}' is not a supported type of data file.",
            code="unsupported_format",
            hint=f"Use a file that ends in {', '.join(f'.{suffix}' for suffix in FORMATS)}, or one of these with .gz.",
            field="/calibration/source",
            allowed=FORMATS,
        )
    return name_of_format


def is_packed(name: str) -> bool:
    return name.lower().endswith(".gz")


def read_rows(path: Path) -> Iterator[Row]:
    """Yield every row of the file, in order.

    Raises CalibrationError: ``unsupported_format``, ``empty_dataset``, ``bad_encoding``, ``bad_row``,
    ``row_too_large``, ``bad_archive``, ``archive_too_large``.
    """
    read = FORMATS[format_of(path.name)]
    num_rows = 0
    with _open(path) as stream:
        for row in read(stream):
            num_rows += 1
            yield row
    if not num_rows:
        raise CalibrationError(
            "The file has no rows.",
            code="empty_dataset",
            hint="Use a file with at least one row.",
            field="/calibration/source",
        )


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    with open_named(path) as stream:
        if not is_packed(path.name):
            yield stream
            return
        with io.BufferedReader(_Unpacked(stream, os.fstat(stream.fileno()).st_size), _READ_BYTES) as unpacked:
            yield unpacked


class _Unpacked(io.RawIOBase):
    """Stream that decompresses a gzip file up to the limits, so that a bomb is stopped while it expands."""

    def __init__(self, packed: BinaryIO, packed_bytes: int) -> None:
        self._stream = gzip.GzipFile(fileobj=packed)
        self._packed_bytes = packed_bytes
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            piece = self._stream.read(len(buffer))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise CalibrationError(
                f"The .gz file cannot be unpacked: {error}.", code="bad_archive", hint="It is damaged or not gzip."
            ) from error
        self._num_bytes += len(piece)
        _check_size(self._num_bytes, self._packed_bytes)
        buffer[: len(piece)] = piece
        return len(piece)


def _check_size(num_bytes: int, packed_bytes: int | None = None) -> None:
    """Raise CalibrationError if a file unpacks to too much; ``packed_bytes`` is its packed size, if comparable."""
    most = MAX_UNPACKED_BYTES
    if packed_bytes is not None:
        most = min(most, max(RATIO_COUNTS_FROM_BYTES, MAX_RATIO * packed_bytes))
    if num_bytes > most:
        raise CalibrationError(
            f"The file unpacks to more than the allowed {most >> 20} MiB.",
            code="archive_too_large",
            hint=f"The limits are {MAX_UNPACKED_BYTES >> 30} GiB and {MAX_RATIO} times the size of the .gz or "
            ".parquet file.",
        )


def _lines(stream: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield each line's number, from 1, and the line with its end; a byte order mark at the start is dropped."""
    number = 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            raise _too_large(f"Line {number}")
        yield number, _decode(line, number).removeprefix("\ufeff" if number == 1 else "")


def _decode(line: bytes, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"Line {number} is not UTF-8 text (its byte {error.start}).",
            code="bad_encoding",
            hint="Convert the file to UTF-8, for example with iconv.",
            field="/calibration/source",
        ) from error


def _json_lines(stream: BinaryIO) -> Iterator[Row]:
    for number, line in _lines(stream):
        if line.strip():
            yield _row(f"Line {number}", _parse(line, f"Line {number}"))


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad_row(f"{place} is not valid JSON: {error}", "Write one JSON object per line.") from error


def _json(stream: BinaryIO) -> Iterator[Row]:
    """Yield the rows of an array of objects, or of objects in sequence; only one is in memory at a time."""
    decoder, number = json.JSONDecoder(), 0
    pieces = io.TextIOWrapper(stream, encoding="utf-8-sig")
    try:
        text = pieces.read(_READ_BYTES).lstrip().removeprefix("[")
        while True:
            text = text.lstrip(" \t\r\n,")
            if text[:1] == "]":
                return
            try:
                value, end = decoder.raw_decode(text)
            except (ValueError, RecursionError) as error:
                piece = pieces.read(max(_READ_BYTES, len(text)))  # twice as much each time: a long row stays cheap
                if not piece and not text:
                    return
                if not piece or isinstance(error, RecursionError):
                    raise _bad_row(
                        f"Row {number + 1} is not valid JSON: {error}", "The file must be an array of objects."
                    ) from error
                if len(text) > MAX_ROW_BYTES:
                    raise _too_large(f"Row {number + 1}") from None
                text += piece
                continue
            text = text[end:]
            number += 1
            yield _row(f"Row {number}", value)
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"The text after row {number} is not UTF-8.", code="bad_encoding", hint="Convert the file to UTF-8."
        ) from error
    finally:
        pieces.detach()


def _csv(stream: BinaryIO) -> Iterator[Row]:
    """Yield the rows of a CSV file, whose first line names the columns."""
    csv.field_size_limit(MAX_ROW_BYTES)
    reader = csv.reader((line for _, line in _lines(stream)), strict=True)
    names: list[str] = []
    try:
        for fields in reader:
            place = f"Line {reader.line_num}"
            if not names:
                names = fields
                if len(set(names)) != len(names) or not all(names):
                    raise _bad_row(f"{place} must name each column once; it has: {', '.join(names)}", "")
            elif fields and len(fields) != len(names):
                raise _bad_row(
                    f"{place} has {len(fields)} fields, but there are {len(names)} columns", "Quote the commas."
                )
            elif fields:
                yield Row(place, dict(zip(names, fields, strict=True)))
    except csv.Error as error:
        if "field larger" in str(error):
            raise _too_large(f"Line {reader.line_num}") from error
        raise _bad_row(f"Line {reader.line_num} is not valid CSV: {error}", "Close all quotes.") from error


def _parquet(stream: BinaryIO) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise CalibrationError(
            "Reading Parquet needs pyarrow.", code="pyarrow_not_installed", hint="pip install pyarrow"
        ) from error
    number = num_bytes = 0
    with tempfile.TemporaryFile() as unpacked:
        if not stream.seekable():  # Parquet is read from its end
            while piece := stream.read(_READ_BYTES):
                unpacked.write(piece)
            stream = unpacked
        try:
            packed_bytes = stream.seek(0, io.SEEK_END)
            file = parquet.ParquetFile(stream, buffer_size=1 << 20)
            _check_size(sum(file.metadata.row_group(at).total_byte_size for at in range(file.num_row_groups)))
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                num_bytes += batch.nbytes  # the metadata counts each value of a dictionary only once
                _check_size(num_bytes, packed_bytes)
                if batch.nbytes > MAX_ROW_BYTES:
                    _check_rows([batch.slice(at, 1).nbytes for at in range(len(batch))], number)
                for values in batch.to_pylist():
                    number += 1
                    yield _row(f"Row {number}", values)
        except MemoryError as error:
            raise CalibrationError(
                f"The {_BATCH_ROWS} rows after row {number} do not fit into memory when unpacked.",
                code="archive_too_large",
                hint="Use smaller rows, or convert the file to .jsonl.gz.",
            ) from error
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _bad_row(f"The file is not readable Parquet ({type(error).__name__})", "") from error


def _check_rows(sizes: list[int], num_before: int) -> None:
    for number, num_bytes in enumerate(sizes, start=num_before + 1):
        if num_bytes > MAX_ROW_BYTES:
            raise _too_large(f"Row {number}")


def _text(stream: BinaryIO) -> Iterator[Row]:
    """Yield pieces of whole lines, as long as TEXT_CHUNK_BYTES allows."""
    lines: list[str] = []
    first = size = 0
    for number, line in _lines(stream):
        if size + len(line) > TEXT_CHUNK_BYTES and lines:
            yield Row(f"Line {first}", {"text": "".join(lines)})
            lines, size = [], 0
        first = first if lines else number
        lines.append(line)
        size += len(line)
    if lines:
        yield Row(f"Line {first}", {"text": "".join(lines)})


def _row(place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise CalibrationError(
            f"{place} has no columns: it is of type {type(value).__name__}, not an object.",
            code="no_text_column",
            hint='Each row must be an object such as {"text": "..."}.',
        )
    return Row(place, value)


def _bad_row(what: str, hint: str) -> CalibrationError:
    return CalibrationError(f"{what}.", code="bad_row", hint=hint, field="/calibration/source")


def _too_large(place: str) -> CalibrationError:
    return CalibrationError(
        f"{place} is longer than {MAX_ROW_BYTES >> 20} MiB.",
        code="row_too_large",
        hint="Split the text into several rows, or check for an unclosed quote.",
    )


FORMATS: dict[str, Callable[[BinaryIO], Iterator[Row]]] = {
    "jsonl": _json_lines,
    "json": _json,
    "csv": _csv,
    "parquet": _parquet,
    "txt": _text,
}
