"""Sweeps in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bitfoundry.commands import terminal
from bitfoundry.commands.verdicts import verdict_text

if TYPE_CHECKING:
    from bitfoundry.client.answers import Job
    from bitfoundry.client.model_answers import BriefSweep, Sweep

ID_WIDTH = 12
"""Characters of a job's id that stand for it: every command takes the start of one."""
VALUE_WIDTH = 24


def sweep_table(sweep: Sweep) -> Group:
    """Return a sweep as a table with one row per job: its value on each axis, its state, and what was measured."""
    counts = ", ".join(f"{number} {state}" for state, number in sweep.by_state.items() if number)
    axes = axis_names(sweep.matrix)
    table = _table(["job", *axes.values(), "state", "size", "KL", "verdict"])
    for job in sweep.jobs:
        values = [_value(job, pointer) for pointer in axes]
        table.add_row(job.id[:ID_WIDTH], *values, terminal.state_text(job.state), *_measured(job))
    return Group(f"{sweep.id}  {sweep.name or ''}", counts, table)


def sweeps_table(sweeps: Iterable[BriefSweep]) -> Table:
    """Return sweeps as a table: axes with the number of their values, jobs by state, and the best result."""
    table = _table(["sweep", "name", "model", "axes", "jobs", "best result"])
    for sweep in sweeps:
        axes = ", ".join(f"{name} ({len(sweep.axes[pointer])})" for pointer, name in axis_names(sweep.axes).items())
        states = ", ".join(f"{number} {state}" for state, number in sweep.by_state.items() if number)
        best = sweep.best
        found = ""
        if best is not None and best.size_after_bytes is not None:
            kl = "" if best.kl_mean is None else f", KL {best.kl_mean:.3g}"
            found = f"{best.job_id[:ID_WIDTH]}: {best.verdict}, {terminal.megabytes(best.size_after_bytes)}{kl}"
        model = (sweep.model or "").rstrip("/").rpartition("/")[2]
        table.add_row(sweep.id, sweep.name or "", model, axes, states, found)
    return table


def axis_names(matrix: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Return a short name for each pointer: its last part, or all of it if two axes end alike."""
    last = {pointer: pointer.rpartition("/")[2] for pointer in matrix}
    names = list(last.values())
    return {pointer: name if names.count(name) == 1 else pointer for pointer, name in last.items()}


def _table(headings: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _value(job: Job, pointer: str) -> str:
    value = (job.sweep_values or {}).get(pointer)
    return terminal.shortened(value if isinstance(value, str) else json.dumps(value), VALUE_WIDTH)


def _measured(job: Job) -> tuple[str, str, str | Text]:
    """Return the size, the divergence and the verdict of a result; of other jobs the progress or the error."""
    if job.summary is None:
        return "", "", f"{job.error.message} ({job.error.code})" if job.error else terminal.progress_text(job)
    kl = "" if job.summary.kl_mean is None else f"{job.summary.kl_mean:.3g}"
    return terminal.megabytes(job.summary.size_after_bytes), kl, verdict_text(job)
