"""Jobs on fixed windows of random tokens, and perplexities on the same windows."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from quantcore.config.quantization import CalibrationConfig, Config
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.data.windows import TokenWindows
from quantcore.engine.pipeline import job as pipeline
from quantcore.engine.runtime.matmul import matmul_precision

WINDOWS = torch.arange(6 * 32).mul(7).remainder(509).view(6, 32)  # fewer than any model here has


def quantize(model_dir: Path, output_dir: Path, config: Config, *exports: str, **rest: Any) -> dict[str, Any]:
    """Run a job on WINDOWS and return its report."""
    task = Task(
        model_dir=model_dir, output_dir=output_dir, config=config, export=exports,
        calibration=CalibrationConfig(num_samples=4, seq_len=32),
        evaluation=EvaluationConfig(num_windows=2, seq_len=32, num_prompts=0), **rest,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "read_windows", lambda _: TokenWindows(WINDOWS[:4], WINDOWS[4:]))
        return pipeline.run(task, lambda event: None).to_dict()


def measured(model: torch.nn.Module) -> float:
    """Return the model's perplexity on WINDOWS, with the engine's products on this processor."""
    with torch.inference_mode(), matmul_precision(model.device):
        losses = [
            torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1].float(), ids[1:]) for ids in WINDOWS[4:]
        ]
    return math.exp(torch.stack(losses).mean().item())
