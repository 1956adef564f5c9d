"""Finds the models below the folders that jobs may read, for users who do not know their paths."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_DEPTH = 4
MAX_FOLDERS = 2_000
MAX_ENTRIES = 50_000
MAX_MODELS = 100
WEIGHTS = (".safetensors", ".gguf")
REPORT = "report.json"  # a job or `bitfoundry quantize` writes one beside its files, or above the folders of formats


@dataclass(frozen=True)
class FoundModel:
    """The folder of a model, and the size of its weight files. ``is_result``: a report says what it was made from."""

    path: Path
    size_bytes: int
    is_result: bool = False


@dataclass(frozen=True)
class FoundModels:
    """Models in the order of their paths. ``is_complete`` is False if a folder was left out, deep or one too many."""

    models: tuple[FoundModel, ...]
    is_complete: bool


def find_models(roots: Sequence[Path], *, besides: Path) -> FoundModels:
    """Find models below ``roots``, the shallow ones first, without opening a file.

    A model is a folder with a config.json and safetensors files, or with one GGUF file. Links, hidden folders and the
    folder ``besides`` are not followed, nor are folders inside of a model.
    """
    waiting = deque((root, 0, False) for root in dict.fromkeys(roots))
    found: dict[Path, FoundModel] = {}
    seen: set[Path] = set()
    num_entries, is_complete = 0, True
    while waiting:
        folder, depth, is_result = waiting.popleft()
        if folder in seen or folder == besides:
            continue
        if len(seen) >= MAX_FOLDERS or num_entries >= MAX_ENTRIES or len(found) >= MAX_MODELS:
            is_complete = False
            break
        seen.add(folder)
        entries = _entries(folder, MAX_ENTRIES - num_entries)
        num_entries += len(entries)
        is_complete = is_complete and num_entries < MAX_ENTRIES
        is_result = is_result or any(entry.name == REPORT for entry in entries)
        if model := _model_of(folder, entries, is_result):
            found[folder] = model
            continue
        folders = [Path(entry.path) for entry in entries if _is_searched(entry)]
        if depth < MAX_DEPTH:
            waiting.extend((each, depth + 1, is_result) for each in sorted(folders))
        elif folders:
            is_complete = False
    return FoundModels(tuple(found[path] for path in sorted(found)), is_complete)


def _entries(folder: Path, at_most: int) -> list[os.DirEntry[str]]:
    """Return what is in a folder; nothing of one that cannot be read, which a job could not read either."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry, _ in zip(entries, range(at_most), strict=False)]
    except OSError:
        return []


def _is_searched(entry: os.DirEntry[str]) -> bool:
    """Return whether to look into a folder. A name that is not printable cannot be the model of a job."""
    return not entry.name.startswith(".") and entry.name.isprintable() and entry.is_dir(follow_symlinks=False)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # links in a loop
        return False


def _model_of(folder: Path, entries: list[os.DirEntry[str]], is_result: bool) -> FoundModel | None:
    """Return the model in a folder with these entries, if it is one that ``quantcore.importing`` can read."""
    files = [entry for entry in entries if not entry.name.startswith(".") and _is_file(entry)]
    by_suffix = {suffix: [file for file in files if file.name.endswith(suffix)] for suffix in WEIGHTS}
    has_config = any(file.name == "config.json" for file in files)
    weights = by_suffix[".safetensors"] if has_config else by_suffix[".gguf"]
    if not weights or not (has_config or len(weights) == 1):
        return None
    try:
        return FoundModel(folder, sum(file.stat().st_size for file in weights), is_result)
    except OSError:  # a file went away meanwhile
        return None
