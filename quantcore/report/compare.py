"""Compares results of one model: size against quality, and the Pareto front. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantcore.errors import ConfigError
from quantcore.report.paired import MIN_WINDOWS, compare_windows
from quantcore.report.quality import Measure, PairedChange, Perplexity, Quality, Record
from quantcore.report.values import Report

_IN_ARTIFACT = re.compile(r"^.*/(job_[0-9a-f]{32})/[0-9a-f]{64}(?=/|$)")
"""The folder of a job's artifact: nobody has given its path, but the name of the job."""


class Row(Record):
    """An artifact in a comparison.

    ``kl`` is the mean divergence from the original; ``is_front``: no other artifact is both smaller and nearer to the
    original. ``change`` is that from the first artifact named, by a paired test on the same tokens; ``not_tested`` says
    why there is none. The first artifact has neither.
    """

    name: str
    scheme: str
    size_bytes: int
    perplexity: Perplexity
    kl: Measure
    num_failed_gates: int
    is_front: bool
    change: PairedChange | None = None
    not_tested: str | None = None


class Comparison(Record):
    """Artifacts from the smallest to the largest, and the names of those on the Pareto front.

    ``first`` is the name of the one from which the changes of the others are.
    """

    first: str
    rows: tuple[Row, ...]
    front: tuple[str, ...]
    warnings: tuple[str, ...]


def compare(folders: Sequence[str]) -> Comparison:
    """Compare the artifacts in ``folders``. Those of a service's jobs are called by the ids of these.

    Raises ConfigError for a folder without a report, or with one that cannot be compared with the others.
    """
    reports = {_IN_ARTIFACT.sub(r"\1", name): read_report(Path(name)) for name in folders}
    first_name, first = next(iter(reports.items()))
    warnings = []
    for name, report in reports.items():
        if report.provenance.model != first.provenance.model:
            raise ConfigError(
                f"{name} was made from a different model than {first_name}.",
                code="not_comparable",
                hint="Compare results of one model.",
            )
        if report.provenance.held_out_sha256 != first.provenance.held_out_sha256:
            warnings.append(
                f"{name} was measured on a different text than {first_name}: their perplexities are not comparable."
            )
    measured = sorted(
        ((name, report, _quality(report, name)) for name, report in reports.items()),
        key=lambda entry: entry[1].summary.size_after_bytes,
    )
    front = pareto_front(
        [(report.summary.size_after_bytes, quality.divergence.kl_mean.value) for _, report, quality in measured]
    )
    rows = tuple(
        Row(
            name=name,
            scheme=", ".join(report.schemes),
            size_bytes=report.summary.size_after_bytes,
            perplexity=quality.after.token_perplexity,
            kl=quality.divergence.kl_mean,
            num_failed_gates=sum(gate.status == "fail" for gate in report.summary.gates),
            is_front=is_front,
            **({} if report is first else _change(report, first)),
        )
        for (name, report, quality), is_front in zip(measured, front, strict=True)
    )
    return Comparison(
        first=first_name, rows=rows, front=tuple(row.name for row in rows if row.is_front), warnings=tuple(warnings)
    )


def paired_change(new: Report, old: Report, tolerance: float = 0.0) -> PairedChange:
    """Return whether ``new`` is worse than ``old``, by what both reports keep of each window of text.

    Raises ConfigError ``not_comparable`` with the reason if they were not measured on the same tokens, or too few.
    """
    if reason := _why_not_paired(new, old):
        raise ConfigError(
            reason,
            code="not_comparable",
            hint="Measure both results on the same tokens: bitfoundry compare NEW OLD --against ORIGINAL.",
        )
    assert new.quality and new.quality.by_window and old.quality and old.quality.by_window
    return compare_windows(new.quality.by_window, old.quality.by_window, tolerance)


def _why_not_paired(new: Report, old: Report) -> str | None:
    """Return why two results cannot be compared token by token; None if they can."""
    if new.provenance.model != old.provenance.model:
        return "They were made from different models."
    if new.quality is None or old.quality is None:
        return "One of them was not measured on text."
    if new.provenance.held_out_sha256 != old.provenance.held_out_sha256:
        return "They were measured on different texts."
    windows, others = new.quality.by_window, old.quality.by_window
    if windows is None or others is None:
        return "The report of one lacks the measurements of each window: it is old, or has more than 1024 windows."
    if (windows.num_tokens, windows.texts) != (others.num_tokens, others.texts):
        return "They were measured on different tokens of one text."
    if len(windows.num_tokens) < MIN_WINDOWS:
        return f"They were measured on {len(windows.num_tokens)} windows; a paired test needs {MIN_WINDOWS}."
    if not sum(others.kl):
        return "The result to compare with predicts exactly what the original does."
    return None


def _change(report: Report, first: Report) -> dict[str, Any]:
    """Return the fields of a row about its change from the first result."""
    try:
        return {"change": paired_change(report, first)}
    except ConfigError as error:
        return {"not_tested": error.message}


def read_report(folder: Path) -> Report:
    """Read the report of an artifact. Raises ConfigError ``no_report``."""
    try:
        return Report.model_validate_json((folder / "report.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"There is no readable report in {folder}." if folder.is_dir() else f"There is no result '{folder}'.",
            code="no_report",
            hint="Give the folder of a result of this version, or an id or name that `bitfoundry list` shows.",
        ) from error


def pareto_front(points: Sequence[tuple[float, float | None]]) -> list[bool]:
    """Return for each point (size, loss) True if no other is as good in both and better in one.

    None is worse than any number.
    """
    losses = [(size, float("inf") if loss is None else loss) for size, loss in points]
    return [
        not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in losses)
        for point in losses
    ]


def _quality(report: Report, folder: str) -> Quality:
    """Return the quality of the result. Raises ConfigError ``not_measured``."""
    if report.quality is None:
        raise ConfigError(
            f"The result in {folder} was not measured.",
            code="not_measured",
            hint="Run the job without --skip_evaluation.",
        )
    return report.quality
