"""``make bench``: peak memory and time of the engine, beside a program that holds the whole model.

Each row is one fresh process. The engine quantizes in its own way, one decoder block in memory; the peer is the least
that a tool needs which loads the model whole: Transformers, loaded in bfloat16, one forward pass. The random models
have the layer shapes of a 1.1B Llama and differ only in depth, so the engine's column should stay flat.
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
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from bench.random_model import write_random_model

RESULTS = Path(__file__).parent / "results"
PEER = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
with torch.inference_mode():
    model(torch.ones(1, 256, dtype=torch.long))
"""


@dataclass(frozen=True)
class Row:
    """The numbers of one process: sizes in bytes, times in seconds; ``ratio`` is peak over the model's size."""

    program: str
    model: str
    model_bytes: int
    peak_bytes: int
    ratio: float
    wall_s: float
    cpu_s: float


def measure(program: str, model: str, model_bytes: int, command: list[str]) -> Row:
    """Run ``command`` and return its row. The peak is the resident size of the largest process: itself or a child."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(command[:4])} ended with status {os.waitstatus_to_exitcode(status)}")
    peak = usage.ru_maxrss * 1024
    cpu_s = usage.ru_utime + usage.ru_stime
    return Row(
        program,
        model,
        model_bytes,
        peak,
        round(peak / model_bytes, 3),
        round(time.monotonic() - started, 1),
        round(cpu_s, 1),
    )


def engine_task(folder: Path, model_dir: Path, preset: str) -> list[str]:
    from quantcore.config import presets
    from quantcore.config.quantization import CalibrationConfig
    from quantcore.config.task import EvaluationConfig, Task

    task = Task(
        model_dir=model_dir,
        output_dir=folder / f"{model_dir.name}-{preset}",
        config=presets.resolve(preset),
        calibration=CalibrationConfig(num_samples=4, seq_len=256),
        evaluation=EvaluationConfig(num_windows=2, seq_len=256),
    )
    file = folder / f"{model_dir.name}-{preset}.json"
    file.write_text(task.model_dump_json(), "utf-8")
    return [sys.executable, "-m", "quantcore", "run", str(file)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 16], help="decoder blocks of the random models")
    parser.add_argument("--presets", nargs="+", default=["fp8", "w4a16"])
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bf-bench-") as scratch:
        for depth in options.depths:
            folder = Path(scratch)
            model_dir = folder / f"random-{depth}-blocks"
            size = write_random_model(model_dir, num_blocks=depth)
            name = f"{depth} blocks"
            rows.append(measure("Transformers, whole model", name, size, [sys.executable, "-c", PEER, str(model_dir)]))
            for preset in options.presets:
                rows.append(measure(f"quantcore {preset}", name, size, engine_task(folder, model_dir, preset)))
                show(rows[-1:])
    show(rows, header=True)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{date.today().isoformat()}-memory.json"
    machine = {"cpu_count": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    file.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2) + "\n", "utf-8")
    print(f"kept in {file}")


def show(rows: list[Row], *, header: bool = False) -> None:
    if header:
        print(f"{'program':28} {'model':10} {'size MB':>9} {'peak MB':>9} {'peak/size':>9} {'wall s':>8} {'cpu s':>8}")
    for row in rows:
        sizes = f"{row.model_bytes / 1e6:9.0f} {row.peak_bytes / 1e6:9.0f} {row.ratio:9.2f}"
        print(f"{row.program:28} {row.model:10} {sizes} {row.wall_s:8.1f} {row.cpu_s:8.1f}", flush=True)


if __name__ == "__main__":
    main()
