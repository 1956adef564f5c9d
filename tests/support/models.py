"""Tiny random models that take seconds to build, small enough for every test."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 512

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}

_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _EXPERTS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": _EXPERTS,
    "deepseek_v3": {
        **_EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 32,
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32, "v_head_dim": 32,
    },
    "olmoe": _EXPERTS,
    "granitemoe": _EXPERTS,
    "gpt_oss": {**_EXPERTS, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
}  # fmt: skip
"""Configs of mixtures of four experts, two per token, in addition to ``SHAPE``."""


def tiny_model(
    folder: Path, *, model_type: str = "llama", seed: int = 0, dtype: torch.dtype = torch.bfloat16,
    tie_word_embeddings: bool = True, max_shard_size: str = "5GB", rank: int | None = None, **overrides: Any,
) -> Path:  # fmt: skip
    """Save a random model with its tokenizer in ``folder`` and return it; ``overrides`` go into the config.

    With a ``rank`` tokens lie in that many dimensions, and blocks add less to them: inputs correlate like real ones.
    """
    torch.manual_seed(seed)
    shape = {**SHAPE, **overrides}
    if isinstance(getattr(CONFIG_MAPPING[model_type], "head_dim", None), property):  # Falcon computes it
        del shape["head_dim"]
    config = AutoConfig.for_model(model_type, **shape, tie_word_embeddings=tie_word_embeddings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            offset = 1.0 if parameter.ndim == 1 and "norm" in name and "bias" not in name else 0.0
            parameter.copy_(offset + spread * torch.randn_like(parameter))
        if rank is not None:
            correlate(model, rank)
    model.tie_weights()
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def correlate(model: PreTrainedModel, rank: int) -> None:
    """Put tokens into ``rank`` dimensions, and let blocks add little to them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.5 * parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
        embedding = model.get_input_embeddings().weight
        few = torch.randn(embedding.shape[0], rank) @ torch.randn(rank, embedding.shape[1])
        embedding.copy_(few / rank**0.5)


@cache
def tiny_tokenizer(begin: str = "") -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of ``VOCAB_SIZE`` tokens, trained on the prose that comes with Python.

    It begins a text with the special token ``begin``, if given, as those of Gemma and Llama do.
    """
    from pydoc_data import topics

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<eos>", *filter(None, [begin])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics.topics[name] for name in sorted(topics.topics)[:20]], trainer)
    named = {"eos_token": "<eos>", "pad_token": "<eos>"}
    if begin:
        place = tokenizer.token_to_id(begin)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, place)])
        named["bos_token"] = begin
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
