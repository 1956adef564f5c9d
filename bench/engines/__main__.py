"""``make bench-engines``: perplexity, divergence, time and memory of our engine and four others, on the same tokens.

Each cell is one fresh process in the engine's own environment, one thread. Rows are saved as they come and are not
measured again, so that a run can be stopped at any time and continued.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import psutil

from bench.engines.cells import ENGINES, FLOAT, USUAL, Cell, chosen
from bench.engines.inputs import cut_model, cut_windows
from bench.engines.results import FOLDER, Results
from bench.engines.runner import Job
from quantcore.config.algorithms import DistillConfig
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig
from quantcore.importing.grid_search import with_grids
from quantcore.importing.model import read_model
from quantcore.plan.distillation import NUM_HELD_BACK

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {"quark": "peers", "llmcompressor": "llmc", "gptqmodel": "gptqmodel", "autoround": "autoround"}
START_S = 120  # CPU seconds that any process may take, whatever its cell costs
STARVED = 20  # times as many wall seconds: a process that waits forever is ended, too
NUM_MORE = DistillConfig().num_windows + NUM_HELD_BACK
"""Number of calibration windows that distillation gets beside those of the algorithm."""
LOG_LINES = 25  # of a process that failed, kept in its row
SMALL = {"num_samples": 4, "num_windows": 2, "seq_len": 128, "num_blocks": 2}


def main() -> None:
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the process of a cell is ended on the way out
    try:
        cells = chosen(options.cells, options.only)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if options.list:
        _list(cells)
        return
    if options.text != "builtin":
        options.text = str(Path(options.text).resolve())
    with tempfile.TemporaryDirectory(prefix="bf-engines-") as scratch:
        num_more = NUM_MORE if any(cell.algorithm.endswith("distill") for cell in cells) else 0
        inputs = Inputs(options, Path(scratch), num_more)
        if options.smoke:
            for cell in cells:
                show(cell, measure(cell, inputs.small, Path(scratch), options.patience))
            return
        try:
            results = Results(options.results, inputs.settings)
        except ValueError as error:
            raise SystemExit(str(error)) from None
        todo = results.todo(cells)
        warm_up({cell.engine for cell in todo}, inputs.small, Path(scratch), options.patience)
        for cell in todo:
            row = measure(cell, inputs.full, Path(scratch), options.patience)
            results.add(cell, row)
            show(cell, row)
    print(f"kept in {options.results} and, as a table, in {options.results.with_suffix('.md')}")


class Inputs:
    """The model and the windows that every engine gets; ``small`` is a cut of both for a trial of an environment."""

    def __init__(self, options: argparse.Namespace, scratch: Path, num_more: int) -> None:
        self._num_more = num_more
        model_dir = options.model_dir or _demo_model()
        sizes = {"num_samples": options.num_samples, "num_windows": options.num_windows, "seq_len": options.seq_len}
        self.full, tokens = self._cut(model_dir, scratch / "windows.safetensors", options.text, **sizes)
        cut_model(model_dir, scratch / "small", SMALL["num_blocks"])
        small = {key: SMALL[key] for key in sizes}
        self.small, _ = self._cut(scratch / "small", scratch / "small.safetensors", options.text, **small)
        self.settings = {
            "model": model_dir.name,
            "grids": [str(share) for share in with_grids(read_model(model_dir)).headers.grids],
            "model_sha256": _sha256(model_dir.glob("*.safetensors")),
            "text": "the built-in text" if options.text == "builtin" else Path(options.text).name,
            "tokens_sha256": tokens,
            **sizes,
        }

    def _cut(
        self, model_dir: Path, file: Path, text: str, num_samples: int, num_windows: int, seq_len: int
    ) -> tuple[dict[str, Path], str]:
        calibration = CalibrationConfig(source=text, num_samples=num_samples, seq_len=seq_len)
        evaluation = EvaluationConfig(num_windows=num_windows, seq_len=seq_len)
        tokens = cut_windows(model_dir, file, calibration, evaluation, self._num_more)
        return {"model_dir": model_dir, "windows": file, "float_logits": file.with_suffix(".logits")}, tokens


def warm_up(engines: set[str], inputs: dict[str, Path], scratch: Path, patience: float) -> None:
    """Let each peer compile what it compiles on first use, so that no row pays for it."""
    for engine in ENVIRONMENTS:
        if engine in engines:
            row = measure(Cell(engine, "uint4", "rtn"), inputs, scratch, patience)
            if row["status"] != "ok":
                raise SystemExit(f"{ENGINES[engine]} does not run here:\n{row['error']}")


def measure(cell: Cell, inputs: dict[str, Path], scratch: Path, patience: float) -> dict[str, Any]:
    """Measure a cell and return its row: the result of its process, or its error. ``status``: ok, failed or timeout."""
    began = {"began": datetime.now(UTC).isoformat(timespec="seconds"), "load_average": round(os.getloadavg()[0], 2)}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        home = Path(folder)
        (home / "files").mkdir()
        job = Job(
            scheme=cell.scheme, algorithm=cell.algorithm, scratch=home / "files", result=home / "row.json", **inputs
        )
        job.write(home / "job.json")
        limit_s = START_S + patience * cell.estimate_s
        status = _run(cell.engine, home, limit_s)
        if status is None:
            return {"status": "timeout", **began, "error": f"{_tail(home / 'log')}\nended after {limit_s:.0f} CPU s"}
        if status != 0 or not job.result.exists():
            return {"status": "failed", **began, "error": f"{_tail(home / 'log')}\nstatus {status}"}
        return {"status": "ok", **began, **json.loads(job.result.read_text("utf-8"))}


def _run(engine: str, home: Path, limit_s: float) -> int | None:
    """Run the engine's process and return its exit status, or None if it still ran after ``limit_s`` CPU seconds."""
    module = "float_model" if engine == FLOAT else engine
    python = sys.executable
    if engine in ENVIRONMENTS:
        python = str(ROOT / ".venv-consumers" / ENVIRONMENTS[engine] / "bin" / "python")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [python, "-m", f"bench.engines.{module}", str(home / "job.json")],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        give_up = time.monotonic() + STARVED * limit_s
        try:
            while process.poll() is None:
                if _cpu_s(process.pid) > limit_s or time.monotonic() > give_up:
                    return None
                time.sleep(0.5)
            return process.returncode
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process and its live descendants have used."""
    total = 0.0
    try:
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            times = member.cpu_times()
            total += times.user + times.system
    except psutil.Error:
        pass  # it has just ended
    return total


def show(cell: Cell, row: dict[str, Any]) -> None:
    """Print a row as a line."""
    name = f"{ENGINES[cell.engine]:24}{cell.name:30}"
    if row["status"] != "ok":
        print(f"{name}{row['status']}\n{row['error']}", flush=True)
        return
    step = row["quantize"]
    print(
        f"{name}perplexity {row['perplexity']:10.4f}  kl {row['kl']:8.5f}  cpu {step['cpu_s']:8.1f} s  "
        f"wall {step['wall_s']:8.1f} s  peak {step['peak_bytes'] / 1e6:6.0f} MB",
        flush=True,
    )


def _list(cells: list[Cell]) -> None:
    for cell in cells:
        print(f"{ENGINES[cell.engine]:24}{cell.name:30}about {cell.estimate_s / 60:5.1f} CPU min")
    print(f"{len(cells)} cells, about {sum(cell.estimate_s for cell in cells) / 60:.0f} CPU minutes")


def _demo_model() -> Path:
    from bitfoundry.local.demo_model import prepare

    return prepare(print)


def _sha256(files: Iterator[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-LOG_LINES:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench-engines", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--text", default="builtin", help="a text file; its first three quarters calibrate, the rest is held out")
    add("--model_dir", type=Path, help="a Llama in one safetensors file (default: the demo's SmolLM2-135M-Instruct)")
    add("--cells", nargs="+", default=USUAL, metavar="GLOB", help="like 'uint4:gptq' '*:awq'; '*' is all there are")
    add("--only", nargs="+", default=list(ENGINES), choices=list(ENGINES), metavar="ENGINE", help=", ".join(ENGINES))
    add("--results", type=Path, default=FOLDER / f"{date.today().isoformat()}-engines.json", help="to go on with")
    add("--num_samples", type=int, default=32)
    add("--num_windows", type=int, default=40)
    add("--seq_len", type=int, default=512)
    add("--patience", type=float, default=4, help="a cell may take this many times its estimated CPU seconds")
    add("--list", action="store_true", help="show the cells and what they would cost")
    add(
        "--smoke",
        action="store_true",
        help="try the cells on two blocks and a few tokens; nothing is kept",
    )
    return parser


if __name__ == "__main__":
    main()
