"""What a plan says of memory against what a process took: a real one, since a peak is never given back."""

import json
import subprocess
import sys

import pytest

from bench.random_model import write_random_model
from quantcore import presets
from quantcore.algorithms import config_of
from quantcore.config import CalibrationConfig, parse_config
from quantcore.memory import RUNTIME_BYTES
from quantcore.task import EvaluationConfig, Task

FACTOR = 1.6
"""Between what is planned beside the runtime and what was taken: allocators, temporaries and libraries differ."""

CASES = {
    "from file to file": ("w4a16", (), True),
    "rounded block by block": ("w4a16", (), False),
    "statistics": ("w4a16", ("awq",), False),
    "factors": ("w4a16", ("gptq",), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_near_what_is_taken(tmp_path, case):
    """A block of 119 MB, whose largest weight has 17 million values: much beside what Python and torch need."""
    preset, algorithms, file2file = CASES[case]
    widths = (1024, 2816) if algorithms else (2048, 8192)
    write_random_model(tmp_path / "model", num_blocks=2, widths=widths)
    config = {**presets.resolve(preset).to_dict(), "algo_config": list(map(config_of, algorithms))}
    task = Task(
        model_dir=tmp_path / "model", output_dir=tmp_path / "out", config=parse_config(config), file2file=file2file,
        calibration=CalibrationConfig(num_samples=4, seq_len=128),
        evaluation=EvaluationConfig(num_windows=0, seq_len=128),
    )  # fmt: skip
    (tmp_path / "task.json").write_text(task.model_dump_json())
    ran = subprocess.run(
        [sys.executable, "-m", "quantcore", "run", str(tmp_path / "task.json")], capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    summary = json.loads((tmp_path / "out" / "report.json").read_text())["summary"]
    planned, taken = (summary[name] - RUNTIME_BYTES for name in ("planned_peak_memory_bytes", "peak_memory_bytes"))
    assert planned > 100e6 and planned / FACTOR < taken < planned * FACTOR, (planned, taken)
