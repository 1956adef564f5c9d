"""The model without its weights: every parameter on the meta device, every computed buffer (RoPE tables) real."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quantcore.errors import ModelError

UNTRUSTED_KEYS = ("auto_map", "trust_remote_code", "quantization_config")
UNTRUSTED_PREFIXES = (
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)


def clean_config(raw: dict[str, Any]) -> PretrainedConfig:
    """The Transformers config of config.json, without the keys that can make loading run foreign code.

    Raises ModelError ``unsupported_architecture`` for a model type that this Transformers does not know.
    """
    model_type = str(raw.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"Model type '{model_type}' is not known to the installed Transformers.",
            code="unsupported_architecture",
            hint="Models that bring their own code are not run. Update Transformers if the type is new.",
        )
    kept = {
        key: value for key, value in raw.items() if key not in UNTRUSTED_KEYS and not key.startswith(UNTRUSTED_PREFIXES)
    }
    config: PretrainedConfig = CONFIG_MAPPING[model_type].from_dict(kept)
    return config


def build_skeleton(raw_config: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """An evaluation-mode causal language model whose parameters hold no memory."""
    from accelerate import init_empty_weights

    config = clean_config(raw_config)
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, ZeroDivisionError, RuntimeError) as error:
        raise ModelError(
            f"Transformers cannot build this '{config.model_type}' model: {error}.",
            code="unsupported_architecture",
            hint="Check config.json; decoder-only language models are supported.",
        ) from error
    model.config.use_cache = False
    model.train(False).requires_grad_(False)
    return model


def find_block_list(model: nn.Module, prefix: str, num_blocks: int) -> nn.ModuleList:
    """The module list that ``prefix`` (``model.layers.``) names. Raises ModelError if the model is built otherwise."""
    try:
        blocks = model.get_submodule(prefix.removesuffix("."))
    except AttributeError:
        blocks = None
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != num_blocks:
        raise ModelError(
            f"The weights have {num_blocks} decoder blocks under '{prefix}', the architecture has them elsewhere.",
            code="unsupported_architecture",
            hint="Checkpoints whose tensor names differ from the Transformers module names are not supported yet.",
        )
    return blocks


def set_parameter(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put ``value`` in the place of the parameter or buffer called ``name`` (dotted)."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    if last in owner._buffers:
        owner._buffers[last] = value
    else:
        owner._parameters[last] = nn.Parameter(value, requires_grad=False)
