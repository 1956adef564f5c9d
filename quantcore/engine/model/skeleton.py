"""A model without its weights: every parameter on the meta device, every computed buffer (RoPE tables) real."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quantcore.checkpoint.blocks import Blocks
from quantcore.checkpoint.harmless import harmless_config
from quantcore.engine.model.empty import build_empty
from quantcore.engine.model.kinds import Kind, declared_class, model_class
from quantcore.engine.model.stacks import restack
from quantcore.errors import ModelError, reason_of

OUTPUT_KEYS = ("return_dict", "torchscript", "use_cache")
"""Keys that select the form in which a model returns its results, without an effect on the results."""
NOT_READ = frozenset(("transformers_version", "_name_or_path"))
"""Fields of every config class that change nothing."""


def clean_config(raw: dict[str, Any]) -> PretrainedConfig:
    """Return the Transformers config of config.json, using only fields known to be harmless.

    Raises ModelError ``unsupported_architecture`` for a model type that this Transformers does not know,
    ``config_implausible`` for values that it rejects, and ``unsafe_setting`` for text in a field that it reads and that
    is not known to be harmless.
    """
    model_type = str(raw.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"Model type '{model_type}' is not supported by the installed Transformers.",
            code="unsupported_architecture",
            hint="Models with custom code are not run. If the type is new, update Transformers; or use "
            "--file2file_quantization with a scheme that needs no data.",
        )
    harmless, left_out = harmless_config(raw)
    kept = {key: value for key, value in harmless.items() if key not in OUTPUT_KEYS}
    try:
        config: PretrainedConfig = CONFIG_MAPPING[model_type].from_dict(PretrainedConfig._decode_special_floats(kept))
        config.to_dict()  # fails on an invalid nested config
    except Exception as error:  # each class has its own checks
        raise ModelError(
            f"Transformers rejects the values in config.json: {reason_of(error)}",
            code="config_implausible",
            hint="Correct config.json, or use the one the model was published with.",
        ) from error
    for path in left_out:
        if _is_read(config, path):
            raise ModelError(
                f"config.json has text in '{'.'.join(path)}', where text is not expected. It could be a path on "
                "this machine, so it is not passed to Transformers.",
                code="unsafe_setting",
                hint=f"Correct '{path[-1]}', or remove it if the model works without it.",
            )
    return config


def _is_read(config: Any, path: Sequence[str]) -> bool:
    """Return True if ``path`` leads to a field of the config's class, or into an object that such a field holds."""
    for name in path:
        if not isinstance(config, PretrainedConfig):
            return config is not None
        if name not in {each.name for each in fields(config)} - NOT_READ:
            return False
        config = getattr(config, name, None)
    return True


EXTRA_OUTPUTS = ("output_router_logits", "output_hidden_states", "output_attentions")
"""Settings of config.json by which a model returns, and computes losses of, more than its logits."""


def build_skeleton(raw_config: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """Return an evaluation-mode model, with its towers, whose parameters use no memory. Raises ModelError."""
    config = clean_config(raw_config)
    built, _ = model_class(config, raw_config)
    try:
        model: PreTrainedModel = build_empty(
            lambda: built._from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        )
    except Exception as error:  # the model's own code runs, with the values of config.json
        raise ModelError(
            f"Transformers cannot build this '{config.model_type}' model: {reason_of(error)}",
            code="unsupported_architecture",
            hint="Check config.json.",
        ) from error
    restack(model)
    model.config.use_cache = False
    for part in (model.config, model.config.get_text_config(decoder=True)):
        for name in EXTRA_OUTPUTS:
            if getattr(part, name, False):  # a checkpoint of a training run may ask for them
                setattr(part, name, False)
    model.train(False).requires_grad_(False)
    return model


def kind_of(raw_config: dict[str, Any]) -> Kind:
    """Return the task of a model with this config. Raises ModelError as ``clean_config`` and ``model_class``."""
    return model_class(clean_config(raw_config), raw_config)[1]


def build_declared(raw_config: dict[str, Any]) -> PreTrainedModel:
    """Return the model that ``from_pretrained`` of ``declared_class`` would fill, its parameters without memory.

    Raises ModelError ``unsupported_architecture`` for one that Transformers does not know or cannot build.
    """
    config, kind = clean_config(raw_config), declared_class(raw_config)
    try:
        build = kind.from_config if kind is AutoModelForCausalLM else kind._from_config
        model: PreTrainedModel = build_empty(lambda: build(config), include_buffers=True)
    except Exception as error:  # the model's own code runs, and may need packages that are not installed
        raise ModelError(
            f"Transformers cannot build this '{config.model_type}' model: {reason_of(error)}",
            code="unsupported_architecture",
            hint="Check config.json.",
        ) from error
    return model


def find_block_lists(model: nn.Module, placed: Mapping[str, str], blocks: Blocks) -> tuple[Blocks, list[nn.ModuleList]]:
    """Return the blocks by the model's own names, and its module lists of them.

    ``blocks`` has the checkpoint's names; ``placed`` is the result of ``place_tensors``. Raises ModelError if the model
    has another structure.
    """
    found = [_find_list(model, placed, prefix, length) for prefix, length in blocks.lists]
    return Blocks(tuple((f"{name}.", len(modules)) for name, modules in found)), [modules for _, modules in found]


def _find_list(model: nn.Module, placed: Mapping[str, str], prefix: str, length: int) -> tuple[str, nn.ModuleList]:
    first = next((placed[name] for name in placed if name.startswith(f"{prefix}0.")), "")
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == length and first.startswith(f"{name}.0."):
            return name, module
    raise ModelError(
        f"The weights have {length} blocks under '{prefix}', but the architecture has them elsewhere.",
        code="unsupported_architecture",
        hint="The checkpoint and its config.json do not match.",
    )


def towers_of(model: PreTrainedModel, blocks: Blocks) -> dict[str, PreTrainedModel]:
    """Return the models inside ``model`` that do not hold its ``blocks``, such as a vision tower."""
    towers: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        is_inside = name.startswith(tuple(f"{tower}." for tower in towers))
        holds_blocks = any(prefix.startswith(f"{name}.") for prefix in blocks.prefixes)
        if name and isinstance(module, PreTrainedModel) and not holds_blocks and not is_inside:
            towers[name] = module
    return towers


def float32_names(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a test for parameters that stay float32 in a model of ``dtype``, as in ``from_pretrained``."""
    patterns = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def fill_computed(model: PreTrainedModel, name: str, device: torch.device) -> bool:
    """Give the parameter ``name`` the values that the model's code computes for it, such as a table of positions.

    Returns False if the class does not say that checkpoints lack the parameter, or if its values are random.
    """
    patterns = [*(model._keys_to_ignore_on_save or ()), *(model._keys_to_ignore_on_load_missing or ())]
    if not any(re.search(pattern, name) for pattern in patterns):
        return False
    owner, like = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
    made = []
    for seed in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            set_parameter(model, name, torch.zeros(like.shape, dtype=like.dtype, device=device))
            model._init_weights(owner)  # type: ignore[no-untyped-call]
        made.append(model.get_parameter(name))
    return torch.equal(*made)


def set_parameter(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put ``value`` in the place of the parameter or buffer called ``name`` (dotted)."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    if last in owner._buffers:
        owner._buffers[last] = value
    else:
        owner._parameters[last] = nn.Parameter(value, requires_grad=False)
