"""``python -m tests.faults``: run the fault matrix, keep its results and write its page.

Runs in a mount namespace of its own, with small disks in memory: Linux, as root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from tests.faults.cells import CELLS, Cell
from tests.faults.matrix import render, run_cell
from tests.faults.rig import Rig
from tests.support.service import ROOT

RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "reference" / "fault-matrix.md"
INSIDE = "BITFOUNDRY_TEST_OWN_MOUNTS"


def run(cells: Sequence[Cell], results: Path) -> int:
    """Run the ``cells``. Return 1 if a promise was broken."""
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="bf-faults-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        Rig(Path(folder)) as rig,
    ):
        for cell in cells:
            found.append(run_cell(rig, cell))
            print(json.dumps(found[-1]), flush=True)
    report = {
        "date": date.today().isoformat(),
        "num_accepted": sum(result["num_accepted"] for result in found),
        "results": found,
    }
    results.write_text(json.dumps(report, indent=1) + "\n")
    broken = [f"{result['part']} {result['kind']}: {what}" for result in found for what in result["broken"]]
    print("\n".join(broken) or "all promises held")
    return 1 if broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", default="", help="only cells whose name contains this, as 'postgres hung'")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    chosen = [cell for cell in CELLS if cell.fault is not None and options.only in f"{cell.part} {cell.kind}"]
    if not chosen:
        parser.error(f"no cell has '{options.only}' in its name: {', '.join(f'{c.part} {c.kind}' for c in CELLS)}")
    if INSIDE not in os.environ:
        command = ["unshare", "-m", sys.executable, "-m", "tests.faults", *sys.argv[1:]]
        return subprocess.run(command, cwd=ROOT, env=os.environ | {INSIDE: "1"}).returncode
    status = run(chosen, options.results)
    options.page.write_text(render(json.loads(options.results.read_text())))
    return status


if __name__ == "__main__":
    sys.exit(main())
