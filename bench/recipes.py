"""``make bench-recipes``: what each effort, or each chain of algorithms, gains and costs for presets on some models.

The recipes of a preset (``quantcore.config.recipes``) are chosen from such tables, on several families of models. Each
cell is one job in a process of its own, on one thread. Calibration text is the built-in one; the divergence from the
original is measured on another text, ``--text``. Rows are saved as they come, and a row that is there is not measured
again. ``--jobs``: how many cells run at a time, for a machine of many cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

from bench.engines.results import FOLDER, machine
from quantcore.config import presets
from quantcore.config.recipes import EFFORTS, recipe

PRESETS = (
    "w4a16", "w4a16_sym", "uint4_wo_32", "uint4_wo_128", "gguf_q4_k", "gguf_q4_0", "gguf_q5_k", "gguf_q6_k",
    "gguf_q8_0", "nf4", "mxfp4", "mxfp4_weight_only", "nvfp4", "nvfp4_weight_only", "mxfp8", "int4_fp8", "fp8",
    "fp8_dynamic", "fp8_block", "int8_static", "int8_dynamic", "int8_weight_only",
)  # fmt: skip
"""Presets of 4 bits or more. Variants of these, such as other group sizes, are left out."""


def recipes_of(preset: str) -> dict[str, str]:
    """Return the recipes of a preset, as ``--quant_algo`` takes them -> the efforts that have it."""
    efforts: dict[str, list[str]] = {}
    for effort in EFFORTS:
        names = (algorithm.name for algorithm in recipe([presets.resolve(preset)], effort))
        efforts.setdefault(",".join(names), []).append(effort)
    return {chain: ", ".join(same) for chain, same in efforts.items()}


def measure(model: Path, preset: str, chain: str, text: Path) -> dict[str, Any]:
    """Run one job, and return what it measured. Raises RuntimeError with its last lines if it fails."""
    algorithms = [{"name": name} for name in chain.split(",") if name]
    config = presets.resolve(preset).to_dict() | {"algo_config": algorithms}
    task = {
        "model_dir": str(model), "config": config, "gate": "off",
        "calibration": {"num_samples": 32, "seq_len": 512},
        "evaluation": {"source": str(text), "num_windows": 16, "seq_len": 512, "num_prompts": 0, "num_answers": 0},
    }  # fmt: skip
    report, cpu_s, wall_s = run_job(task)
    quality, summary = report["quality"], report["summary"]
    divergence = quality["divergence"]
    return {
        "kl": divergence["kl_mean"]["value"], "kl_stderr": divergence["kl_mean"]["stderr"],
        "top1": divergence["top1_agreement"]["value"], "ratio": quality["ratio"]["value"],
        "ratio_stderr": quality["ratio"]["stderr"], "verdict": summary["verdict"]["level"],
        "bytes": summary["size_after_bytes"],
        "quantize_s": summary["quantize_s"], "cpu_s": cpu_s, "wall_s": wall_s,
    }  # fmt: skip


def row_of(model: Path, preset: str, chain: str, text: Path) -> dict[str, Any]:
    """Return what one job measured, or why it ``failed``."""
    row: dict[str, Any] = {"model": model.name, "preset": preset, "chain": chain, "machine": machine()}
    try:
        return row | measure(model, preset, chain, text)
    except RuntimeError as error:
        return row | {"failed": str(error)}


def run_job(task: dict[str, Any], **environment: str) -> tuple[dict[str, Any], float, float]:
    """Run a job in a process of its own, on one thread: its report, its CPU seconds and its wall seconds.

    Raises RuntimeError with its last lines if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="bf-bench-") as scratch:
        file, log = Path(scratch, "task.json"), Path(scratch, "log")
        file.write_text(json.dumps({**task, "output_dir": f"{scratch}/out"}))
        started = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "quantcore", "run", str(file)], stdout=output, stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
            )  # fmt: skip
            _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            raise RuntimeError(log.read_text()[-1500:])
        report = json.loads(Path(scratch, "out/report.json").read_text())
    return report, usage.ru_utime + usage.ru_stime, time.monotonic() - started


def cells(
    models: Sequence[Path], chosen: Sequence[str], chains: Sequence[str] | None, efforts: Sequence[str]
) -> Iterator[tuple[Path, str, str]]:
    """Yield model, preset and chain: of each preset all models, so that a run that is cut short compares families."""
    for preset in chosen:
        recipes = [chain for chain, same in recipes_of(preset).items() if {*same.split(", ")} & {*efforts}]
        for model in models:
            for chain in recipes if chains is None else chains:
                yield model, preset, chain


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown: by model the mean divergence in nats per token, the verdict, and the CPU seconds."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = [f"| preset | effort | algorithms | {' | '.join(models)} |", "|---|---|---|" + "---:|" * len(models)]
    by_cell = {(row["model"], row["preset"], row["chain"]): row for row in rows}
    order = list(presets.PRESETS)
    found_cells = dict.fromkeys((row["preset"], row["chain"]) for row in rows)
    for preset, chain in sorted(found_cells, key=lambda cell: order.index(cell[0])):
        found = [by_cell.get((model, preset, chain)) for model in models]
        effort = recipes_of(preset).get(chain, "")
        lines.append(f"| `{preset}` | {effort} | {chain or 'none'} | {' | '.join(map(_cell, found))} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or "failed" in row:
        return "" if row is None else "refused"
    return f"{row['kl']:.2g} ({100 * row['ratio'] - 100:+.1f} %), {row.get('verdict', '')}, {row['cpu_s']:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="folders of float models, such as bench.trained_models")
    parser.add_argument("--text", type=Path, required=True, help="held-out text that no calibration has seen")
    parser.add_argument("--presets", nargs="+", choices=tuple(presets.PRESETS), default=PRESETS)
    parser.add_argument("--efforts", nargs="+", choices=EFFORTS, default=EFFORTS, help="recipes (default: all three)")
    parser.add_argument("--chains", nargs="+", help="algorithms in place of the recipes: gptq smoothquant,gptq")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time (default: 1)")
    parser.add_argument("--results", type=Path, default=FOLDER / f"{date.today()}-recipes.json")
    options = parser.parse_args()
    rows = json.loads(options.results.read_text())["rows"] if options.results.exists() else []
    known = {(row["model"], row["preset"], row["chain"]) for row in rows}
    left = [
        (model, preset, chain)
        for model, preset, chain in cells(options.models, options.presets, options.chains, options.efforts)
        if (model.name, preset, chain) not in known
    ]
    settings = {"date": str(date.today()), "text": options.text.name, "jobs": options.jobs}
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(row_of, *cell, options.text) for cell in left]):
            rows.append(row := done.result())
            print(f"{row['model']} {row['preset']} {row['chain'] or 'none'}: {_cell(row)}", flush=True)
            options.results.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))
            options.results.with_suffix(".md").write_text(table(rows))


if __name__ == "__main__":
    main()
