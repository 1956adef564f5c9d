"""``python -m bench.memory_plan MODEL...``: planned against measured peak memory of jobs, phase by phase.

Each model folder is quantized in several ways. Random models with a small head and with a large one are added. The
measured peaks are the kernel's own counts (``VmHWM``) that a report has: of the process that quantizes, and of the one
that verifies together with what the waiting one holds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.random_model import write_random_model

JOBS: dict[str, tuple[str, ...]] = {
    "w4a16, fast, awq": ("--quant_scheme", "w4a16", "--effort", "fast"),
    "w4a16, balanced, compressed_tensors": ("--quant_scheme", "w4a16", "--model_export", "compressed_tensors"),
    "fp8, fake_quantized": ("--quant_scheme", "fp8", "--model_export", "fake_quantized"),
    "gguf_q4_k, best, gguf": ("--quant_scheme", "gguf_q4_k", "--effort", "best", "--model_export", "gguf"),
    "w4a16, windows of 2048": (
        "--quant_scheme", "w4a16", "--seq_len", "2048", "--num_calib_data", "8", "--eval_seq_len", "2048",
    ),
}  # fmt: skip
RANDOM_MODELS = ("random, small head", "random, large head", "random, mixture")
RANDOM_JOBS = ("w4a16, fast, awq", "w4a16, balanced, compressed_tensors")
MOST_BELOW = 0.05
"""By how much a plan may be below what is measured: workers admit jobs by it."""


@dataclass(frozen=True)
class Use:
    """The memory of one phase of one job, in bytes."""

    model: str
    job: str
    phase: str
    planned: int
    measured: int

    @property
    def ratio(self) -> float:
        return self.planned / self.measured

    @property
    def line(self) -> str:
        planned, measured = self.planned / 1e6, self.measured / 1e6
        return f"| {self.model} | {self.job} | {self.phase} | {planned:.0f} | {measured:.0f} | {self.ratio:.2f} |"


HEAD = "| model | job | phase | planned MB | measured MB | ratio |\n|---|---|---|---:|---:|---:|"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.memory_plan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path, help="model folders")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--no_random", action="store_true", help="measure only the given models")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of quantize, at the end")
    options = parser.parse_args()
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="bf-memory-") as scratch:
        for model in options.models:
            for job in options.jobs:
                print_lines(measured(model, model.name, job, Path(scratch), options.flags))
        for name in () if options.no_random else RANDOM_MODELS:
            folder = Path(scratch) / name
            write_model(folder, name)
            for job in RANDOM_JOBS:
                print_lines(measured(folder, name, job, Path(scratch), options.flags))


def write_model(folder: Path, name: str) -> None:
    """Write one of the ``RANDOM_MODELS``."""
    from tests.support.models import tiny_model

    if name == "random, mixture":
        experts = {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
        tiny_model(folder, model_type="qwen3_moe", hidden_size=1024, num_hidden_layers=2, **experts)
    else:
        is_large = name == "random, large head"
        widths, vocab_size = ((512, 1024), 131072) if is_large else ((1024, 2816), 512)
        write_random_model(folder, num_blocks=2, widths=widths, vocab_size=vocab_size)


def print_lines(uses: Sequence[Use]) -> None:
    for use in uses:
        print(use.line, flush=True)


def measured(model: Path, name: str, job: str, scratch: Path, flags: Sequence[str] = ()) -> list[Use]:
    """Run a job of ``JOBS`` on ``model``, and return its phases. Raises SystemExit with the log of one that fails."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        output = Path(folder) / "out"
        command = [sys.executable, "-m", "quantcore", "--model_dir", str(model), "--output_dir", str(output)]
        environment = {**os.environ, "BITFOUNDRY_ORIGINALS_DIR": "", "HF_HUB_OFFLINE": "1"}  # nothing from a cache
        ran = subprocess.run(
            [*command, *JOBS[job], *flags], env=environment, capture_output=True, text=True, check=False
        )
        if ran.returncode != 0:
            raise SystemExit(f"{name}, {job}: status {ran.returncode}\n{ran.stderr}")
        return list(_uses(name, job, json.loads((output / "report.json").read_text("utf-8"))))


def _uses(name: str, job: str, report: dict[str, dict[str, dict[str, dict[str, int]]]]) -> Iterator[Use]:
    for phase, one in report["summary"]["memory_by_phase"].items():
        yield Use(name, job, phase, one["planned_peak_memory_bytes"], one["peak_memory_bytes"])


if __name__ == "__main__":
    main()
