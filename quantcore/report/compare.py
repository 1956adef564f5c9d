"""Results of one model side by side: size against quality, and which of them no other one beats. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantcore.errors import ConfigError


@dataclass(frozen=True)
class Row:
    """One artifact. ``perplexity`` and ``kl`` (mean divergence from the original) are ``{value, stderr}``."""

    name: str
    scheme: str
    size_bytes: int
    perplexity: dict[str, float | None]
    kl: dict[str, float | None]
    num_failed_gates: int


def compare(folders: Sequence[str]) -> dict[str, Any]:
    """``rows`` from the smallest to the largest, ``front``: the names of those than which none is both smaller and
    nearer to the original, and ``warnings``.

    Raises ConfigError for a folder without a report, or with one that cannot be compared with the others.
    """
    reports = {name: read_report(Path(name)) for name in folders}
    first = next(iter(reports.values()))
    warnings = []
    for name, report in reports.items():
        if report["provenance"]["model"] != first["provenance"]["model"]:
            raise ConfigError(
                f"{name} was made of another model than {folders[0]}.",
                code="not_comparable",
                hint="Compare results of one model.",
            )
        if report["provenance"]["held_out_sha256"] != first["provenance"]["held_out_sha256"]:
            warnings.append(f"{name} was measured on another text than {folders[0]}: perplexities do not compare.")
    rows = sorted((_row(name, report) for name, report in reports.items()), key=lambda row: row.size_bytes)
    front = pareto_front([(row.size_bytes, row.kl["value"]) for row in rows])
    return {
        "rows": [asdict(row) | {"is_front": is_front} for row, is_front in zip(rows, front, strict=True)],
        "front": [row.name for row, is_front in zip(rows, front, strict=True) if is_front],
        "warnings": warnings,
    }


def read_report(folder: Path) -> dict[str, Any]:
    """The report of an artifact that was measured. Raises ConfigError ``no_report`` or ``not_measured``."""
    try:
        report: dict[str, Any] = json.loads((folder / "report.json").read_text("utf-8"))
        is_measured = report["quality"] is not None and bool(report["provenance"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"There is no report that can be read in {folder}.",
            code="no_report",
            hint="Give folders that a job of this version wrote.",
        ) from error
    if not is_measured:
        raise ConfigError(
            f"The result in {folder} was not measured.", code="not_measured", hint="Run it without --skip_evaluation."
        )
    return report


def pareto_front(points: Sequence[tuple[float, float | None]]) -> list[bool]:
    """Of points (size, loss): whether no other is as good in both and better in one. None is worse than any number."""
    known = [(size, float("inf") if loss is None else loss) for size, loss in points]
    return [
        not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in known) for point in known
    ]


def _row(name: str, report: dict[str, Any]) -> Row:
    schemes = sorted({layer["scheme"] for layer in report["layers"]})
    return Row(
        name=name,
        scheme=", ".join(schemes),
        size_bytes=report["summary"]["size_after_bytes"],
        perplexity=report["quality"]["after"]["token_perplexity"],
        kl=report["quality"]["divergence"]["kl_mean"],
        num_failed_gates=sum(row["status"] == "fail" for row in report["summary"]["gates"]),
    )
