"""Tiny models with a layer for multi-token prediction (MTP), under the names of published checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, MellumConfig, PretrainedConfig
from transformers.modeling_layers import MtpModel

from tests.support.tokenizers import save_byte_tokenizer

NUM_BLOCKS = 3
COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2, "vocab_size": 384,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "num_nextn_predict_layers": 1, "pad_token_id": 0,
}  # fmt: skip
SHARED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "glm4_moe": Glm4MoeConfig(**COMMON, **SHARED_EXPERTS),
    "deepseek_v3": DeepseekV3Config(**{**COMMON, **SHARED_EXPERTS, **LATENT}),
    "mellum": MellumConfig(
        **COMMON, num_experts=4, layer_types=["full_attention", "sliding_attention", "full_attention"]
    ),
}
BEHIND_BLOCKS = {
    "eh_proj": f"model.layers.{NUM_BLOCKS}.eh_proj", "enorm": f"model.layers.{NUM_BLOCKS}.enorm",
    "hnorm": f"model.layers.{NUM_BLOCKS}.hnorm", "post_norm": f"model.layers.{NUM_BLOCKS}.shared_head.norm",
}  # fmt: skip
INSIDE_MTP = {
    "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
    "post_norm": "mtp.norm",
}  # fmt: skip


def save_with_draft(model_type: str, folder: Path) -> Path:
    """Save a random model whose draft layer is right about half the time: its blocks, and the draft's, add little.

    Both then predict from the embedding of the last token, as far as ``eh_proj`` passes that on.
    """
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[model_type], dtype=torch.float32).eval()
    draft = MtpModel(model, 1).eval()
    for parameter in draft.layers.parameters():  # Transformers leaves experts and routers of a draft uninitialized
        if parameter.ndim > 1:
            parameter.data.normal_(std=model.config.initializer_range)
    for buffer in draft.layers.buffers():
        buffer.zero_()
    for name, parameter in [*model.named_parameters(), *draft.named_parameters()]:
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            parameter.data *= 0.3
    draft.layers[0].eh_proj.weight.data += torch.eye(model.config.hidden_size, 2 * model.config.hidden_size)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    own = draft.layers[0].state_dict()
    save_byte_tokenizer(folder)
    save_file(tensors | dict(named(own, model_type)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def named(own: dict[str, torch.Tensor], model_type: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a draft layer under the names that a published checkpoint has."""
    outside = INSIDE_MTP if model_type == "mellum" else BEHIND_BLOCKS
    start = "mtp.layers.0." if model_type == "mellum" else f"model.layers.{NUM_BLOCKS}."
    for name, tensor in own.items():
        if not name.startswith("mtp_block."):
            part, _, kind = name.partition(".")
            yield f"{outside[part]}.{kind}", tensor.contiguous()
        elif name.endswith("experts.gate_up_proj"):
            experts = start + name.removeprefix("mtp_block.").removesuffix("gate_up_proj")
            for index, expert in enumerate(tensor):
                for projection, weight in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                    yield f"{experts}{index}.{projection}.weight", weight.contiguous()
        elif name.endswith("experts.down_proj"):
            experts = start + name.removeprefix("mtp_block.").removesuffix("down_proj")
            for index, weight in enumerate(tensor):
                yield f"{experts}{index}.down_proj.weight", weight.contiguous()
        else:
            yield start + name.removeprefix("mtp_block."), tensor.contiguous()
