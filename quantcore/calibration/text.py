"""Text to token windows: calibration windows from the first part of a source, held-out windows from the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from quantcore.config import CalibrationConfig
from quantcore.errors import CalibrationError

HELD_OUT_SHARE = 0.25
Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class TokenWindows:
    """Token ids. ``calibration_NT`` and ``held_out_NT`` come from different parts of the text and never overlap."""

    calibration_NT: torch.Tensor
    held_out_NT: torch.Tensor


def token_windows(
    calibration: CalibrationConfig,
    tokenize: Tokenize,
    *,
    num_held_out: int,
    held_out_len: int,
    separator: int | None = None,
) -> TokenWindows:
    """Read the source, tokenize it into one stream (documents joined by ``separator``) and cut windows without padding.

    The first three quarters of what is read serve calibration: ``num_samples`` windows drawn with the seed. The last
    quarter is held out. Raises CalibrationError with the number that the source can give.
    """
    wanted = calibration.num_samples * calibration.seq_len
    enough = max(wanted / (1 - HELD_OUT_SHARE), num_held_out * held_out_len / HELD_OUT_SHARE)
    stream: list[int] = []
    for document in read_documents(calibration.source):
        stream.extend(tokenize(document))
        if separator is not None:
            stream.append(separator)
        if calibration.source != "builtin" and len(stream) > 1.1 * enough:
            break
    border = int(len(stream) * (1 - HELD_OUT_SHARE))
    pool = _cut(stream[:border], calibration.seq_len)
    held_out = _cut(stream[border:], held_out_len)
    if len(pool) < calibration.num_samples or len(held_out) < num_held_out:
        raise CalibrationError(
            f"The source '{calibration.source}' gives {len(pool)} calibration windows of {calibration.seq_len} tokens "
            f"and {len(held_out)} held-out ones of {held_out_len}; "
            f"{calibration.num_samples} and {num_held_out} are needed.",
            code="not_enough_samples",
            hint="Lower num_samples or seq_len, or give more text.",
            field="/calibration/num_samples",
        )
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(calibration.seed))
    spread = torch.linspace(0, len(held_out) - 1, num_held_out).long()  # from all over the held-out part
    return TokenWindows(pool[order[: calibration.num_samples]], held_out[spread])


def read_documents(source: str) -> Iterator[str]:
    """The documents of ``builtin``, a text file, a JSON-lines file with a ``text`` field, or a Hub dataset's name."""
    path = Path(source)
    if source == "builtin":
        from pydoc_data import topics

        yield from (topics.topics[name] for name in sorted(topics.topics))
    elif path.suffix == ".jsonl" and path.is_file():
        yield from _json_lines(path)
    elif path.is_file():
        yield _text(path)
    elif path.is_absolute() or source.startswith(".") or source.count("/") > 1:
        raise CalibrationError(
            f"There is no calibration file at {source}.",
            code="calibration_not_found",
            hint="Give 'builtin', a .txt or .jsonl file that the worker can read, or the name of a Hub dataset.",
            field="/calibration/source",
        )
    else:
        yield from _hub_dataset(source)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"{path} is not UTF-8 text (byte {error.start}).", code="bad_encoding", hint="Convert it to UTF-8."
        ) from error


def _json_lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CalibrationError(
                    f"Line {number} of {path} is not valid JSON: {error}.",
                    code="bad_row",
                    hint="One JSON object a line.",
                ) from error
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                columns = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise CalibrationError(
                    f"Line {number} of {path} has no text field; it has: {columns}.", code="no_text_column",
                    hint='Each line must be an object like {"text": "..."}.',
                )  # fmt: skip
            yield row["text"]


def _hub_dataset(name: str) -> Iterator[str]:
    """Stream a Hub dataset's text column with the ``datasets`` library (an optional dependency)."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CalibrationError(
            f"'{name}' is no file, and reading it as a Hub dataset needs the datasets library.",
            code="datasets_not_installed",
            hint="pip install 'bitfoundry[datasets]', or give 'builtin' or a file.",
        ) from error
    name, split = {"pileval": ("mit-han-lab/pile-val-backup", "validation")}.get(name, (name, "train"))
    try:
        for row in load_dataset(name, split=split, streaming=True):
            yield row["text"]
    except Exception as error:  # the library raises many kinds: network, auth, missing repository or column
        raise CalibrationError(
            f"The Hub dataset '{name}' cannot be read: {error}.",
            code="dataset_unreachable",
            hint="Check the name and the network, or give 'builtin' or a file.",
            retryable=True,
        ) from error


def _cut(stream: list[int], length: int) -> torch.Tensor:
    """Consecutive windows [N, length]; a rest shorter than ``length`` is dropped."""
    count = len(stream) // length
    return torch.tensor(stream[: count * length], dtype=torch.long).view(count, length)
