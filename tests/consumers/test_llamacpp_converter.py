"""llama.cpp computes with GGUF files that its own converter laid out what we measured, architecture by architecture.

Tiny models with SmolLM2's tokenizer: random weights, so that another order of rows, heads or experts would give another
perplexity altogether. It needs ``make consumers``; ``make test-all`` runs this.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from quantcore.config import presets
from tests.support.consumers import TOLERANCE, check, export_all
from tests.support.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

VOCAB_SIZE = 49152  # of SmolLM2
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
HYBRID = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
MODELS = {
    "apertus": {},
    "arcee": {},
    "bloom": {},
    "cohere2": {"rotary_pct": 1.0, "tie_word_embeddings": True},
    "exaone4": {},
    "gpt_oss": {},
    "granite": {},
    "granitemoe": {},
    "hunyuan_v1_dense": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {"num_key_value_heads": 4},
    "qwen2_moe": {},
    "qwen3_5_text": {**HYBRID, "head_dim": 256},
    "qwen3_next": {**HYBRID, "head_dim": 64},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture(smollm2, tmp_path, name, agrees):
    settings = {"tie_word_embeddings": False, "vocab_size": VOCAB_SIZE} | MODELS[name]
    model = tiny_model(tmp_path / "model", model_type=name, dtype=torch.float32, **settings)
    for file in TOKENIZER:
        if (smollm2 / file).exists():
            shutil.copy(smollm2 / file, model / file)
    config = replace(presets.resolve("gguf_q4_1"), exclude=("*.v_proj",))
    results, windows = export_all(model, {"one": config}, ("gguf",), tmp_path)
    artifact, summary = results["one"]
    report = json.loads((artifact / "report.json").read_text())
    assert not [warning for warning in report["warnings"] if "in place of codes" in str(warning)]
    output = check("llamacpp", "check_llamacpp.py", artifact / "model.gguf", windows)
    agrees(
        "llama.cpp", "gguf", "gguf_q4_1", output["perplexity"], summary["perplexity_after"], TOLERANCE,
        f"tiny {name}", name,
    )  # fmt: skip
