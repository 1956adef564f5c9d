"""The models that mlx-lm has a class for, and config.json as these classes read it.

``mlx_models.json`` is made from mlx-lm's sources by tests/consumers/mlx_model_types.py; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantcore.checkpoint.experts import is_in_stack
from quantcore.checkpoint.layers import is_head
from quantcore.checkpoint.model_config import ModelConfig


@dataclass(frozen=True)
class MlxModel:
    """A class of mlx-lm: the settings that it takes from config.json, and what else its sources say.

    ``ties``: its output projection may be the embedding. ``stacks``: it stacks experts that are stored one by one,
    codes and scales included.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    ties: bool
    stacks: bool

    def takes(self, setting: str) -> bool:
        return setting in self.required or setting in self.optional


_TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
VERSION: str = _TABLE["version"]
"""The version of mlx-lm with these classes."""
MODELS = {
    name: MlxModel(tuple(entry["required"]), tuple(entry["optional"]), entry["ties"], entry["stacks"])
    for name, entry in _TABLE["models"].items()
}
OTHER_NAMES = {
    "falcon_h1": "its class multiplies weights when it loads them, which codes do not allow",
    "gpt_oss": "its class takes experts only in the stacks of the published checkpoint",
    "nanochat": "its class takes other names of tensors than Transformers",
}
"""Why a class does not load what is written here, as the end of a sentence."""
TAKE_STACKS = ("granitemoe", "qwen3_moe")
"""The classes that stack only floats, but take the stacks of codes that mlx-lm itself saves."""
PARTIAL, SCALING, PATTERN = "partial_rotary_factor", "rope_scaling", "sliding_window_pattern"
NEUTRAL: dict[str, tuple[Any, ...]] = {PARTIAL: (None, 1.0), SCALING: (None, {"rope_type": "default"})}
"""The values of a setting that are the same as if a class does not have it."""
FULL, SLIDING = "full_attention", "sliding_attention"


def earlier_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``config`` that Transformers 5 has renamed, under the names that mlx-lm's class reads.

    These are what ``rope_parameters``, ``layer_types`` and ``num_local_experts`` say, of a nested config as well.
    Settings that ``config`` has already are left out.
    """
    model = MODELS.get(str(config.get("model_type")))
    found = {
        name: value
        for name, value in _earlier_names(config).items()
        if model is None or (model.takes(name) and (name in model.required or not model.takes("rope_parameters")))
    }
    if isinstance(nested := config.get("text_config"), Mapping):
        found["text_config"] = {**nested, **earlier_names(nested)}
    return found


def _earlier_names(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    by_type = {name: own for name, own in rope.items() if isinstance(own, Mapping)}
    found = _of_rope(by_type.get(FULL, {}) if by_type else rope)
    if "rope_theta" in by_type.get(SLIDING, {}):
        found["rope_local_base_freq"] = by_type[SLIDING]["rope_theta"]
    kinds = config.get("layer_types") or []
    if SLIDING in kinds and FULL in kinds:
        found[PATTERN] = kinds.index(FULL) + 1
    if "num_local_experts" in config:
        found["num_experts"] = config["num_local_experts"]
    return {name: value for name, value in found.items() if name not in config}


def _of_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one kind of rotary embedding; Transformers takes ``rope_scaling`` for all of them."""
    found = {name: rope[name] for name in ("rope_theta", PARTIAL) if name in rope}
    return {**found, SCALING: None if rope.get("rope_type", "default") == "default" else dict(rope)} if rope else {}


def takes_stacks(config: Mapping[str, Any]) -> bool:
    """Return True if experts must be stored in stacks for the class (see ``checkpoint.switched_experts``)."""
    return config.get("model_type") in TAKE_STACKS


def why_not_loaded(config: Mapping[str, Any], tensors: Collection[str]) -> str | None:
    """Return why mlx-lm does not load a model with this config.json and these tensors; None if no reason is known.

    It is the end of a sentence.
    """
    model_type = str(config.get("model_type"))
    model = MODELS.get(model_type)
    if model is None:
        return f"mlx-lm {VERSION} has no class for model_type '{model_type}'"
    if model_type in OTHER_NAMES:
        return OTHER_NAMES[model_type]
    stacks = model.stacks or takes_stacks(config)
    if not stacks and any(is_in_stack(name.removesuffix(".weight")) for name in tensors):
        return f"mlx-lm's class for {model_type} does not stack the codes of experts"
    if not model.ties and not any(map(is_head, tensors)):
        return f"mlx-lm's class for {model_type} needs an output projection of its own, which this model does not have"
    read = {**config, **earlier_names(config)}
    if missing := [name for name in model.required if name not in read]:
        return f"mlx-lm's class for {model_type} needs {', '.join(missing)} in config.json"
    sizes = ModelConfig(config)
    usual = (sizes.hidden_size or 0) // (sizes.num_heads or 1)
    if not model.takes("head_dim") and sizes.head_dim not in (None, usual) and "kv_lora_rank" not in sizes.text:
        return f"mlx-lm's class for {model_type} has heads of {usual} channels, but head_dim is {sizes.head_dim}"
    for name, value in {**config, **_earlier_names(config)}.items():
        if name in NEUTRAL and value not in NEUTRAL[name] and not (model.takes(name) or model.takes("rope_parameters")):
            return f"mlx-lm's class for {model_type} does not know {name}, which is {value!r} in config.json"
    return _other_pattern(model, read)


def _other_pattern(model: MlxModel, config: Mapping[str, Any]) -> str | None:
    """Return why a class does not take the order of layers with sliding windows and without; None if it does."""
    kinds = config.get("layer_types") or []
    if SLIDING not in kinds:
        return None
    if FULL not in kinds and (model.takes(PATTERN) or model.takes("layer_types")):
        return f"mlx-lm needs a layer of the kind {FULL}, and layer_types has none"
    every = config.get(PATTERN)
    if model.takes("layer_types") or not model.takes(PATTERN) or every is None:
        return None
    if kinds != [SLIDING if index % every else FULL for index in range(1, len(kinds) + 1)]:
        return f"mlx-lm needs {FULL} in every n-th layer, but layer_types is {', '.join(kinds)}"
    return None
