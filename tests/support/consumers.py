"""Exports for other programs, and the scripts that check them in their own environments."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from quantcore.config.quantization import CalibrationConfig, Config
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.pipeline import job as pipeline
from quantcore.engine.verification.expectation import ExpectedDigests
from quantcore.engine.verification.fresh_process import Proved
from quantcore.events import Emit

ROOT = Path(__file__).parents[2]
HAS_VNNI = "avx512_vnni" in Path("/proc/cpuinfo").read_text()
"""True if sums of int8 products do not saturate in the kernels of oneDNN and ONNX Runtime."""
NO_AVX512 = (
    "vLLM for processors without AVX-512 has no kernels for int4 weights and fp8 caches, and its int8 sums saturate"
)
TOLERANCE = 0.04
"""The allowed difference: gaps of 1 to 3 % on a few hundred tokens are noise.

Consumers multiply in other orders and round scales otherwise."""


def export_all(
    model: Path, configs: dict[str, Config], formats: tuple[str, ...], folder: Path
) -> tuple[dict[str, tuple[Path, dict[str, Any]]], Path]:
    """Return (name -> (artifact folder, summary), file with the windows of the perplexity)."""
    results: dict[str, tuple[Path, dict[str, Any]]] = {}
    seen: dict[str, list[list[int]]] = {}
    prove = pipeline.prove_in_fresh_process

    def keep_windows(task: Task, folder: Path, expected: ExpectedDigests, emit: Emit) -> Proved:
        seen["windows"] = expected.held_out.ids_NT.tolist()
        return prove(task, folder, expected, emit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "prove_in_fresh_process", keep_windows)
        for name, config in configs.items():
            task = Task(
                model_dir=model, output_dir=folder / name, config=config, export=formats,
                calibration=CalibrationConfig(seq_len=256), evaluation=EvaluationConfig(num_windows=4, seq_len=256),
            )  # fmt: skip
            results[name] = (folder / name, pipeline.run(task, lambda event: None).to_dict()["summary"])
    windows = folder / "windows.json"
    windows.write_text(json.dumps(seen["windows"]))
    return results, windows


def run_in(environment: str, script: str, *arguments: str | Path) -> tuple[Any, str]:
    """Run a check script in a consumer's environment; return its RESULT line or None, and its output."""
    python = ROOT / ".venv-consumers" / environment / "bin" / "python"
    assert python.exists(), f"run `make consumers` first: {python} is missing"
    process = subprocess.run(
        [python, ROOT / "tests" / "consumers" / script, *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[-1].removeprefix("RESULT ")) if lines else None, process.stdout + process.stderr


def check(environment: str, script: str, *arguments: str | Path) -> Any:
    """Return the RESULT line of a check script in a consumer's environment."""
    result, printed = run_in(environment, script, *arguments)
    assert result is not None, printed[-6000:]
    return result


def check_vllm(folder: Path, windows: Path, *, num_bits: int) -> Any:
    """Return the RESULT of ``check_vllm.py``; None on a processor for which vLLM has no kernel for the weights.

    Without AVX-512 it stops at the first product of int4 weights, which all are loaded by then. Without VNNI the
    products of int8 weights that it computes are wrong: oneDNN's sums saturate, unless all weights are small.
    """
    result, printed = run_in("vllm", "check_vllm.py", folder, windows)
    if not HAS_VNNI and num_bits == 4:
        assert result is None and "has no attribute 'cpu_gemm_wna16'" in printed, printed[-6000:]
        return None
    assert result is not None, printed[-6000:]
    return result
