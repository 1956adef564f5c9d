"""``make bench-gpu``: seconds of a decoder block of Llama 3 8B on this machine's GPU, and of the phases around it.

A random model has a few such blocks: all take the same time, so the median of all but the first says how long a whole
model takes. The text is this project's documentation and source.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path

import torch

from bench.random_model import write_random_model
from quantcore.config import presets
from quantcore.config.algorithms import config_of
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.runtime.devices import about, default_device
from quantcore.events import PhaseStarted, Progress, parse
from quantcore.report.values import Report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
LLAMA_8B = (4096, 14336)
"""The hidden and the inner size."""
NUM_BLOCKS = 32
"""Number of blocks of the whole model, whose time is estimated."""


@dataclass(frozen=True)
class Row:
    """The times of one job in seconds, and its peak memory on host and device.

    ``first_block_s`` includes reading the texts and compiling kernels, ``proof_start_s`` the first tensor that the
    proof compares. ``model_s``: of a whole model, from the blocks that were measured.
    """

    device: str
    torch: str
    scheme: str
    algorithms: str
    num_tokens: int
    first_block_s: float
    block_s: float
    proof_start_s: float
    proof_of_block_s: float
    model_s: float
    peak_memory_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=["w4a16:gptq", "w4a16:", "fp8:gptq"], help="SCHEME:ALGORITHM")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--widths", type=int, nargs=2, default=LLAMA_8B, help="the hidden and the inner size")
    options = parser.parse_args()
    rows: list[Row] = []
    file = RESULTS / f"{date.today().isoformat()}-gpu.json"
    with tempfile.TemporaryDirectory(prefix="bf-gpu-") as scratch:
        folder = Path(scratch)
        write_random_model(folder / "model", num_blocks=options.blocks, widths=tuple(options.widths))
        files = sorted(ROOT.glob("docs/**/*.md")) + sorted(ROOT.glob("quantcore/**/*.py"))
        (folder / "text.txt").write_text("\n".join(file.read_text("utf-8") for file in files), "utf-8")
        calibration = CalibrationConfig(
            num_samples=options.samples, seq_len=options.seq_len, source=str(folder / "text.txt")
        )
        for job in options.jobs:
            rows.append(measured(job, folder, options.blocks, calibration))
            print(json.dumps(asdict(rows[-1])), flush=True)
            file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", "utf-8")
    print(table(rows), f"kept in {file.relative_to(ROOT)}", sep="\n\n")


def measured(job: str, folder: Path, num_blocks: int, calibration: CalibrationConfig) -> Row:
    """Run a job as a process of its own, as the service does, and return its times."""
    scheme, _, algorithm = job.partition(":")
    algorithms = (config_of(algorithm),) if algorithm else ()
    output = folder / job.replace(":", "-")
    task = Task(
        model_dir=folder / "model", output_dir=output, calibration=calibration,
        config=replace(presets.resolve(scheme), algo_config=algorithms),
        evaluation=EvaluationConfig(num_windows=1, seq_len=512, num_prompts=0), export=("quark",),
    )  # fmt: skip
    (folder / "task.json").write_text(task.model_dump_json(), "utf-8")
    times: dict[str, list[float]] = {"quantize": [], "verify": []}
    command = [sys.executable, "-m", "quantcore", "run", str(folder / "task.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            event = parse(json.loads(line))
            if isinstance(event, PhaseStarted | Progress) and event.phase in times:
                times[event.phase].append(time.monotonic())
    if process.returncode:
        raise SystemExit(f"The job {job} failed: see above.")
    blocks = [later - before for before, later in pairwise(times["quantize"])]
    verified = times["verify"]
    first_s, block_s = blocks[0], statistics.median(blocks[1:])
    start_s, proof_s = verified[1] - verified[0], (verified[-1] - verified[1]) / num_blocks
    memory = Report.model_validate_json((output / "report.json").read_text("utf-8")).summary.memory_by_phase
    return Row(
        str(about(default_device()).get("name", default_device().type)), torch.__version__, scheme, algorithm,
        calibration.num_samples * calibration.seq_len, round(first_s, 2), round(block_s, 2), round(start_s, 2),
        round(proof_s, 2), round(first_s + (NUM_BLOCKS - 1) * block_s + start_s + NUM_BLOCKS * proof_s, 1),
        memory.quantize.peak_memory_bytes if memory else 0,
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    head = (
        "| scheme | algorithm | first block | block | start of the proof | its part of a block | 32 blocks | memory |"
    )
    lines = [
        f"| `{row.scheme}` | {row.algorithms or 'none'} | {row.first_block_s:.1f} s | {row.block_s:.2f} s |"
        f" {row.proof_start_s:.1f} s | {row.proof_of_block_s:.2f} s | {row.model_s:.0f} s |"
        f" {row.peak_memory_bytes / 1e9:.1f} GB |"
        for row in rows
    ]
    title = f"{rows[0].device}, torch {rows[0].torch}, {rows[0].num_tokens:,} tokens"
    return "\n".join([title, "", head, "|---|---|---:|---:|---:|---:|---:|---:|", *lines])


if __name__ == "__main__":
    main()
