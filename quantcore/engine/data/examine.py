"""Examines a data file: first rows, statistics, tokens for a model. It runs in a child process: no row is trusted.

    python -m quantcore examine FILE check|preview|tokens [--column C] [--rows N] [--model DIR | --model_id ID]
        [--revision R] [--seq_len N]

prints one JSON object: ``{"result": {...}}``, or ``{"error": {...}}`` with status 1. It limits its memory and processor
time, so that it always ends.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from quantcore.data import files
from quantcore.data.columns import choose_column
from quantcore.data.documents import is_chat, text_of
from quantcore.errors import CalibrationError, QuantError
from quantcore.sandbox.parent_death import end_with_parent

MAX_ROWS = 5_000_000
MAX_TOKEN_ROWS = 20_000
MAX_DATA_BYTES = 2 << 30  # of memory that is its own
MAX_MAPPED_BYTES = 8 << 30  # with all files and libraries
MAX_WRITTEN_BYTES = 2 << 30  # of a temporary file
MIN_CPU_S = {"check": 60, "preview": 60, "tokens": 240}
BYTES_PER_CPU_S = 4 << 20
MAX_SHOWN_CHARS = 2000
MAX_SHOWN_MEMBERS = 50
MAX_SHOWN_DEPTH = 6


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    flags = argparse.ArgumentParser(prog="python -m quantcore examine")
    flags.add_argument("file", type=Path)
    flags.add_argument("action", choices=("check", "preview", "tokens"))
    flags.add_argument("--column")
    flags.add_argument("--rows", type=int, default=5)
    flags.add_argument("--model", type=Path)
    flags.add_argument("--model_id", help="a model on the Hub; its token is the first line of standard input")
    flags.add_argument("--revision", default="main")
    flags.add_argument("--seq_len", type=int, default=512)
    flags.add_argument("--parent", type=int, help="the parent process to end with")
    options = flags.parse_args(arguments)
    end_with_parent()
    if options.parent not in (None, os.getppid()):
        return 1  # the parent ended before end_with_parent took effect
    _limit_self(options.file, options.action)
    actions: dict[str, Callable[[], dict[str, Any]]] = {
        "check": lambda: check(options.file, options.column),
        "preview": lambda: preview(options.file, options.rows),
        "tokens": lambda: count_tokens(options.file, options.column, _model(options), options.seq_len),
    }
    try:
        print(json.dumps({"result": actions[options.action]()}))
        return 0
    except QuantError as error:
        return _refuse(error)
    except MemoryError:
        return _refuse(
            CalibrationError(
                "The file cannot be read: it needs too much memory.",
                code="unreadable_file",
                hint="Use a smaller part of it, or less text per row.",
            )
        )


def _model(options: argparse.Namespace) -> Path:
    """Return the folder with the model's tokenizer, which is fetched from the Hub for a ``model_id``."""
    if options.model_id is None:
        return Path(options.model)
    from quantcore.hub.download import download_tokenizer

    try:
        return download_tokenizer(options.model_id, options.revision, token=sys.stdin.readline().strip() or None)
    except QuantError as error:
        error.field = "/model"
        raise


def _refuse(error: QuantError) -> int:
    print(json.dumps({"error": showable(error.to_dict())}))
    return 1


def check(file: Path, column: str | None) -> dict[str, Any]:
    """Read every row; return the columns, the one with the text, and the ``statistics`` of that.

    Raises CalibrationError as ``files.read_rows`` and ``documents.text_of``; ``empty_dataset`` if no row has text;
    ``too_many_rows``.
    """
    columns: list[str] = []
    chosen, num_chats, lengths, seen = "", 0, array("q"), set()
    for row in files.read_rows(file):
        if not columns:
            columns = list(row.values)
            chosen = choose_column(columns, column, row.place)
        text = text_of(row, chosen, _plain)
        num_chats += is_chat(row.values[chosen])
        lengths.append(len(text))
        if text:
            seen.add(hashlib.blake2b(text.encode(), digest_size=8).digest())
        if len(lengths) > MAX_ROWS:
            raise CalibrationError(
                f"The file has more than {MAX_ROWS:,} rows.",
                code="too_many_rows",
                hint="Calibration needs a few thousand at most: use a part of it.",
            )
    with_text = array("q", filter(None, lengths))
    if not with_text:
        raise CalibrationError(
            f"None of the {len(lengths)} rows has text in the column '{chosen}'.",
            code="empty_dataset",
            hint=f"Its columns: {', '.join(columns)}. Specify one of them.",
            field="/calibration/column",
            allowed=columns,
        )
    statistics = {
        "num_rows": len(lengths),
        "num_empty": len(lengths) - len(with_text),
        "num_duplicates": len(with_text) - len(seen),
        "num_chats": num_chats,
        "chars": summary_of(with_text),
    }
    return {"columns": showable(columns), "column": chosen, "statistics": statistics}


def preview(file: Path, num_rows: int) -> dict[str, Any]:
    """Return the first rows, with long values cut short."""
    return {
        "rows": [
            {"place": row.place, "values": showable(row.values)} for row in islice(files.read_rows(file), num_rows)
        ]
    }


def count_tokens(file: Path, column: str | None, model_dir: Path, seq_len: int) -> dict[str, Any]:
    """Count the tokens of the first MAX_TOKEN_ROWS rows with the model's tokenizer and chat template.

    ``num_longer`` rows have more than ``seq_len`` tokens. The engine uses all their tokens, because it joins rows and
    cuts windows of ``seq_len``; a reader that cuts each row short would lose ``num_beyond`` tokens.
    """
    from quantcore.engine.data.chat_template import chat_renderer
    from quantcore.engine.data.tokenizer import load_tokenizer, tokenize_with

    tokenizer = load_tokenizer(model_dir)
    render, tokenize = chat_renderer(tokenizer, {}), tokenize_with(tokenizer)
    lengths, chosen = array("q"), ""
    rows = files.read_rows(file)
    for row in islice(rows, MAX_TOKEN_ROWS):
        chosen = chosen or choose_column(list(row.values), column, row.place)
        text = text_of(row, chosen, render)
        if text:
            lengths.append(len(tokenize(text)))
    if not lengths:
        raise CalibrationError("None of the rows has text.", code="empty_dataset")
    return {
        "num_rows": len(lengths),
        "is_whole": next(rows, None) is None,
        "seq_len": seq_len,
        "num_longer": sum(length > seq_len for length in lengths),
        "num_beyond": sum(max(length - seq_len, 0) for length in lengths),
        "num_windows": sum(lengths) // seq_len,
        "tokens": summary_of(lengths),
    }


def summary_of(lengths: Sequence[int]) -> dict[str, Any]:
    """Return sum, minimum, median, maximum, and the count per power of two: ``from`` <= length < ``to``."""
    ordered = sorted(lengths)
    counts: dict[int, int] = {}
    for length in ordered:
        power = max(length, 1).bit_length() - 1
        counts[power] = counts.get(power, 0) + 1
    return {
        "sum": sum(ordered),
        "min": ordered[0],
        "median": ordered[len(ordered) // 2],
        "max": ordered[-1],
        "histogram": [{"from": 1 << power, "to": 2 << power, "count": count} for power, count in counts.items()],
    }


def showable(value: Any, depth: int = 0) -> Any:
    """Return the value as short JSON data that any reader accepts: without half surrogate pairs, NaN or bytes."""
    if isinstance(value, str):
        cut = value if len(value) <= MAX_SHOWN_CHARS else f"{value[:MAX_SHOWN_CHARS]}…"
        return cut.encode("utf-8", "replace").decode()
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if depth < MAX_SHOWN_DEPTH and isinstance(value, dict):
        members: Iterable[Any] = islice(value.items(), MAX_SHOWN_MEMBERS)
        return {showable(str(name)): showable(member, depth + 1) for name, member in members}
    if depth < MAX_SHOWN_DEPTH and isinstance(value, list | tuple):
        return [showable(member, depth + 1) for member in value[:MAX_SHOWN_MEMBERS]]
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else showable(str(value)[: MAX_SHOWN_CHARS + 1])


def _plain(messages: list[dict[str, Any]]) -> str:
    """Return a chat's text without any model's template."""
    contents = [message.get("content") or "" for message in messages]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    return "\n".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in parts)


def _limit_self(file: Path, action: str) -> None:
    """Bound memory, processor time and temporary files."""
    import resource  # the service runs on POSIX systems alone; the rest of this module runs anywhere

    limits = {
        resource.RLIMIT_DATA: MAX_DATA_BYTES,
        resource.RLIMIT_AS: MAX_MAPPED_BYTES,
        resource.RLIMIT_FSIZE: MAX_WRITTEN_BYTES,
        resource.RLIMIT_CPU: MIN_CPU_S[action] + file.stat().st_size // BYTES_PER_CPU_S,
    }
    for kind, most in limits.items():
        soft, hard = resource.getrlimit(kind)
        finite = [limit for limit in (soft, hard, most) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(kind, (min(finite), hard))
