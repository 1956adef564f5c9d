"""What the sandbox, its checks and its limits cost: a job as a worker runs it, on two or more source trees in turn.

    python -m bench.sandbox_cost MODEL TREE [TREE ...] --rounds 5
    python -m bench.sandbox_cost MODEL . .:off                     # this tree, with engines confined and not

A tree is a checkout, of an older commit say (`git worktree add`, or `git archive COMMIT | tar -x -C TREE`). Prints for
each the medians of the processor time, and of the memory that no file backs, of all processes of the job together: at
the job's first event, before it reads any weight, where runs agree within a megabyte; and the most of it.
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
import inspect, json, os, resource, signal, sys, threading
from contextlib import suppress
from pathlib import Path
import psutil
from api.settings import Settings
from worker.engine import Engine
from quantcore.config import presets
folder, model = Path(sys.argv[1]), sys.argv[2]
settings = Settings(database_url="postgresql://x", broker_url="redis://x", data_dir=folder / "data",
    model_roots=(Path(model).parent,), engine_threads=1, confine_engine=sys.argv[3] != "off")
work = settings.work_dir / "job_1.1"
work.mkdir(parents=True)
evaluation = {"num_windows": 8, "seq_len": 256}
try:
    from quantcore.config.job_spec import Evaluation  # trees that also score answers: the same work is compared
    evaluation |= {"num_answers": 0} if "num_answers" in Evaluation.model_fields else {}
except ImportError:
    pass
(work / "task.json").write_text(json.dumps({
    "model_dir": model, "output_dir": str(work / "out"), "config": presets.resolve("int8_dynamic").to_dict(),
    "calibration": {"num_samples": 8, "seq_len": 256}, "evaluation": evaluation,
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
peak, ended = 0, threading.Event()
def held():
    texts = [Path(f"/proc/{process.pid}/status").read_text() for process in psutil.Process().children(recursive=True)]
    lines = [line for text in texts for line in text.splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
def look():
    global peak
    while not ended.wait(0.02):
        with suppress(psutil.Error, OSError):
            peak = max(peak, held())
looker = threading.Thread(target=look)
looker.start()
log = []
reader = threading.Thread(target=lambda: log.extend(engine.log_lines()))
reader.start()
lines, start = [], 0
for line in engine.lines():
    if not lines:
        os.killpg(engine._process.pid, signal.SIGSTOP)
        start = held()
        os.killpg(engine._process.pid, signal.SIGCONT)
    lines.append(line)
status = engine.wait()
reader.join()
ended.set()
looker.join()
if watch is not None:
    watch.__exit__(None, None, None)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
assert status == 0, b"".join(log).decode()[-2000:] + str(lines[-1:])
print(json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "start_mb": start / 1024, "peak_mb": peak / 1024}))
"""


def run(tree: str, model: Path) -> dict[str, Any]:
    """Return the processor time and the memory of a job with the sources in ``tree``."""
    path, _, confined = tree.partition(":")
    with tempfile.TemporaryDirectory(prefix="bf-bench-") as folder:
        environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "BITFOUNDRY_ORIGINALS_DIR": ""}
        command = [sys.executable, "-c", JOB, folder, str(model.resolve()), confined]
        done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{tree}: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sandbox_cost", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("trees", nargs="+", metavar="TREE[:off]")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    trees = [str(Path(tree).resolve()) for tree in options.trees]
    found: dict[str, list[dict[str, Any]]] = {tree: [] for tree in trees}
    for _ in range(options.rounds):
        for tree, results in found.items():
            results.append(run(tree, options.model))
            print(Path(tree).name, json.dumps(results[-1]), flush=True)
    for tree, results in found.items():
        medians = {name: round(statistics.median(each[name] for each in results), 2) for name in results[0]}
        print(f"{Path(tree).name}: {medians}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
