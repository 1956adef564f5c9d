"""Builds config.json from a GGUF file's fields: the inverse of ``metadata``. No torch.

GGUF uses the name llama for Mistral and Mixtral as well. A file with experts is read as a Mixtral, one without as a
Llama, which computes the same as a Mistral.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from quantcore.errors import ModelError
from quantcore.export.gguf.header import GgufHeader
from quantcore.export.gguf.laid_out import ROW_MAP
from quantcore.export.gguf.tensor_names import ARCHITECTURES, attention_scalar

MODEL_TYPES = {architecture.name: model_type for model_type, architecture in reversed(ARCHITECTURES.items())}
"""The model_type of config.json by GGUF's name: the first of those that share it."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings of all of Llama 3.1 to 3.3; a file holds only the divisors of the frequencies."""
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
_LAID_OUT = (
    "Its quality was measured when it was made: see report.json beside it. For another format, quantize the model that"
    " it was made from again."
)

Get = Callable[..., Any]


def model_config(header: GgufHeader) -> dict[str, Any]:
    """Return the config.json of the model, without its dtype.

    Raises ModelError for an unsupported architecture or RoPE.
    """
    name = str(header.fields.get("general.architecture"))

    def get(key: str, default: Any = None) -> Any:
        return header.fields.get(f"{name}.{key}", default)

    if name not in MODEL_TYPES:
        raise ModelError(
            f"{header.path.name} contains a model of the GGUF architecture '{name}', which is not read as input.",
            code="unsupported_architecture",
            hint=f"llama.cpp runs it. {_LAID_OUT} Read as input are: {', '.join(sorted(MODEL_TYPES))}."
            if header.path.with_name(ROW_MAP).exists()
            else f"Give the folder of the model that it was made from. Read as input are:"
            f" {', '.join(sorted(MODEL_TYPES))}.",
        )
    model_type = "mixtral" if name == "llama" and get("expert_count") else MODEL_TYPES[name]
    try:
        config = _shapes(header, model_type, get)
        config["rope_parameters"] = _rope(header, model_type, get, config)
        config |= _only_of(model_type, get, config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"{header.path.name} lacks information that a {model_type} model needs: {error!r}.", code="invalid_gguf"
        ) from error
    return config


def _shapes(header: GgufHeader, model_type: str, get: Get) -> dict[str, Any]:
    heads, width = int(get("attention.head_count")), int(get("embedding_length"))
    config = {
        "architectures": [ARCHITECTURES[model_type].class_name],
        "model_type": model_type,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "num_hidden_layers": int(get("block_count")),
        "max_position_embeddings": int(get("context_length")),
        "hidden_size": width,
        "intermediate_size": int(get("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": int(get("attention.key_length", width // heads)),
        "rms_norm_eps": float(get("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    ids = {key: header.fields.get(f"tokenizer.ggml.{field}") for key, field in TOKENS.items()}
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    return {**config, **ids}


def _only_of(model_type: str, get: Get, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that some architectures have in addition to the shapes."""
    if model_type == "mixtral":
        return {"num_local_experts": int(get("expert_count")), "num_experts_per_tok": int(get("expert_used_count"))}
    if model_type == "qwen3_moe":
        return {
            "num_experts": int(get("expert_count")),
            "num_experts_per_tok": int(get("expert_used_count")),
            "moe_intermediate_size": int(get("expert_feed_forward_length")),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if model_type == "phi3":
        window = get("attention.sliding_window")
        return {"sliding_window": int(window) if window else None}
    if not model_type.startswith("gemma"):
        return {}
    settings = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": attention_scalar(config),
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
    }
    if get("attention.sliding_window"):
        settings["sliding_window"] = int(get("attention.sliding_window"))
    pattern = get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        settings["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    return settings


def _rope(header: GgufHeader, model_type: str, get: Get, config: dict[str, Any]) -> dict[str, Any]:
    theta = float(get("rope.freq_base", 10000.0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind, trained = get("rope.scaling.type", "none"), get("rope.scaling.original_context_length")
    if "rope_freqs.weight" in header.tensors:
        rope |= _llama3(header, theta, config["head_dim"])
    elif "rope_factors_long.weight" in header.tensors:
        lists = {f"{end}_factor": header.read_floats(f"rope_factors_{end}.weight") for end in ("long", "short")}
        rope |= {"rope_type": "longrope", **lists, "original_max_position_embeddings": int(trained)}
        rope["attention_factor"] = get("rope.scaling.attn_factor")
    elif kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(get("rope.scaling.factor"))}
        rope |= {} if trained is None else {"original_max_position_embeddings": int(trained)}
    elif kind != "none":
        raise ValueError(f"RoPE scaling is '{kind}'")
    share = int(get("rope.dimension_count", config["head_dim"])) / config["head_dim"]
    if share != 1:
        rope["partial_rotary_factor"] = share
    if model_type != "gemma3_text":
        return rope
    local = {"rope_type": "default", "rope_theta": float(get("rope.freq_base_swa", 10000.0))}
    return {"full_attention": rope, "sliding_attention": local}


def _llama3(header: GgufHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the scaling that leads to the file's divisors. Raises ModelError if it is none of Llama 3's."""
    divisors = header.read_floats("rope_freqs.weight")
    factor = round(max(divisors), 4)
    low, high, trained = LLAMA3.values()
    for index, divisor in enumerate(divisors):
        turns = trained / (2 * math.pi * theta ** (2 * index / head_dim))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(divisor, 1 / ((1 - share) / factor + share), rel_tol=1e-4):
            raise ModelError(
                f"{header.path.name} scales RoPE frequencies differently from Llama 3.1 to 3.3.",
                code="unsupported_architecture",
                hint="Provide the model as a folder with a config.json, which defines the scaling.",
            )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
