"""Small jobs of the engine, and perplexities for comparison."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quantcore.config import presets
from quantcore.config.quantization import CalibrationConfig, Config
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.data.windows import DocumentTokenizer, TokenWindows, token_windows
from quantcore.engine.runtime.matmul import matmul_precision
from tests.support.models import tiny_tokenizer

CPU = torch.device("cpu")
BOTH = ("quark", "compressed_tensors")


def task(
    model_dir: Path, output_dir: Path, preset: str = "fp8", export: Sequence[str] = ("quark",),
    config: Config | None = None, num_prompts: int = 0, **changes: Any,
) -> Task:  # fmt: skip
    """Return a small job; continuing prompts with both models would take a third of its time."""
    group_size = 32 if preset.startswith("w4a16") else None
    return Task(
        model_dir=model_dir,
        output_dir=output_dir,
        config=config or presets.resolve(preset, group_size=group_size),
        calibration=CalibrationConfig(num_samples=4, seq_len=64),
        evaluation=EvaluationConfig(num_windows=3, seq_len=64, num_prompts=num_prompts),
        export=export,
        **changes,
    )


@cache
def token_windows_of_jobs() -> TokenWindows:
    """Return the token windows of the jobs of ``task``."""
    tokenizer = tiny_tokenizer()
    return token_windows(
        CalibrationConfig(num_samples=4, seq_len=64),
        DocumentTokenizer(
            lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            separator=tokenizer.eos_token_id,
        ),
        num_held_out=3,
        held_out_len=64,
    )


def perplexity_of(model: torch.nn.Module) -> float:
    """Return the perplexity with the engine's products: another order of sums moves a tiny random model by 0.2 %."""
    windows = token_windows_of_jobs().held_out_NT
    with torch.no_grad(), matmul_precision(CPU):
        losses = [model(window[None], labels=window[None]).loss.float() for window in windows]
    return torch.stack(losses).mean().exp().item()


def math_close(a: float, b: float, share: float) -> bool:
    return abs(a - b) <= share * abs(b)
