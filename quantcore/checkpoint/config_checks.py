"""Checks the numbers in config.json against limits and against the headers of the weights.

Memory is allocated and divisions are made by these numbers long before a weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantcore.checkpoint.layout import TensorHeader
from quantcore.errors import ModelError

LARGEST = {
    "hidden_size": 1 << 20, "n_embd": 1 << 20, "intermediate_size": 1 << 24, "vocab_size": 1 << 24,
    "num_hidden_layers": 10_000, "n_layer": 10_000, "num_attention_heads": 1 << 16, "n_head": 1 << 16,
    "num_key_value_heads": 1 << 16, "head_dim": 1 << 16, "max_position_embeddings": 1 << 31, "num_labels": 1 << 20,
}  # fmt: skip
"""Upper limits, far above those of any existing model."""

OTHER_HEADS = ("head_dim", "kv_lora_rank", "d_kv", "qk_nope_head_dim")
"""Fields that set the width of a head, so that it is not the hidden size over the number of heads."""


def check_config(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> None:
    """Raise ModelError ``config_implausible`` that names the field at fault.

    Absent fields and lists with a value per layer are not checked.
    """
    for field in ("text_config", "quantization_config"):
        if not isinstance(config.get(field) or {}, dict):
            raise _implausible(f"{field} is {str(config[field])[:40]}; it must be an object")
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            _check_numbers(part)
            _check_heads(part)
    _check_shapes(config, tensors)


def _check_numbers(config: Mapping[str, Any]) -> None:
    for field, most in LARGEST.items():
        value = config.get(field)
        if field == "head_dim" and value == 0 and any(config.get(name) for name in OTHER_HEADS[1:]):
            continue  # latent attention (GLM-5-Next) has widths of its own
        is_whole = type(value) is int
        if field == "max_position_embeddings" and type(value) is float:
            is_whole = value.is_integer()  # the default of Music Flamingo is 1200.0
        if value is not None and not isinstance(value, list) and not (is_whole and 0 < value <= most):
            raise _implausible(f"{field} is {str(value)[:40]}; it must be a whole number from 1 to {most}")


def _check_heads(config: Mapping[str, Any]) -> None:
    hidden, heads, groups = (config.get(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if not isinstance(heads, int):
        return
    if isinstance(hidden, int) and hidden % heads and not any(config.get(name) for name in OTHER_HEADS):
        raise _implausible(f"hidden_size {hidden} is not divisible by num_attention_heads {heads}")
    if isinstance(groups, int) and heads % groups:
        raise _implausible(f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")


def _check_shapes(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> None:
    hidden, vocabulary = config.get("hidden_size"), config.get("vocab_size")
    sides = {side for tensor in tensors.values() for side in tensor.shape}
    if isinstance(hidden, int) and sides and hidden not in sides:
        raise _implausible(f"hidden_size is {hidden}, but no weight has a dimension of that size")
    if isinstance(vocabulary, int) and sides and vocabulary > max(sides):
        raise _implausible(f"vocab_size is {vocabulary}, but the largest dimension of a weight is {max(sides)}")


def _implausible(what: str) -> ModelError:
    return ModelError(
        f"config.json is implausible: {what}.",
        code="config_implausible",
        hint="The weights and config.json do not match, or one of them is damaged.",
    )
