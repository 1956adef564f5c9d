"""``make bench-gpu``: seconds of a decoder block of Llama 3 8B on this machine's GPU, and of the phases around it.

A random model has a few such blocks: all take the same time, so the median of all but the first, in which kernels are
compiled, says how long a whole model takes. The text is this project's documentation and source.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import torch

from bench.random_model import write_random_model
from quantcore.config import presets
from quantcore.config.algorithms import config_of
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig, Task
from quantcore.events import Event, PhaseStarted, Progress
from quantcore.pipeline.job import run
from quantcore.runtime.devices import about, default_device

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
LLAMA_8B = (4096, 14336)
"""The hidden and the inner size."""
NUM_BLOCKS = 32
"""Number of blocks of the whole model, whose time is estimated."""


@dataclass(frozen=True)
class Row:
    """The times of one job in seconds. ``model_s``: of a whole model, from the blocks that were measured."""

    device: str
    torch: str
    scheme: str
    algorithms: str
    num_tokens: int
    first_block_s: float
    block_s: float
    proof_of_block_s: float
    model_s: float
    peak_device_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=["w4a16:gptq", "w4a16:", "fp8:gptq"], help="SCHEME:ALGORITHM")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--widths", type=int, nargs=2, default=LLAMA_8B, help="the hidden and the inner size")
    options = parser.parse_args()
    rows: list[Row] = []
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
    file = RESULTS / f"{date.today().isoformat()}-gpu.json"
    file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", "utf-8")
    print(table(rows), f"kept in {file.relative_to(ROOT)}", sep="\n\n")


def measured(job: str, folder: Path, num_blocks: int, calibration: CalibrationConfig) -> Row:
    """Run a job and return its times."""
    scheme, _, algorithm = job.partition(":")
    algorithms = (config_of(algorithm),) if algorithm else ()
    task = Task(
        model_dir=folder / "model", output_dir=folder / job.replace(":", "-"), calibration=calibration,
        config=replace(presets.resolve(scheme), algo_config=algorithms),
        evaluation=EvaluationConfig(num_windows=1, seq_len=512, num_prompts=0), export=("quark",),
    )  # fmt: skip
    device, times = default_device(), Times()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run(task, times.note)
    blocks = [later - before for before, later in zip(times.blocks, times.blocks[1:], strict=False)]
    first_s, block_s, proof_s = blocks[0], statistics.median(blocks[1:]), times.proof_s() / num_blocks
    return Row(
        str(about(device).get("name", device.type)), torch.__version__, scheme, algorithm,
        calibration.num_samples * calibration.seq_len, round(first_s, 2), round(block_s, 2), round(proof_s, 2),
        round(first_s + (NUM_BLOCKS - 1) * block_s + NUM_BLOCKS * proof_s, 1),
        torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
    )  # fmt: skip


class Times:
    """When a job's phases began and its blocks ended."""

    def __init__(self) -> None:
        self.blocks: list[float] = []
        self._phases: dict[str, float] = {}
        self._verified = 0.0

    def note(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, PhaseStarted):
            self._phases[event.phase] = now
            if event.phase == "quantize":
                self.blocks = [now]
        elif isinstance(event, Progress) and event.phase == "quantize":
            self.blocks.append(now)
        elif isinstance(event, Progress) and event.phase == "verify":
            self._verified = now

    def proof_s(self) -> float:
        """The time from the first file that was read to the last block that ran."""
        return self._verified - self._phases["verify"]


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    head = "| scheme | algorithm | first block | block | its proof | 32 blocks | peak on the device |"
    lines = [
        f"| `{row.scheme}` | {row.algorithms or 'none'} | {row.first_block_s:.1f} s | {row.block_s:.1f} s |"
        f" {row.proof_of_block_s:.1f} s | {row.model_s:.0f} s | {row.peak_device_bytes / 1e9:.1f} GB |"
        for row in rows
    ]
    title = f"{rows[0].device}, torch {rows[0].torch}, {rows[0].num_tokens:,} tokens"
    return "\n".join([title, "", head, "|---|---|---:|---:|---:|---:|---:|", *lines])


if __name__ == "__main__":
    main()
