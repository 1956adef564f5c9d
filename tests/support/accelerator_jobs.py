"""Small jobs, computed as an accelerator computes them, on the simulated one and on the CPU: results must be equal.

Two things differ between the CPU and accelerators beside torch's kernels. Attention takes the "math" path here on both.
The inner loop of GPTQ is a kernel of ours on GPUs (``quantcore.tensors.kernels``): here torch computes it, counted as a
launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from quantcore.cli.running import verify
from quantcore.config import presets
from quantcore.config.quantization import CalibrationConfig, parse_config
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.pipeline import job
from quantcore.engine.selftest.parts import in_turn
from quantcore.engine.solvers import columns
from quantcore.engine.solvers.columns import Grid
from quantcore.engine.verification import fresh_process
from quantcore.sandbox import fork_server
from tests.support.accelerator import SimTensor, count_launch, on_accelerator, unwrapped
from tests.support.device_counts import Counts

Tensors = dict[str, torch.Tensor]
GPTQ = {"name": "gptq"}
CHAINS: dict[str, list[dict[str, Any]]] = {
    "rounded": [],
    "gptq": [GPTQ],
    "gptaq": [{"name": "gptaq"}],
    "smoothquant gptq": [{"name": "smoothquant"}, GPTQ],
    "awq": [{"name": "awq"}],
    "autosmoothquant": [{"name": "autosmoothquant"}],
    "rotation gptq": [{"name": "rotation", "random_r1": True}, GPTQ],
    "rtn": [{"name": "rtn"}],
    "qronos": [{"name": "qronos"}],
    "yaqa": [{"name": "yaqa"}],
    "gptq distill": [GPTQ, {"name": "distill", "num_windows": 4}],
    "gptq bias_correction": [GPTQ, {"name": "bias_correction"}],
    "autoround": [{"name": "autoround", "iters": 4, "batch_size": 2}],
}


def task(model: Path, out: Path, preset: str, chain: str, *, num_windows: int = 2, seq_len: int = 64) -> Task:
    group_size = 32 if preset.startswith("w4a16") else None
    config = presets.resolve(preset, group_size=group_size).to_dict() | {"algo_config": CHAINS[chain]}
    return Task(
        model_dir=model,
        output_dir=out,
        config=parse_config(config),
        calibration=CalibrationConfig(num_samples=num_windows, seq_len=seq_len),
        evaluation=EvaluationConfig(num_windows=1, seq_len=64, num_prompts=0),
        export=("quark",),
    )


@contextmanager
def as_on_accelerators() -> Iterator[None]:
    """Compute in the way of accelerators while this lasts."""
    with patch.object(columns, "_kernel_for", _kernel_for), sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def proofs_in_forks() -> Iterator[None]:
    """Let each proof run in a fork of this process, which has its device: a new interpreter would have none."""
    started: list[fork_server.ForkServer] = []

    def waiting() -> fork_server.ForkServer:
        started.append(fork_server._start(verify))
        return started[-1]

    with patch.object(fresh_process, "waiting", waiting):
        try:
            yield
        finally:
            for one in started:
                one.end()


def quantized(task: Task) -> tuple[Tensors, torch.Tensor]:
    """Return the tensors that a job writes, and its logits of the probes, without the proof."""
    found: list[tuple[Tensors, torch.Tensor]] = []

    def keep(_: Task, folder: Path, expected: Any, emit: Any) -> None:
        tensors = {name: one for file in folder.rglob("*.safetensors") for name, one in load_file(file).items()}
        found.append((tensors, expected.probe_logits))
        raise _Kept

    with as_on_accelerators(), patch.object(job, "prove_in_fresh_process", keep):
        try:
            job.run(task, lambda event: None)
        except _Kept:
            return found[0]
    raise AssertionError("the job did not reach its proof")


def on_both(task: Task) -> tuple[tuple[Tensors, torch.Tensor], tuple[Tensors, torch.Tensor]]:
    """Return ``quantized`` on the CPU and on the simulated device."""
    return quantized(task), on_accelerator(lambda _: quantized(task))


def counted(task: Task) -> Counts:
    """Return what the simulated device counts in a job, without the proof."""

    def work(counts: Counts) -> Counts:
        quantized(task)
        return copy(counts)

    return on_accelerator(work)


class _Kept(Exception):
    """The job has written all that is compared."""


def _loop_in_one_launch(grid: Grid, value_KO: Any, error_KO: Any, feedback_KK: Any, group_K: Any) -> None:
    """What the kernel of a loop computes, by torch."""
    values, errors, *others = map(unwrapped, (value_KO, error_KO, feedback_KK, group_K, grid.step_JO, grid.zero_JO))
    found = in_turn(values, errors, *others, grid.spec.format)
    values.copy_(found[0])
    errors.copy_(found[1])
    if isinstance(value_KO, SimTensor):
        count_launch("loop of GPTQ")


def _kernel_for(grid: Grid, device: torch.device) -> Any:
    return None if grid.spec.over is not None else partial(_loop_in_one_launch, grid)
