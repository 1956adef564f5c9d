"""An adapter is merged to the last bit as PEFT merges it, whatever its settings."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quantcore.engine.containers.dequantize import open_source
from quantcore.errors import NumericsError
from quantcore.importing.model import read_model
from tests.support.adapters import merged_by_peft, save_adapter
from tests.support.models import tiny_model

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FUSED = ["c_attn", "c_proj", "c_fc"]  # GPT-2 stores them [in, out]; that of c_proj is square
PATTERNS = {"rank_pattern": {"q_proj": 8, r"layers\.1\.self_attn\.v_proj": 2}, "alpha_pattern": {"v_proj": 5}}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({}, {}),
    "lora in float16": ({"dtype": F16}, {}),
    "lora in float32": ({"dtype": F32}, {}),
    "adapter in bfloat16": ({}, {"dtype": BF16}),
    "rank-stabilized, patterns": ({}, {"use_rslora": True, **PATTERNS}),
    "some layers": ({}, {"layers_to_transform": [0, 2], "layers_pattern": "layers"}),
    "all linear layers": ({}, {"target_modules": "all-linear"}),
    "dora": ({}, {"use_dora": True, **PATTERNS}),
    "dora in float32": ({"dtype": F32}, {"use_dora": True}),
    "whole modules": ({"tie_word_embeddings": False}, {"modules_to_save": ["lm_head", "norm"]}),
    "embedding": ({"tie_word_embeddings": False}, {"target_modules": ["embed_tokens", "q_proj"]}),
    "conv1d": ({"model_type": "gpt2", "dtype": F32}, {"target_modules": FUSED, "fan_in_fan_out": True}),
    "conv1d, dora": ({"model_type": "gpt2"}, {"target_modules": FUSED, "fan_in_fan_out": True, "use_dora": True}),
    "biases of the adapter": ({"model_type": "qwen2"}, {"lora_bias": True}),
    "all biases": ({"model_type": "qwen2"}, {"bias": "all"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_that_of_peft(case: str, tmp_path: Path) -> None:
    of_model, settings = CASES[case]
    base = tiny_model(tmp_path / "base", **of_model)
    adapter = save_adapter(base, tmp_path / "adapter", **settings)
    expected = merged_by_peft(base, adapter, of_model.get("dtype", BF16))
    model = read_model(base, adapter)
    assert model.adapter is not None
    plain, merged = open_source(read_model(base)), open_source(model)
    changed = {name for name in plain.tensors if not torch.equal(plain.read(name), merged.read(name))}
    assert changed == model.adapter.changes.keys()
    for name in merged.tensors:
        assert torch.equal(merged.read(name), expected[name]), name
        if merged.tensors[name].shape[0] > 5:
            rows = range(2, 5)
            assert torch.equal(merged.read_rows(name, rows), expected[name][2:5])
            assert torch.equal(merged.rows(name)(rows), expected[name][2:5])


def test_a_merged_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", dtype=F16)
    adapter = save_adapter(base, tmp_path / "adapter", lora_alpha=10**9)
    with pytest.raises(NumericsError, match="NaN or infinity once the adapter is merged"):
        open_source(read_model(base, adapter)).read("model.layers.0.self_attn.q_proj.weight")
