"""Checks which layers compute the keys and values of the KV cache, and whether their outputs can be quantized.

Such a layer is called ``k_proj`` or ``v_proj``, it has one output for each channel of the key-value heads that
config.json declares, and there is no recurrence beside it. No other layer is quantized for the cache: a fused
``qkv_proj`` computes queries as well, and a cache does not hold the keys of linear attention. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from quantcore.checkpoint.model_config import ModelConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import CACHED_LAYERS, Config, is_cached
from quantcore.errors import ConfigError

_RECURRENT = ("A_log", "dt_bias", "k_conv1d.weight", "conv1d.weight")
"""Parameters that only linear attention has beside its projections: it keeps a state, no keys and values."""
NO_CACHE_HINT = "Do not quantize the KV cache (--kv_cache_dtype, kv_cache, kv_cache_quant_config)."
_ATTENTION = re.compile(r"qkv|query_key_value|c_attn|kv_|(^|_)(key|value|k|v)(_|$)", re.IGNORECASE)


def holds_keys_or_values(name: str, tensors: Collection[str]) -> bool:
    """Return whether a KV cache holds what layer ``name`` computes; ``tensors`` are the names of all tensors.

    An encoder reads its whole text at once and keeps nothing.
    """
    owner = name.rpartition(".")[0]
    is_recurrent = any(f"{owner}.{part}" in tensors for part in _RECURRENT)
    is_of_encoder = any(part.endswith("encoder") for part in name.split("."))
    return is_cached(name) and not is_recurrent and not is_of_encoder


def computes_keys(part: str) -> bool:
    """Return whether a layer with this last part of its name computes keys or values, perhaps beside queries."""
    return _ATTENTION.search(part) is not None


def check_kv_cache(
    config: Config, layers: Sequence[LayerPlan], names: Collection[str], model_config: Mapping[str, Any]
) -> None:
    """Raise ConfigError if the KV cache cannot be quantized as ``config`` says.

    ``layers`` will be quantized, ``names`` are those of all linear layers in the decoder blocks.
    """
    if not config.kv_cache_quant_config:
        return
    for name in names:
        _check_conflict(config, name)
    cached = [layer for layer in layers if is_of_cache(layer)]
    widths = ModelConfig(model_config).cache_widths
    odd = [layer for layer in cached if widths and layer.out_features not in widths]
    if odd:
        why = (
            f"{odd[0].name} has {odd[0].out_features} outputs, which does not match the key-value heads in config.json"
        )
    elif cached:
        return
    elif separate := [name for name in names if is_cached(name)]:
        why = f"no pattern of kv_cache_quant_config matches a quantized layer; {separate[0]} exists"
    else:
        parts = dict.fromkeys(name.rpartition(".")[2] for name in names)
        similar = [part for part in parts if computes_keys(part)]
        why = f"its keys and values are not outputs of separate layers ({' and '.join(CACHED_LAYERS)})"
        why += f": it has {', '.join(similar)}" if similar else ""
    raise ConfigError(
        f"The KV cache of this model cannot be quantized: {why}.",
        code="kv_cache_not_found",
        hint=NO_CACHE_HINT,
        field="/kv_cache_quant_config",
    )


def check_whole_cache(layers: Sequence[LayerPlan], names: Collection[str], tensors: Collection[str]) -> None:
    """Raise ConfigError if only a part of the keys and values is quantized: files hold one setting for all."""
    done = {layer.name for layer in layers if is_of_cache(layer)}
    left = [name for name in names if name not in done and holds_keys_or_values(name, tensors)]
    if done and left:
        raise ConfigError(
            f"The KV cache is quantized in {len(done)} layer(s) but not in {len(left)}, first {left[0]}.",
            code="kv_cache_in_part",
            hint="Files store one setting for the whole cache: match all keys and values in kv_cache_quant_config, "
            "and exclude none of them.",
            field="/kv_cache_quant_config",
        )


def is_of_cache(layer: LayerPlan) -> bool:
    """Return whether kv_cache_quant_config decided the layer's output."""
    return layer.chosen_by.startswith("kv_cache_quant_config")


def _check_conflict(config: Config, name: str) -> None:
    cache, layer = config.cache_config(name), None
    for pattern, chosen in config.layer_quant_config.items():
        if fnmatchcase(name, pattern):
            layer = pattern, chosen
            break
    if cache is None or layer is None:
        return
    for field in ("weight", "input_tensors", "bias", "output_tensors"):
        ours, theirs = (getattr(chosen, field) for _, chosen in (cache, layer))
        if ours is not None and ours != theirs and (theirs is not None or field != "output_tensors"):
            raise ConfigError(
                f"Two schemes for {field} of {name}: kv_cache_quant_config '{cache[0]}' and layer_quant_config"
                f" '{layer[0]}' differ.",
                code="conflicting_schemes",
                hint="Set only output_tensors in kv_cache_quant_config; weights and inputs then come from "
                "layer_quant_config.",
                field=f"/kv_cache_quant_config/{cache[0]}/{field}",
            )
