"""What the sandbox, its checks and its limits cost: a job as a worker runs it, on two or more source trees in turn.

    python -m bench.sandbox_cost MODEL TREE [TREE ...] --rounds 5

A tree is a checkout, of an older commit say (`git worktree add`, or `git archive COMMIT | tar -x -C TREE`). Prints for
each the medians of the processor time and of the largest resident memory of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

JOB = """
import inspect, json, resource, sys, threading
from pathlib import Path
from api.settings import Settings
from worker.engine import Engine
from quantcore.config import presets
folder, model = Path(sys.argv[1]), sys.argv[2]
settings = Settings(database_url="postgresql://x", broker_url="redis://x", data_dir=folder / "data",
    model_roots=(Path(model).parent,), engine_threads=1)
work = settings.work_dir / "job_1.1"
work.mkdir(parents=True)
(work / "task.json").write_text(json.dumps({
    "model_dir": model, "output_dir": str(work / "out"), "config": presets.resolve("int8_dynamic").to_dict(),
    "calibration": {"num_samples": 8, "seq_len": 256}, "evaluation": {"num_windows": 8, "seq_len": 256},
}))
named = {}
known = inspect.signature(Engine.__init__).parameters
if "project_id" in known:
    named["project_id"] = "prj_a"
limit = None
if "data_bytes" in known:
    from worker.memory_watch import MemoryWatch, data_limit_of, limit_of
    limit = limit_of(settings, 2 << 30)
    named["data_bytes"] = data_limit_of(limit)
if "limit" in known:
    from worker.memory_watch import MemoryLimit, MemoryWatch
    limit = named["limit"] = MemoryLimit(settings, 2 << 30, "bench")
engine = Engine(settings, work / "task.json", **named)
watch = None
if limit is not None:
    watch = MemoryWatch(engine.pid, limit, lambda: None)
    watch.__enter__()
log = []
reader = threading.Thread(target=lambda: log.extend(engine.log_lines()))
reader.start()
lines = list(engine.lines())
status = engine.wait()
reader.join()
if watch is not None:
    watch.__exit__(None, None, None)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
assert status == 0, b"".join(log).decode()[-2000:] + str(lines[-1:])
print(json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1024}))
"""


def run(tree: Path, model: Path) -> dict[str, Any]:
    """Return the processor time and the memory of a job with the sources in ``tree``."""
    with tempfile.TemporaryDirectory(prefix="bf-bench-") as folder:
        environment = os.environ | {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "BITFOUNDRY_ORIGINALS_DIR": ""}
        command = [sys.executable, "-c", JOB, folder, str(model.resolve())]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{tree}: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sandbox_cost", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("trees", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: dict[Path, list[dict[str, Any]]] = {tree.resolve(): [] for tree in options.trees}
    for _ in range(options.rounds):
        for tree, results in found.items():
            results.append(run(tree, options.model))
            print(tree.name, json.dumps(results[-1]), flush=True)
    for tree, results in found.items():
        medians = {name: round(statistics.median(each[name] for each in results), 2) for name in results[0]}
        print(f"{tree.name}: {medians}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
