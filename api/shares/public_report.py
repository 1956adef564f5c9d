"""A job's report for people without a key: the names of files and folders stand in place of their paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

from api.jobs import service
from api.store.tables.jobs import Artifact
from quantcore.report.values import Report

_NAMED = ("model", "calibration", "evaluation", "config", "provenance")
"""Parts of a report in which a text that begins with a slash is a path, whatever characters are in it."""
_PATH = re.compile(r"(?:file://|(?<![\w.~:/]))/[\w.~][^\s\"'<>|;,()]*")
"""A path within a text, but not the path of a URL or a fraction as in tokens/s."""


def read(artifact: Artifact) -> Report | None:
    """Return the public report of an artifact; None if there is none that this version can read."""
    report = service.read_report(artifact)
    return None if report is None else without_paths(report)


def without_paths(report: Report) -> Report:
    """Return the report with the name of each file and folder in place of its path.

    Sample outputs stay as they are: a path in them is a model's invention or the evaluation text's.
    """
    content = report.to_dict()
    paths = {text for part in _NAMED for text in _texts(content[part]) if text.startswith("/")}
    longest_first = sorted(paths, key=len, reverse=True)

    def rename(text: str) -> str:
        for path in longest_first:
            text = text.replace(path, PurePosixPath(path).name)
        return _PATH.sub(lambda match: PurePosixPath(match[0]).name, text)

    shown = {name: value if name == "samples" else _changed(value, rename) for name, value in content.items()}
    return Report.model_validate(shown)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _texts(member)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _changed(member, change) for name, member in value.items()}
    return [_changed(member, change) for member in value] if isinstance(value, list | tuple) else value
