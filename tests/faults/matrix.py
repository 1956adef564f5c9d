"""Runs the cells of the fault matrix, and renders the page of what was seen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tests.faults.cells import CELLS, CLOCKS, KINDS, Cell
from tests.faults.observer import Observer
from tests.faults.rig import LEASE_S, Rig
from tests.support.waiting import wait_until

Result = dict[str, Any]
PARTS = {
    "postgres": "PostgreSQL", "valkey": "the broker (Valkey)", "disk": "the disk of the data folder",
    "worker": "a worker", "engine": "an engine", "api": "the API",
}  # fmt: skip


def run_cell(rig: Rig, cell: Cell) -> Result:
    """Bring the fault about while a job runs, and return what was seen of it. ``broken`` lists broken promises."""
    observer = Observer(rig, f"{cell.part} {cell.kind}")
    observer.recover()
    running = wait_until(lambda: observer.submit(cell.mode))
    wait_until(lambda: observer.job(running).get("state") in ("running", "failed"))
    observer.clear()
    assert cell.fault is not None
    with cell.fault(rig):
        observer.watch(cell.seconds)
    lifted = time.monotonic()
    observer.recover()
    recovered_s = time.monotonic() - lifted
    observer.settle()
    job = observer.job(running)
    broken = observer.broken()
    if (code := (job.get("error") or {}).get("code", "")) != cell.code:
        broken.append(f"the job under way ended with '{code}' and not with '{cell.code}'")
    return {
        "part": cell.part,
        "kind": cell.kind,
        "lasted_s": cell.seconds,
        "answers": dict(sorted(observer.answers.items())),
        "probes": dict(sorted(observer.probes.items())),
        "slowest_s": round(observer.slowest_s, 1),
        "job": [job["state"], *observer.attempts(running)],
        "code": code,
        "recovered_s": round(recovered_s, 1),
        "num_accepted": len(observer.accepted),
        "broken": broken,
    }


def render(report: dict[str, Any]) -> str:
    """Return the page."""
    found = {(result["part"], result["kind"]): result for result in report["results"]}
    lines = [HEAD.format(date=report["date"], lease=LEASE_S, jobs=report["num_accepted"])]
    for part, title in PARTS.items():
        lines += [f"## {title[0].upper()}{title[1:]}", "", *_table(part, KINDS, found), ""]
    clocks = dict.fromkeys(cell.part for cell in CELLS if cell.part.startswith("clock"))
    lines += ["## Clocks", "", CLOCK_NOTE, ""]
    for part in clocks:
        lines += [f"### The {part}", "", *_table(part, CLOCKS, found), ""]
    return "\n".join(lines)


def _table(part: str, kinds: Sequence[str], found: dict[tuple[str, str], Result]) -> list[str]:
    rows = ["| fault | what a client sees | `/healthz/ready` | the job under way | back to normal |"]
    rows.append("|---|---|---|---|---|")
    cells = {cell.kind: cell for cell in CELLS if cell.part == part}
    for kind in kinds:
        if result := found.get((part, kind)):
            rows.append(f"| {kind} | {_shares(result['answers'])}; slowest {result['slowest_s']:g} s |"
                        f" {_shares(result['probes'])} | {_job(result)} | {result['recovered_s']:g} s |")  # fmt: skip
        else:
            rows.append(f"| {kind} | not run: {cells[kind].reason} | | | |")
    return rows


def _shares(answers: dict[str, int]) -> str:
    return ", ".join(f"{what} ({num})" for what, num in answers.items())


def _job(result: Result) -> str:
    state, *attempts = result["job"]
    code = f" with `{result['code']}`" if result["code"] else ""
    return f"{state}{code}; attempts: {', '.join(attempts)}"


HEAD = """# Fault matrix

Each part of the service was broken in each way that it can break, while a job ran and a client submitted another job
three times a second. This page is generated from a run on {date} by `python -m tests.faults`, which fails if a
promise is broken: every job that was accepted ({jobs} of them) is still there, and each succeeded exactly once.

Leases lasted {lease:g} s, a ninth of the usual 90 s, and "back after 60 s" was scaled in the same way to 7 s. Hung
parts were stopped (SIGSTOP) for 15 s, longer than a lease; slow ones ran for a tenth of the time. What had ended was
started again within a second, as `bitfoundry up` does.

The numbers in parentheses count answers; "no answer" means none within 12 s. The last column is the time from the end
of the fault until a new job was accepted and done. [Failure modes](failure-modes.md) has more faults, and a test for
each.
"""
CLOCK_NOTE = """\
Leases are compared by the database's clock, and worker and engine measure their own time with a clock that cannot jump.
So a wrong clock of the API or a worker changes no lease. If the database's clock jumps ahead, all leases end at once:
running jobs are taken back and done again. If it jumps back, running jobs go on, because the next heartbeat renews
their leases; a job whose worker is lost just then is taken back after at most two lengths of a lease.

At the end of each of these faults the clock was set right again. After an hour back, that is a jump ahead."""
