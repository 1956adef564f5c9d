"""Derives the tensors of a checkpoint from only its config.json: names, shapes and sizes, before any download.

A family is a row of ``FAMILIES``: a function that gives the tensors of a block. Sources are the published checkpoints,
whose names Transformers' models read; a test compares every family with the model that Transformers builds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quantcore.checkpoint.config_checks import check_config
from quantcore.checkpoint.experts import unstack_experts
from quantcore.checkpoint.layout import DTYPE_BYTES, TensorHeader
from quantcore.checkpoint.model_config import (
    DEPTH,
    EXPERTS,
    HEADS,
    HIDDEN,
    KEY_VALUE_HEADS,
    VOCABULARIES,
    first,
    head_width,
    required,
)
from quantcore.errors import ModelError

Shapes = dict[str, tuple[int, ...]]
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def tensors_of(config: Mapping[str, Any]) -> dict[str, TensorHeader]:
    """Return the tensors of a model with this config; they have no file and no offset yet.

    Raises ModelError ``unsupported_architecture`` for a family that is not known, ``config_implausible`` for numbers
    that are missing or implausible.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ModelError(
            f"The layers of a '{config.get('model_type')}' model cannot be derived from its config.json.",
            code="unsupported_architecture",
            hint=f"Use the folder with its weight files. Model types supported without files: {', '.join(FAMILIES)}.",
        )
    check_config(config, {})
    try:
        shapes = dict(_shapes(config, family))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"config.json of this '{config['model_type']}' model has missing or wrong fields: {error!r}.",
            code="config_implausible",
            hint="Use the config.json that was published with the weights.",
        ) from error
    dtype = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "BF16")
    size = DTYPE_BYTES[dtype]
    return unstack_experts(
        {name: TensorHeader(dtype, shape, "", 0, size * math.prod(shape)) for name, shape in shapes.items()}
    )


def _shapes(config: Mapping[str, Any], family: Block) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocab, num_blocks = (required(config, names) for names in (HIDDEN, VOCABULARIES, DEPTH))
    yield "model.embed_tokens.weight", (vocab, hidden)
    extra = config.get("num_nextn_predict_layers") or 0  # for multi-token prediction: stored, but not run
    for index in range(num_blocks + extra):
        block = family(config, index)
        if index >= num_blocks:
            block |= {"eh_proj.weight": (hidden, 2 * hidden), "enorm.weight": (hidden,), "hnorm.weight": (hidden,)}
            block |= {"embed_tokens.weight": (vocab, hidden), "shared_head.head.weight": (vocab, hidden)}
            block |= {"shared_head.norm.weight": (hidden,)}
        for name, shape in block.items():
            yield f"model.layers.{index}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (vocab, hidden)


def _linear(name: str, out: int, in_: int, *, bias: object = False) -> Shapes:
    return {f"{name}.weight": (out, in_)} | ({f"{name}.bias": (out,)} if bias else {})


def _gated(path: str, hidden: int, inner: int, *, bias: object = False) -> Shapes:
    up = {
        part: size
        for name in ("gate_proj", "up_proj")
        for part, size in _linear(f"{path}.{name}", inner, hidden, bias=bias).items()
    }
    return up | _linear(f"{path}.down_proj", hidden, inner, bias=bias)


def _norms(config: Mapping[str, Any]) -> Shapes:
    names = ("input_layernorm", "post_attention_layernorm")
    return {f"{name}.weight": (required(config, HIDDEN),) for name in names}


def _attention(config: Mapping[str, Any], *, qkv_bias: object = False, o_bias: object = False) -> Shapes:
    """Return the shapes of attention with grouped queries."""
    hidden, heads, width = required(config, HIDDEN), required(config, HEADS), head_width(config)
    groups = first(config, KEY_VALUE_HEADS) or heads
    return (
        _linear("self_attn.q_proj", heads * width, hidden, bias=qkv_bias)
        | _linear("self_attn.k_proj", groups * width, hidden, bias=qkv_bias)
        | _linear("self_attn.v_proj", groups * width, hidden, bias=qkv_bias)
        | _linear("self_attn.o_proj", hidden, heads * width, bias=o_bias)
    )


def _head_norms(config: Mapping[str, Any]) -> Shapes:
    width = head_width(config)
    return {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}


def _latent_attention(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of DeepSeek's attention, with keys and values computed from one narrow vector."""
    hidden, heads = required(config, HIDDEN), required(config, HEADS)
    nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query_rank, rank = config.get("q_lora_rank"), config["kv_lora_rank"]
    width = heads * (nope + rope)
    queries = _linear("self_attn.q_proj", width, hidden)
    if query_rank:
        queries = _linear("self_attn.q_a_proj", query_rank, hidden, bias=config.get("attention_bias"))
        queries |= {"self_attn.q_a_layernorm.weight": (query_rank,)}
        queries |= _linear("self_attn.q_b_proj", width, query_rank)
    return (
        queries
        | _linear("self_attn.kv_a_proj_with_mqa", rank + rope, hidden, bias=config.get("attention_bias"))
        | {"self_attn.kv_a_layernorm.weight": (rank,)}
        | _linear("self_attn.kv_b_proj", heads * (nope + value), rank)
        | _linear("self_attn.o_proj", hidden, heads * value, bias=config.get("attention_bias"))
    )


def _experts(config: Mapping[str, Any], num_experts: int) -> Shapes:
    """Return the shapes of a matrix for each expert and projection, and of the router."""
    hidden, inner = required(config, HIDDEN), config["moe_intermediate_size"]
    shapes: Shapes = {"mlp.gate.weight": (num_experts, hidden)}
    for index in range(num_experts):
        shapes |= _gated(f"mlp.experts.{index}", hidden, inner)
    return shapes


def _llama(config: Mapping[str, Any], index: int) -> Shapes:
    bias = config.get("attention_bias")
    mlp = _gated("mlp", required(config, HIDDEN), config["intermediate_size"], bias=config.get("mlp_bias"))
    return _attention(config, qkv_bias=bias, o_bias=bias) | mlp | _norms(config)


def _qwen2(config: Mapping[str, Any], index: int) -> Shapes:
    mlp = _gated("mlp", required(config, HIDDEN), config["intermediate_size"])
    return _attention(config, qkv_bias=True) | mlp | _norms(config)


def _qwen3(config: Mapping[str, Any], index: int) -> Shapes:
    return _llama(config, index) | _head_norms(config)


def _mixtral(config: Mapping[str, Any], index: int) -> Shapes:
    hidden, inner, num_experts = required(config, HIDDEN), config["intermediate_size"], required(config, EXPERTS)
    moe = {"block_sparse_moe.gate.weight": (num_experts, hidden)}
    for expert in range(num_experts):
        shapes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
        moe |= {f"block_sparse_moe.experts.{expert}.{name}.weight": shape for name, shape in shapes.items()}
    return _attention(config) | moe | _norms(config)


def _is_sparse(config: Mapping[str, Any], index: int) -> bool:
    step = config.get("decoder_sparse_step", 1)
    return index not in (config.get("mlp_only_layers") or ()) and (index + 1) % step == 0


def _qwen2_moe(config: Mapping[str, Any], index: int) -> Shapes:
    if not _is_sparse(config, index):
        return _qwen2(config, index)
    hidden = required(config, HIDDEN)
    shared = _gated("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
    shared |= _linear("mlp.shared_expert_gate", 1, hidden)
    moe = _experts(config, required(config, EXPERTS))
    return _attention(config, qkv_bias=config.get("qkv_bias", True)) | moe | shared | _norms(config)


def _qwen3_moe(config: Mapping[str, Any], index: int) -> Shapes:
    if not _is_sparse(config, index):
        return _qwen3(config, index)
    bias = config.get("attention_bias")
    moe = _experts(config, required(config, EXPERTS))
    return _attention(config, qkv_bias=bias, o_bias=bias) | _head_norms(config) | moe | _norms(config)


def _deepseek(config: Mapping[str, Any], index: int) -> Shapes:
    hidden = required(config, HIDDEN)
    if index < config["first_k_dense_replace"]:
        return _latent_attention(config) | _gated("mlp", hidden, config["intermediate_size"]) | _norms(config)
    moe = _experts(config, required(config, EXPERTS))
    moe |= _gated("mlp.shared_experts", hidden, config["n_shared_experts"] * config["moe_intermediate_size"])
    if config["model_type"] != "deepseek_v2":
        moe["mlp.gate.e_score_correction_bias"] = (required(config, EXPERTS),)
    return _latent_attention(config) | moe | _norms(config)


def _gpt_oss(config: Mapping[str, Any], index: int) -> Shapes:
    """Return the shapes of a gpt-oss block, with experts in stacks, transposed."""
    hidden, inner, num_experts = required(config, HIDDEN), config["intermediate_size"], required(config, EXPERTS)
    moe: Shapes = {
        "mlp.experts.gate_up_proj": (num_experts, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (num_experts, 2 * inner),
        "mlp.experts.down_proj": (num_experts, inner, hidden),
        "mlp.experts.down_proj_bias": (num_experts, hidden),
    }
    moe |= _linear("mlp.router", num_experts, hidden, bias=True)
    sinks = {"self_attn.sinks": (required(config, HEADS),)}
    return _attention(config, qkv_bias=True, o_bias=True) | sinks | moe | _norms(config)


Block = Callable[[Mapping[str, Any], int], Shapes]
"""A function that returns the tensors of the block with a given number."""

FAMILIES: dict[str, Block] = {
    "llama": _llama, "mistral": _llama, "qwen2": _qwen2, "qwen3": _qwen3,
    "mixtral": _mixtral, "qwen2_moe": _qwen2_moe, "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "kimi_k2": _deepseek, "gpt_oss": _gpt_oss,
}  # fmt: skip
