"""Adapters as PEFT saves them, with random values, and PEFT's own merge of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

ATTENTION = ["q_proj", "v_proj"]


@contextmanager
def without_warnings() -> Iterator[None]:
    """PEFT warns of what it changes by itself, and uses what Transformers calls deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@without_warnings()
def save_adapter(model: Path, folder: Path, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """Save an adapter for ``model`` in ``folder``, trained by nobody: all that it may change is random.

    ``settings`` are those of ``LoraConfig``.
    """
    torch.manual_seed(7)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": ATTENTION, "task_type": "CAUSAL_LM", **settings}
    adapted = get_peft_model(base, LoraConfig(**settings))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                spread = 0.2 * parameter.abs().mean() if parameter.abs().any() else 0.1
                parameter.add_(spread * torch.randn_like(parameter))
    adapted.to(dtype).save_pretrained(folder)
    return folder


@without_warnings()
def merged_by_peft(model: Path, adapter: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of the model that PEFT makes of both, in ``dtype``."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    whole = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    return {name: tensor.to(dtype) for name, tensor in whole.state_dict().items()}
