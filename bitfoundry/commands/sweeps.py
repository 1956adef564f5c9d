"""Sweeps in the terminal."""

from __future__ import annotations

import json

from rich.console import Group
from rich.text import Text

from bitfoundry.client.answers import Sweep
from bitfoundry.commands import terminal


def sweep_table(sweep: Sweep) -> Group:
    """Return a sweep as a table with one row per job: its values, its state, and its phase, verdict or error."""
    counts = ", ".join(f"{number} {state}" for state, number in sweep.by_state.items() if number)
    rows: list[list[str | Text]] = []
    for job in sweep.jobs:
        values = [json.dumps((job.sweep_values or {}).get(pointer)) for pointer in sweep.matrix]
        news = terminal.ending(job) if job.error else terminal.news(job)
        rows.append([job.id, *values, terminal.state_text(job.state), news])
    headings = ["job", *sweep.matrix, "state", "phase or verdict"]
    return Group(f"{sweep.id}  {sweep.name or ''}", counts, terminal.fitting_table(headings, rows))
