"""``make bench-goals``: a goal's results beside the best of all presets and efforts, and the CPU time of both.

The exhaustive search quantizes a model in every preset that llama.cpp reads, with every effort. For each size that
comes of it, a goal asks for the best result of at most that size. Calibration text is the built-in one; all are
measured on its held-out part, or on ``--text``. Rows are saved as they come, and a row that is there is not measured
again. ``--jobs``: how many run at a time, for a machine of many cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from bench.engines.results import FOLDER, machine
from bench.recipes import run_job
from quantcore.config import presets
from quantcore.config.job_spec import NO_SCHEME
from quantcore.config.quantization import Config
from quantcore.config.recipes import EFFORTS, algorithms_text, recipe

PRESETS = tuple(name for name in presets.PRESETS if name.startswith("gguf"))


@dataclass(frozen=True)
class Row:
    """A result: what was asked, and what came of it. ``kl`` is the mean divergence in nats per token."""

    asked: str
    num_bytes: int
    kl: float
    kl_stderr: float
    cpu_s: float
    algorithms: str
    wall_s: float = 0.0


def row_of(asked: str, task: dict[str, Any], originals: str) -> Row:
    """Run a job that keeps what it learned of the float model in the folder ``originals``."""
    report, cpu_s, wall_s = run_job(task, BITFOUNDRY_ORIGINALS_DIR=originals)
    kl = report["quality"]["divergence"]["kl_mean"]
    return Row(
        asked, report["summary"]["size_after_bytes"], kl["value"], kl["stderr"], cpu_s,
        algorithms_text(report["config"]), wall_s,
    )  # fmt: skip


def searched() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a preset with an effort, and its config. Efforts that share a chain come once, as the smallest of them."""
    for preset in PRESETS:
        scheme = presets.resolve(preset)
        chains = {recipe([scheme], effort): effort for effort in reversed(EFFORTS)}
        for chain, effort in chains.items():
            algorithms = [algorithm.to_dict() for algorithm in chain]
            yield f"{preset}, {effort}", scheme.to_dict() | {"algo_config": algorithms}


def goal_row(max_size: int, task: dict[str, Any]) -> Row:
    """Search for the best result of at most ``max_size`` bytes, with nothing known of the model."""
    goal = {"runtime": "llama_cpp", "device": "cpu", "max_size": max_size, "min_recovery": "best"}
    config = Config(global_quant_config=NO_SCHEME).to_dict()
    with tempfile.TemporaryDirectory(prefix="bf-originals-") as fresh:
        return row_of(str(max_size), task | {"goal": goal, "config": config}, fresh)


def best_of_each_size(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    """Return each size in bytes, from the smallest on, with the best row of at most that size."""
    sizes = sorted({row.num_bytes for row in rows})
    return [(size, min((row for row in rows if row.num_bytes <= size), key=lambda row: row.kl)) for size in sizes]


def table(rows: Sequence[Row], goals: Sequence[Row]) -> str:
    """Return the best result of each size beside the goal's, as Markdown."""
    total_s = sum(row.cpu_s for row in rows)
    lines = [
        f"The exhaustive search took {total_s:.0f} s of CPU time for {len(rows)} results.",
        "",
        "| at most | exhaustive search | mean KL | goal: size | mean KL | difference | share of the CPU time |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    found = {row.asked: row for row in goals}
    for size, best in best_of_each_size(rows):
        goal = found.get(str(size))
        if goal is not None:
            lines.append(
                f"| {size / 1e6:.1f} MB | {best.asked} | {best.kl:.3g} | {goal.num_bytes / 1e6:.1f} MB "
                f"| {goal.kl:.3g} | {100 * goal.kl / best.kl - 100:+.0f} % | {100 * goal.cpu_s / total_s:.0f} % |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a float model")
    parser.add_argument("--text", help="held-out text (default: the held-out part of the built-in text)")
    parser.add_argument("--num_calib_data", type=int, default=32)
    parser.add_argument("--num_eval_data", type=int, default=12)
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--jobs", type=int, default=1, help="jobs at a time (default: 1)")
    parser.add_argument("--results", type=Path, default=FOLDER / f"{date.today()}-goals.json")
    options = parser.parse_args()
    before = json.loads(options.results.read_text()) if options.results.exists() else {"rows": [], "goals": []}
    rows, goals = ([Row(**row) for row in before[name]] for name in ("rows", "goals"))
    task = {
        "model_dir": str(options.model), "gate": "off",
        "calibration": {"num_samples": options.num_calib_data, "seq_len": options.seq_len},
        "evaluation": {"num_windows": options.num_eval_data, "seq_len": options.seq_len, "num_prompts": 0}
        | ({"source": options.text} if options.text else {}),
    }  # fmt: skip

    def keep(job: Future[Row], among: list[Row]) -> None:
        if error := job.exception():
            print(f"A job failed and is left out: {error}", flush=True)
            return
        among.append(row := job.result())
        print(row, flush=True)
        settings = {
            "model": options.model.name, "date": str(date.today()), "machine": machine(),
            "calibration": task["calibration"], "evaluation": task["evaluation"],
        }  # fmt: skip
        data = {"settings": settings, "rows": [asdict(r) for r in rows], "goals": [asdict(r) for r in goals]}
        options.results.write_text(json.dumps(data, indent=1))
        options.results.with_suffix(".md").write_text(table(rows, goals))

    with tempfile.TemporaryDirectory(prefix="bf-originals-") as originals, ThreadPoolExecutor(options.jobs) as pool:
        known = {row.asked for row in rows}
        exhaustive = [(asked, task | {"config": config, "export": ["gguf"]}) for asked, config in searched()]
        left = [(asked, job) for asked, job in exhaustive if asked not in known]
        for done in as_completed([pool.submit(row_of, *cell, originals) for cell in left]):
            keep(done, rows)
    with ThreadPoolExecutor(options.jobs) as pool:
        known = {row.asked for row in goals}
        sizes = [size for size, _ in best_of_each_size(rows) if str(size) not in known]
        for done in as_completed([pool.submit(goal_row, max_size, task) for max_size in sizes]):
            keep(done, goals)


if __name__ == "__main__":
    main()
