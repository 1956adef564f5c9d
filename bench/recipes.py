"""``make bench-recipes``: what each chain of algorithms gains and costs for each preset, on several families of models.

The recipes of a preset (``quantcore.config.recipes``) are chosen from this table. Each cell is one job in a process of
its own, on one thread. Calibration text is the built-in one; the divergence from the original is measured on another
text, ``--text``. Rows are saved as they come, and a row that is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from bench.engines.results import FOLDER
from quantcore.config import presets

CHAINS: dict[str, tuple[str, ...]] = {
    "weights": ("", "gptq", "gptaq", "yaqa"),
    "static": ("", "gptq", "smoothquant", "smoothquant,gptq", "smoothquant,gptaq"),
    "dynamic": ("", "gptaq", "smoothquant,gptaq", "rotation,gptaq"),
}
"""Kind of scheme -> the chains to measure, as ``--quant_algo`` takes them."""

PRESETS = (
    "w4a16", "int8_static", "fp8", "int8_dynamic", "mxfp4", "gguf_q4_k", "nvfp4", "w4a16_sym", "mxfp4_weight_only",
    "fp8_dynamic", "int8_weight_only",
)  # fmt: skip
EXPORTS = {"nf4": "bitsandbytes", **{name: "gguf" for name in presets.PRESETS if name.startswith("gguf")}}


def kind_of(preset: str) -> str:
    """Return whether a preset quantizes weights alone, and if not, how it finds the ranges of activations."""
    inputs = presets.resolve(preset).global_quant_config.input_tensors
    return "weights" if inputs is None else "dynamic" if inputs.is_dynamic else "static"


def measure(model: Path, preset: str, chain: str, text: Path) -> dict[str, Any]:
    """Run one job, and return what it measured. Raises RuntimeError with its last lines if it fails."""
    algorithms = [{"name": name} for name in chain.split(",") if name]
    config = presets.resolve(preset).to_dict() | {"algo_config": algorithms}
    task = {
        "model_dir": str(model), "config": config, "gate": "off", "export": [EXPORTS.get(preset, "quark")],
        "calibration": {"num_samples": 32, "seq_len": 512},
        "evaluation": {"source": str(text), "num_windows": 16, "seq_len": 512, "num_prompts": 0},
    }  # fmt: skip
    report, cpu_s, wall_s = run_job(task)
    quality, summary = report["quality"], report["summary"]
    divergence = quality["divergence"]
    return {
        "kl": divergence["kl_mean"]["value"], "kl_stderr": divergence["kl_mean"]["stderr"],
        "top1": divergence["top1_agreement"]["value"], "ratio": quality["ratio"]["value"],
        "ratio_stderr": quality["ratio"]["stderr"], "bytes": summary["size_after_bytes"],
        "quantize_s": summary["quantize_s"], "cpu_s": cpu_s, "wall_s": wall_s,
    }  # fmt: skip


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


def cells(models: Sequence[Path], chosen: Sequence[str]) -> Iterator[tuple[Path, str, str]]:
    """Yield model, preset and chain: of each preset all models, so that a run that is cut short compares families."""
    for preset in chosen:
        for model in models:
            for chain in CHAINS[kind_of(preset)]:
                yield model, preset, chain


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown: the mean divergence in nats per token, and the CPU seconds, by model and chain."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = [f"| preset | algorithms | {' | '.join(models)} |", "|---|---|" + "---:|" * len(models)]
    by_cell = {(row["model"], row["preset"], row["chain"]): row for row in rows}
    order = list(dict.fromkeys(row["preset"] for row in rows))
    found_cells = dict.fromkeys((row["preset"], row["chain"]) for row in rows)
    for preset, chain in sorted(found_cells, key=lambda cell: order.index(cell[0])):
        found = [by_cell.get((model, preset, chain)) for model in models]
        lines.append(f"| `{preset}` | {chain or 'none'} | {' | '.join(map(_cell, found))} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or "failed" in row:
        return "" if row is None else "refused"
    return f"{row['kl']:.4f} ({100 * row['ratio'] - 100:+.1f} %), {row['cpu_s']:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="folders of float models, such as bench.trained_models")
    parser.add_argument("--text", type=Path, required=True, help="held-out text that no calibration has seen")
    parser.add_argument("--presets", nargs="+", choices=tuple(presets.PRESETS), default=PRESETS)
    parser.add_argument("--results", type=Path, default=FOLDER / f"{date.today()}-recipes.json")
    options = parser.parse_args()
    rows = json.loads(options.results.read_text())["rows"] if options.results.exists() else []
    done = {(row["model"], row["preset"], row["chain"]) for row in rows}
    for model, preset, chain in cells(options.models, options.presets):
        if (model.name, preset, chain) in done:
            continue
        row: dict[str, Any] = {"model": model.name, "preset": preset, "chain": chain}
        try:
            row |= measure(model, preset, chain, options.text)
        except RuntimeError as error:
            row["failed"] = str(error)
        rows.append(row)
        print(f"{model.name} {preset} {chain or 'none'}: {_cell(row)}", flush=True)
        settings = {"date": str(date.today()), "machine": platform.processor(), "text": options.text.name}
        options.results.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))
        options.results.with_suffix(".md").write_text(table(rows))


if __name__ == "__main__":
    main()
