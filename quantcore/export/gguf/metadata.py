"""Writes the metadata of a GGUF file: llama.cpp builds the model from these values alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.model_config import DEPTH, HEADS, HIDDEN, VOCABULARIES, ModelConfig, head_width, required
from quantcore.export.gguf.gguf_tokenizer import TokenizerData
from quantcore.export.gguf.tensor_names import ARCHITECTURES, rope_parts

if TYPE_CHECKING:
    import torch
    from gguf import GGUFWriter

OF_THE_FILE = tuple(
    f"general.{key}" for key in ("architecture", "file_type", "quantization_version", "alignment", "quantized_by")
)
"""General fields that describe a file, not the model in it."""

LLAMA3_CONTEXT = 8192  # the original context of llama3 scaling, if the config does not give it


def add_model(writer: GGUFWriter, config: Mapping[str, Any], name: str, file_type: int) -> None:
    """Write shapes and constants of the model.

    ``config`` is completed by Transformers. ``file_type``: a LlamaFileType.
    """
    sizes, heads, head_dim = ModelConfig(config), required(config, HEADS), head_width(config)
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_vocab_size(required(config, VOCABULARIES))
    writer.add_block_count(required(config, DEPTH))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(required(config, HIDDEN))
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(sizes.num_key_value_heads or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    optional = {
        writer.add_attn_logit_softcapping: config.get("attn_logit_softcapping"),
        writer.add_final_logit_softcapping: config.get("final_logit_softcapping"),
        writer.add_expert_count: sizes.num_experts,
        writer.add_expert_used_count: sizes.num_experts_per_token,
        writer.add_expert_feed_forward_length: config.get("moe_intermediate_size"),
    }
    for add, value in optional.items():
        if value is not None:
            add(value)
    window = ARCHITECTURES[config["model_type"]].window
    if window == "by_layer" and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if window == "all":
        writer.add_sliding_window(config.get("sliding_window") or 0)
    _add_rope(writer, config, head_dim)


def add_general(writer: GGUFWriter, fields: Mapping[str, Any]) -> None:
    """Write the texts, lists of texts and whole numbers of ``fields``, by their keys."""
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int) and 0 <= value < 1 << 32:
            writer.add_uint32(key, value)
        elif isinstance(value, list) and value and all(isinstance(each, str) for each in value):
            writer.add_array(key, value)


def add_tokenizer(writer: GGUFWriter, tokenizer: TokenizerData) -> None:
    """Write the tokens, the rules that split texts into them, and the tokens around a text."""
    writer.add_tokenizer_model(tokenizer.model)
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    if tokenizer.scores:
        writer.add_token_scores(tokenizer.scores)
    if tokenizer.merges:
        writer.add_token_merges(tokenizer.merges)
    for kind, index in tokenizer.special.items():
        getattr(writer, f"add_{kind}_token_id")(index)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_eos_token(tokenizer.add_eos)
    if tokenizer.add_space_prefix is not None:
        writer.add_add_space_prefix(tokenizer.add_space_prefix)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def rope_tensors(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the divisors of the RoPE frequencies, float32, if the model's scaling is not a single number.

    Llama 3 (Transformers' ``llama3``) slows down low frequencies, with a ramp between; Phi 3 (``longrope``) lists a
    factor for each, for short and for long contexts.
    """
    import torch

    rope = rope_parts(config)[0]
    if _kind(rope) == "longrope":
        return {f"rope_factors_{end}.weight": torch.tensor(rope[f"{end}_factor"]).float() for end in ("long", "short")}
    if _kind(rope) != "llama3":
        return {}
    positions = torch.arange(0, head_width(config), 2, dtype=torch.float32) / head_width(config)
    wavelength = 2 * math.pi * _theta(rope, config) ** positions
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope.get("original_max_position_embeddings", LLAMA3_CONTEXT) / wavelength  # in the context trained on
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return {"rope_freqs.weight": 1 / ((1 - share) / factor + share)}


def _add_rope(writer: GGUFWriter, config: Mapping[str, Any], head_dim: int) -> None:
    from gguf import RopeScalingType

    parts = rope_parts(config)
    parameters = config.get("rope_parameters") or {}
    rope = parameters.get("full_attention", parts[0])
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    writer.add_rope_dimension_count(int(partial * head_dim))
    writer.add_rope_freq_base(_theta(rope, config))
    if "sliding_attention" in parameters:
        writer.add_rope_freq_base_swa(_theta(parameters["sliding_attention"], config))
    kind = _kind(rope)
    trained = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if trained is not None and kind != "llama3":
        writer.add_rope_scaling_orig_ctx_len(trained)
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(_longrope_attention(rope, config, trained))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType.LINEAR if kind == "linear" else RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])


def _longrope_attention(rope: Mapping[str, Any], config: Mapping[str, Any], trained: int) -> float:
    """Return the factor of queries and keys: configured, or derived from the extension of the context."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    stretch = config["max_position_embeddings"] / trained
    return math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0


def warn_of_window(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Warn about a model whose attention window is shorter than the one llama.cpp uses."""
    window = config.get("sliding_window")
    ignored = window and ARCHITECTURES[config["model_type"]].warns_of_window
    if not ignored or window >= config["max_position_embeddings"]:
        return ()
    return (f"llama.cpp ignores this model's sliding window of {window} tokens: keep the context shorter than that.",)


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _theta(rope: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    return float(rope.get("rope_theta", config.get("rope_theta") or 10000.0))
