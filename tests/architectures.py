"""The checkpoints of every architecture that Transformers has, as names and shapes: no weight is allocated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import no_init_weights

from quantcore.checkpoint.experts import unstack_experts
from quantcore.checkpoint.layout import TensorHeader

DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers")


@dataclass(frozen=True)
class Outline:
    """``config`` as config.json holds it, ``tensors`` as read from a checkpoint, ``model`` on the meta device.

    ``fills``: the parameter of ``model`` that each stored tensor fills, or fills a part of; Transformers' mapping of
    names says so.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorHeader]
    model: PreTrainedModel
    fills: dict[str, str]

    def owner(self, name: str) -> nn.Module:
        """The module that owns the parameter of the stored tensor called ``name``."""
        return self.model.get_submodule(self.fills[name].rpartition(".")[0])


def shrink(config: PretrainedConfig, depth: int, vision_depth: int | None = None) -> PretrainedConfig:
    """Set the number of blocks of ``config`` and of the configs inside it; widths stay those of the default."""
    tower = any(word in config.model_type for word in ("vision", "audio", "speech", "clip", "siglip", "vit", "encoder"))
    wanted = depth if vision_depth is None or not tower else vision_depth
    for field in DEPTHS:
        before = getattr(config, field, None)
        if isinstance(before, int) and before > wanted:
            setattr(config, field, wanted)
            for name, value in list(vars(config).items()):
                if isinstance(value, list | tuple) and len(value) == before and name not in config.sub_configs:
                    setattr(config, name, value[:wanted])
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PretrainedConfig):
            shrink(inner, depth, vision_depth)
    return config


def outline(model_class: type[PreTrainedModel], config: PretrainedConfig) -> Outline:
    """What ``save_pretrained`` would write of a model of ``model_class``."""
    with torch.device("meta"), no_init_weights():
        model = model_class(config)
    tied = set(model.all_tied_weights_keys)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    stored = revert_weight_conversion(model, dict(state))
    tensors = {name: _header(tensor) for name, tensor in stored.items()}
    saved = json.loads(model.config.to_json_string())
    return Outline(saved, unstack_experts(tensors), model, _fills(model, tensors))


def _header(tensor: torch.Tensor) -> TensorHeader:
    dtype = "BF16" if tensor.is_floating_point() else "I64"
    return TensorHeader(dtype, tuple(tensor.shape), "model.safetensors", 0, 2 * tensor.numel())


def _fills(model: PreTrainedModel, tensors: Mapping[str, TensorHeader]) -> dict[str, str]:
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    state = model.state_dict()
    fills = {}
    for name, header in tensors.items():
        place, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        for part in unstack_experts({**tensors}) if False else (name,):
            fills[part] = place
    return fills
