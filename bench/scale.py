"""``make bench-scale``: peak memory of the engine against the size of the model, and how long a plan for 405B takes.

Rows are saved as they come, and those of the same day are not measured again: a run can be stopped and continued.

Each row is one job, with all of its processes, on a random Llama whose blocks are all of one size: the number of
blocks grows, and the peak should not. llm-compressor is measured, too, if it is installed (by ``make bench-engines``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.process_tree import watch
from bench.random_model import VOCAB, block_bytes, write_random_model
from quantcore.config import presets
from quantcore.config.algorithms import config_of
from quantcore.config.quantization import CalibrationConfig, parse_config
from quantcore.config.task import EvaluationConfig, Task

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
LLAMA_405B = ROOT / "tests" / "unit" / "quantcore" / "configs" / "llama-3.1-405b.json"
LLMC = ROOT / ".venv-consumers" / "llmc" / "bin" / "python"
PROGRAMS = {"rtn": (), "gptq": ("gptq",), "file_to_file": ()}
PEERS = {"llm-compressor rtn": "rtn", "llm-compressor gptq": "gptq"}
WIDTHS = (1024, 2816)
"""The hidden and the inner size of all models: blocks of 23 MB."""
TOKENS = {"num_samples": 4, "seq_len": 128}


@dataclass(frozen=True)
class Row:
    """The numbers of one job.

    ``peak_bytes``: the largest sum over its processes at one moment; ``processes_bytes``: the peak of each process;
    ``planned_bytes``: the peak that was planned.
    """

    program: str
    model_bytes: int
    num_blocks: int
    peak_bytes: int
    planned_bytes: int | None
    wall_s: float
    cpu_s: float
    processes_bytes: tuple[int, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 1, 2, 4], help="of the models, in GB")
    parser.add_argument("--programs", nargs="+", default=[*PROGRAMS, *PEERS], choices=[*PROGRAMS, *PEERS])
    parser.add_argument("--scratch", type=Path, help="folder for the models (default: that for temporary files)")
    options = parser.parse_args()
    rows = kept_rows()
    plan = plan_times()
    for size in options.sizes:
        with tempfile.TemporaryDirectory(prefix="bf-scale-", dir=options.scratch) as scratch:
            folder = Path(scratch)
            num_blocks = max(1, round(size * 1e9 / block_bytes(WIDTHS)))
            missing = set(options.programs) - {row.program for row in rows if row.num_blocks == num_blocks}
            if not missing:
                continue
            model_bytes = write_random_model(folder / "model", num_blocks=num_blocks, widths=WIDTHS)
            for program in sorted(missing, key=[*PROGRAMS, *PEERS].index):
                command, report = (our_command if program in PROGRAMS else peer_command)(program, folder)
                if command:
                    rows.append(measured(program, model_bytes, num_blocks, command, report))
                    print(line(rows[-1]), flush=True)
                    keep(rows, plan)
    print(file_of("md").read_text("utf-8"))


def file_of(kind: str) -> Path:
    """Return the path of today's results."""
    return RESULTS / f"{date.today().isoformat()}-scale.{kind}"


def kept_rows() -> list[Row]:
    """Return the rows that were measured today."""
    file = file_of("json")
    return [Row(**row) for row in json.loads(file.read_text("utf-8"))["rows"]] if file.exists() else []


def our_command(program: str, folder: Path) -> tuple[list[str], Path]:
    """Return the command, and the report with the planned peak."""
    chosen = parse_config(
        {**presets.resolve("w4a16").to_dict(), "algo_config": list(map(config_of, PROGRAMS[program]))}
    )
    task = Task(
        model_dir=folder / "model",
        output_dir=folder / program,
        config=chosen,
        calibration=CalibrationConfig.model_validate(TOKENS),
        evaluation=EvaluationConfig(num_windows=0, seq_len=128),
        file2file=program == "file_to_file",
    )
    file = folder / f"{program}.json"
    file.write_text(task.model_dump_json(), "utf-8")
    return [sys.executable, "-m", "quantcore", "run", str(file)], folder / program / "report.json"


def peer_command(program: str, folder: Path) -> tuple[list[str], Path]:
    """Return the command, empty if the peer is not installed, and a folder in place of a report."""
    from bench.engines.runner import Job

    if not LLMC.exists():
        return [], folder
    generator = torch.Generator().manual_seed(0)
    windows = {
        name: torch.randint(VOCAB, (count, TOKENS["seq_len"]), generator=generator)
        for name, count in (("calibration", TOKENS["num_samples"]), ("held_out", 1))
    }
    save_file(windows, folder / "windows.safetensors")
    scratch = folder / program.replace(" ", "_")
    scratch.mkdir()
    job = Job(folder / "model", folder / "windows.safetensors", "uint4", PEERS[program], scratch, scratch / "row.json")
    file = scratch.with_suffix(".json")
    job.write(file)
    return [str(LLMC), "-m", "bench.engines.llmcompressor", str(file)], scratch


def measured(program: str, model_bytes: int, num_blocks: int, command: list[str], report: Path) -> Row:
    """Run the command, and return the row of it and all its descendants."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stderr=log
        )
        peak = watch(process)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        if process.returncode != 0:
            raise SystemExit(f"{program} ended with status {process.returncode}\n{log.read().decode()}")
    planned = json.loads(report.read_text())["summary"]["planned_peak_memory_bytes"] if report.is_file() else None
    return Row(
        program, model_bytes, num_blocks, peak.total_bytes, planned, round(time.monotonic() - started, 1),
        round(usage.ru_utime + usage.ru_stime, 1), tuple(peak.by_pid.values()),
    )  # fmt: skip


def plan_times() -> dict[str, float]:
    """Return wall and CPU seconds of the command `plan` for 405B, including Python's start."""
    flags = ["--quant_scheme", "w4a16", "--quant_algo", "gptq", "--devices", "8x192GB", "--json"]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-m", "quantcore", "plan", str(LLAMA_405B), *flags], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(time.monotonic() - started, 2), "cpu_s": round(cpu_s, 2)}


HEAD = "| program | model GB | blocks | peak MB | planned MB | wall s | CPU s |\n|---|---:|---:|---:|---:|---:|---:|"


def line(row: Row) -> str:
    planned = "" if row.planned_bytes is None else f"{row.planned_bytes / 1e6:.0f}"
    return (
        f"| {row.program} | {row.model_bytes / 1e9:.2f} | {row.num_blocks} | {row.peak_bytes / 1e6:.0f} | {planned} |"
        f" {row.wall_s:.0f} | {row.cpu_s:.0f} |"
    )


def growth(rows: list[Row]) -> list[str]:
    """Return lines on the growth of each program's peak from the smallest model to the largest."""
    lines = []
    for program in dict.fromkeys(row.program for row in rows):
        own = sorted((row for row in rows if row.program == program), key=lambda row: row.model_bytes)
        first, last = own[0], own[-1]
        lines.append(
            f"- {program}: a model {last.model_bytes / first.model_bytes:.1f} times as large takes"
            f" {last.peak_bytes / first.peak_bytes:.2f} times the memory"
        )
    return lines


def keep(rows: list[Row], plan: dict[str, float]) -> None:
    """Write the table, and the rows as JSON beside it."""
    rows = sorted(rows, key=lambda row: (row.program, row.model_bytes))
    page = [
        "# Peak memory against the size of the model", "",
        f"{date.today().isoformat()}; {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__};"
        f" w4a16, {TOKENS['num_samples']} x {TOKENS['seq_len']} tokens, CPU alone. `make bench-scale` makes this.",
        "", HEAD, *map(line, rows), "", *growth(rows),
        f"- a plan for Llama-3.1-405B takes {plan['wall_s']} s ({plan['cpu_s']} s of CPU), Python's start included",
        *([] if LLMC.exists() else ["- llm-compressor is not here: `make bench-engines` installs it"]),
    ]  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    file_of("md").write_text("\n".join(page) + "\n", "utf-8")
    content = {"rows": [asdict(row) for row in rows], "plan_405b": plan, "tokens": TOKENS}
    file_of("json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
