"""The page of the fault matrix is what its results say, and the matrix is run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.__main__ import PAGE, RESULTS
from tests.faults.cells import CELLS, CLOCKS, KINDS
from tests.faults.matrix import PARTS, render
from tests.support.service import ROOT


def test_the_page_is_what_the_results_say() -> None:
    report = json.loads(RESULTS.read_text())
    assert PAGE.read_text() == render(report), "write it with `python -m tests.faults`"
    assert [result["broken"] for result in report["results"]] == [[]] * len(report["results"])


def test_every_cell_was_run_or_has_a_reason() -> None:
    ran = {(result["part"], result["kind"]) for result in json.loads(RESULTS.read_text())["results"]}
    assert {(cell.part, cell.kind) for cell in CELLS if cell.fault is not None} == ran
    assert all(cell.reason for cell in CELLS if cell.fault is None)
    clocks = {cell.part for cell in CELLS} - set(PARTS)
    whole = {(part, kind) for part in PARTS for kind in KINDS} | {(clock, kind) for clock in clocks for kind in CLOCKS}
    assert {(cell.part, cell.kind) for cell in CELLS} == whole and len(clocks) == 2


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_fault_loses_a_job_or_runs_one_twice(tmp_path: Path) -> None:
    """All cells, on this machine: it needs mounts, as root."""
    command = [sys.executable, "-m", "tests.faults", "--results", tmp_path / "r.json", "--page", tmp_path / "page.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
