"""``genai_config.json``: how ONNX Runtime GenAI runs a graph with a cache of keys and values. No torch.

As onnxruntime-genai 0.18 reads it (its ``src/config.cpp``). ``decoder`` is its type of any language model; the inputs
and outputs have its usual names. The cache is handed from call to call (``past_present_share_buffer`` false), since
only a graph with GroupQueryAttention can write into a buffer of the final length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantcore.checkpoint.headers import read_json
from quantcore.checkpoint.model_config import ModelConfig
from quantcore.checkpoint.onnx_headers import FILE_NAME
from quantcore.config.layer_plan import LayerPlan

GENAI_CONFIG = "genai_config.json"
TYPE = "decoder"
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "no_repeat_ngram_size", "min_length")
"""Settings of generation_config.json that GenAI has under the same names."""
UNLIMITED = 1 << 17
"""Tokens of a text in a model that config.json sets no limit."""


def genai_config(
    model_config: Mapping[str, Any], model_dir: Path, layers: Sequence[LayerPlan], caches: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Return the contents of the file for a graph whose blocks have ``caches`` of so many heads of such a width.

    Stop tokens and sampling are those of generation_config.json in ``model_dir``, if it is there.
    """
    config = ModelConfig(model_config)
    path = model_dir / "generation_config.json"
    generation = read_json(path, "no_generation_config") if path.is_file() else {}
    known = {**config.raw, **config.text, **generation}
    tokens = {key: known[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if known.get(key) is not None}
    if "eos_token_id" in tokens and "pad_token_id" not in tokens:
        ends = tokens["eos_token_id"]
        tokens["pad_token_id"] = ends[0] if isinstance(ends, list) else ends
    heads, width = caches[0]
    length = config.max_positions or UNLIMITED
    return {
        "model": {
            "type": TYPE,
            **tokens,
            "vocab_size": config.vocab_size,
            "context_length": length,
            "decoder": {
                "filename": FILE_NAME,
                "session_options": {"log_id": "onnxruntime-genai", **_accuracy(layers), "provider_options": []},
                "hidden_size": config.hidden_size,
                "head_size": width,
                "num_attention_heads": config.num_heads,
                "num_key_value_heads": heads,
                "num_hidden_layers": len(caches),
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "max_length": length,
            **{key: generation[key] for key in SAMPLING if generation.get(key) is not None},
            "past_present_share_buffer": False,
        },
    }


def _accuracy(layers: Sequence[LayerPlan]) -> dict[str, str]:
    """Return the options with which ONNX Runtime computes what was measured: see docs/how-to/onnx.md."""
    options = {}
    if any(layer.weight.format.bits == 8 and layer.input_tensors is None for layer in layers):
        options["session.qdq_matmulnbits_accuracy_level"] = "1"  # float32; by default inputs are rounded to int8
    if layers and all(layer.input_tensors is not None and layer.input_tensors.is_static for layer in layers):
        options["session.x64quantprecision"] = "1"  # by default sums of int8 products may overflow on x86
    return options
