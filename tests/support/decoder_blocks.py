"""Tiny random models in memory, and one decoder block of them with real hidden states to run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quantcore.engine.model.experts import split_experts
from quantcore.engine.model.parameter_names import projection_names
from tests.support.models import MIXTURES, SHAPE

NUM_TOKENS = 24
_SIXTEEN = {"query_pre_attn_scalar": 16, "sliding_window": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    **MIXTURES,
    "phimoe": MIXTURES["mixtral"],
    "gemma2": {**_SIXTEEN, "final_logit_softcapping": 5.0},
    "gemma3_text": {**_SIXTEEN, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "gptj": {"rotary_dim": 8},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "qwen3_next": {
        **MIXTURES["qwen2_moe"], "linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}  # fmt: skip
_OWN_HEAD_DIM = ("falcon",)  # configs that compute it


def model_in_memory(model_type: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """Return a model of three blocks with norms and biases that matter, and the experts split."""
    torch.manual_seed(0)
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim" or model_type not in _OWN_HEAD_DIM}
    config = AutoConfig.for_model(
        model_type, **{**shape, "tie_word_embeddings": False, **CONFIGS.get(model_type, {}), **overrides}
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            offset = 1.0 if parameter.ndim == 1 and "norm" in name and "bias" not in name else 0.0
            parameter.copy_(offset + spread * torch.randn_like(parameter))
    model.to(dtype).eval().requires_grad_(False)
    model.config.use_cache = False
    split_experts(model, projection_names(model))
    return model


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == 3)


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits [1, T, V] of ``NUM_TOKENS`` random tokens, always the same."""
    ids = torch.randint(1, 500, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(input_ids=ids).logits


class RunOf:
    """Runs a module on fixed inputs and counts the calls. Returns the module's addition to the first input."""

    def __init__(self, block: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.block, self.args, self.kwargs = block, args, kwargs
        self.count = 0

    def __call__(self) -> torch.Tensor:
        self.count += 1
        with torch.inference_mode():
            output = self.block(*self.args, **self.kwargs)
            result: torch.Tensor = (output[0] if isinstance(output, tuple) else output) - self.args[0]
        return result


def run_of(model: PreTrainedModel, index: int) -> RunOf:
    """Return the run of one block on the hidden states that reach it in the model."""
    block, calls = blocks_of(model)[index], []
    note: Callable[..., None] = lambda _, args, kwargs: calls.append((args, kwargs))  # noqa: E731
    with block.register_forward_pre_hook(note, with_kwargs=True):
        logits_of(model)
    args, kwargs = calls[0]
    if not args:
        args, kwargs = (kwargs["hidden_states"],), {key: kwargs[key] for key in kwargs if key != "hidden_states"}
    return RunOf(block, *args, **kwargs)
