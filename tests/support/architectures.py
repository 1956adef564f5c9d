"""The checkpoints of every architecture in Transformers, as names and shapes: no weight is allocated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import transformers
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
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quantcore.checkpoint.experts import unstack_experts
from quantcore.checkpoint.layout import TensorHeader

TASKS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers")
NUMS_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MAX_EXPERTS = 16

MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
MROPE_OF_GLM = {
    "head_dim": 128,
    "rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3, "num_hidden_layers": 6},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "glm46v": {"text_config": MROPE_OF_GLM},
    "glm4v": {"text_config": MROPE_OF_GLM},
    "glm4v_moe": {"text_config": {**MROPE_OF_GLM, "hidden_size": 6144}},
    "glm_ocr": {"text_config": MROPE_OF_GLM},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "paddleocr_vl": {"text_config": MROPE},
    "qwen2_5_omni_thinker": {"text_config": MROPE},
    "qwen2_5_vl": {"text_config": MROPE},
    "qwen2_vl": {"text_config": MROPE},
    "qwen3_omni_moe_thinker": {"text_config": {"hidden_size": 2048, "num_attention_heads": 32}},
    "reformer": {"is_decoder": True},
}
"""Values that the default configs of these types lack for a model to be built."""

WHOLE = ("zamba", "gemma3n_text", "prophetnet")
"""Types whose blocks are tied to one another, or whose depth cannot be set."""


@dataclass(frozen=True)
class Outline:
    """A model without weights: ``config`` as in config.json, ``tensors`` as in a checkpoint, ``model`` on meta device.

    ``fills``: the parameter of ``model`` that each tensor fills, or fills a part of, by Transformers' own table.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorHeader]
    model: PreTrainedModel
    fills: dict[str, str]

    def owner(self, name: str) -> nn.Module:
        """Return the module whose parameter the tensor called ``name`` fills."""
        return self.model.get_submodule(self.fills[name].rpartition(".")[0])


def model_classes() -> dict[str, str]:
    """Return the names of Transformers' classes for text, each with the type of its model."""
    classes: dict[str, str] = {}
    for task in TASKS:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                classes.setdefault(name, model_type)
    return classes


def outline(class_name: str, model_type: str, depth: int = 6, tower_depth: int = 7) -> Outline:
    """Return what ``save_pretrained`` writes of a model of this class with ``depth`` blocks, in default widths."""
    model_class: type[PreTrainedModel] = getattr(transformers, class_name)
    config = CONFIG_MAPPING[model_type](**OVERRIDES.get(model_type, {}))
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    if model_type not in WHOLE:
        shrink(config, depth, tower_depth)
    with torch.device("meta"), no_init_weights():
        model = model_class(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    stored = {name: _header(tensor) for name, tensor in revert_weight_conversion(model, dict(state)).items()}
    filled = places(model, list(stored))
    tensors = unstack_experts(stored)
    fills = {name: filled[name if header.stack is None else header.stack.name] for name, header in tensors.items()}
    return Outline(json.loads(config.to_json_string()), tensors, model, fills)


def shrink(config: PretrainedConfig, depth: int, tower_depth: int) -> None:
    """Lower the numbers of blocks (also of vision and audio towers) and experts; cut lists with an entry per block."""
    for field in NUMS_EXPERTS:
        if isinstance(before := vars(config).get(field), int) and before > MAX_EXPERTS:
            setattr(config, field, MAX_EXPERTS)
    is_tower = any(
        part in config.model_type for part in ("vision", "audio", "speech", "clip", "siglip", "vit", "encoder")
    )
    wanted = tower_depth if is_tower else depth
    for field in DEPTHS:
        before = getattr(config, field, None)
        if isinstance(before, int) and before > wanted:
            setattr(config, field, wanted)
            for name, value in list(vars(config).items()):
                if isinstance(value, list | tuple) and len(value) == before:
                    setattr(config, name, value[:wanted])
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PretrainedConfig):
            shrink(inner, depth, tower_depth)


def _header(tensor: torch.Tensor) -> TensorHeader:
    dtype = "BF16" if tensor.is_floating_point() else "I64"
    return TensorHeader(dtype, tuple(tensor.shape), "model.safetensors", 0, 2 * tensor.numel())


def places(model: PreTrainedModel, stored: list[str]) -> dict[str, str]:
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    state = model.state_dict()
    renamed = {
        name: rename_source_key(name, renamings, converters, model.base_model_prefix, state)[0] for name in stored
    }
    return {name: name if place not in state and name in state else place for name, place in renamed.items()}
