"""A model that was moved off its grid computes the same, and its weights lie on no levels any more."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench import off_grid
from quantcore.importing.grid_search import with_grids
from quantcore.importing.model import read_model
from tests.support.grids import on_grids
from tests.support.models import tiny_model

GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 8,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}  # fmt: skip
FAMILIES = {"llama": {}, "gemma3_text": GEMMA}
MOVED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def moved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    out = folder.with_name("moved")
    monkeypatch.setattr(sys, "argv", ["off_grid", str(folder), str(out), "--seed", "3"])
    off_grid.main()
    return out


def logits_of(folder: Path) -> torch.Tensor:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.arange(48)[None]).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "difference"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str)
def test_the_function_stays_and_the_grid_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype, difference: float
) -> None:
    """In float32 only the arithmetic differs; in bfloat16 each weight is rounded again, by up to 0.4 %."""
    folder = tiny_model(tmp_path / "model", model_type=family, dtype=dtype, **FAMILIES[family])
    on_grids(folder, {"_proj": "gguf_q4_1"})
    assert [str(share) for share in with_grids(read_model(folder)).headers.grids] == ["Q4_1, groups of 32 (100 %)"]
    out = moved(folder, monkeypatch)
    assert with_grids(read_model(out)).headers.grids == ()
    before, after = logits_of(folder), logits_of(out)
    assert 0 < (after - before).norm() / before.norm() < difference


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_every_block_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    folder = tiny_model(tmp_path / "model", model_type=family, dtype=torch.float32, **FAMILIES[family])
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (folder, moved(folder, monkeypatch))
    )
    for name, tensor in before.items():
        if any(part in name for part in MOVED):
            ratio = after[name] / tensor
            assert 0.6 < ratio.min() < 0.95 and 1.05 < ratio.max() < 1.6, name  # 0.8 / 1.25 and its inverse at most
        assert after[name].dtype == tensor.dtype
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
