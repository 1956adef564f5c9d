"""A model that overflows in its dtype is refused before the first block, with the dtype that works."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantcore.errors import ModelError
from quantcore.pipeline.job import run
from tests.support.jobs import task
from tests.support.models import tiny_model


def test_it_is_said_before_the_first_block(tmp_path):
    """Gemma 3 in float16: hidden states grow beyond 65,504, which bfloat16 holds."""
    folder = tiny_model(tmp_path / "model", dtype=torch.float16)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("up_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * 300
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for dtype, is_finite in ((torch.float16, False), (torch.bfloat16, True)):
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(torch.arange(24)[None]).logits
        assert bool(logits.isfinite().all()) == is_finite
    events = []
    with pytest.raises(ModelError, match="overflows in float16") as caught:
        run(task(folder, tmp_path / "out", "int8_weight_only"), events.append)
    assert caught.value.code == "float_overflow" and "dtype='bfloat16'" in caught.value.hint
    assert {event.phase for event in events if hasattr(event, "phase")} <= {"resolve", "plan"}
