"""Tiny models of architectures that llama.cpp's converter lays out, with SmolLM2's tokenizer."""

import shutil
from pathlib import Path
from typing import Any

from tests.support.models import tiny_model

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


def with_tokenizer_of(smollm2: Path, folder: Path, **settings: Any) -> Path:
    """Return the folder of a tiny model with the tokenizer of SmolLM2, which llama.cpp's converter knows."""
    model = tiny_model(folder, vocab_size=VOCAB_SIZE, **settings)
    for file in TOKENIZER:
        if (smollm2 / file).exists():
            shutil.copy(smollm2 / file, model / file)
    return model
