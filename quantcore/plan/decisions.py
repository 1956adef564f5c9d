"""Decides for every linear layer of a checkpoint how it is quantized, or why it is kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantcore.checkpoint.blocks import Blocks, is_of_tower, natural_order
from quantcore.checkpoint.experts import is_stack_of_experts
from quantcore.checkpoint.layers import find_conv1d, is_head, is_linear, is_matrix, why_not_linear
from quantcore.checkpoint.layout import TensorHeader
from quantcore.checkpoint.roles import DRAFT, SHARED, TOWER, find_roles, is_inside_draft, role_outside_blocks
from quantcore.checkpoint.shared_cache import SHARED as SHARED_CACHE
from quantcore.checkpoint.shared_cache import find_unused
from quantcore.config.kv_cache import check_kv_cache, check_whole_cache, holds_keys_or_values
from quantcore.config.layer_plan import DRAFTS, TOWERS, LayerPlan
from quantcore.config.quantization import Config, QuantizationConfig
from quantcore.errors import ConfigError

_IN_LIST = re.compile(r"\.\d+\.")
_BESIDE = {TOWER: TOWERS, DRAFT: DRAFTS}
"""The field of the config that quantizes layers of a role outside of the language model."""


@dataclass(frozen=True)
class KeptTensor:
    """A matrix that stays in high precision, and why. ``is_layer``: a linear layer, which formats list as excluded."""

    name: str
    reason: str
    is_layer: bool = True


def decide(
    config: Config, model_config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], blocks: Blocks
) -> tuple[tuple[LayerPlan, ...], tuple[KeptTensor, ...], tuple[str, ...]]:
    """Return the layers to quantize, the matrices that are kept, and warnings of patterns that match no layer.

    Raises ConfigError for quantized outputs of a layer with a float weight, for a KV cache that only some layers would
    have, and for regular expressions.
    """
    config.refuse_regular_expressions()
    layers, kept = [], []
    roles = find_roles({name: tensor.shape for name, tensor in tensors.items()})
    conv1d = {name for prefix in blocks.prefixes for name in find_conv1d(tensors, prefix)}
    unused = find_unused((name.removesuffix(".weight") for name in tensors), model_config, blocks)
    in_blocks = []
    for name, tensor in sorted(tensors.items(), key=lambda item: natural_order(item[0])):
        module = name.removesuffix(".weight")
        block = blocks.number_of(name)
        if not is_linear(name, tensor):
            if (embedding := _embedding(config, module, tensor, block)) is not None:
                layers.append(embedding)
            elif block is not None and is_matrix(tensor):
                kept.append(_kept_matrix(config, name, tensor))
            elif is_matrix(tensor) and is_of_tower(name):
                kept.append(KeptTensor(module, role_outside_blocks(module), is_layer=False))
            continue
        if module in unused:
            kept.append(KeptTensor(module, SHARED_CACHE, is_layer=False))
            continue
        kind = "Conv1D" if name in conv1d else "Linear"
        is_running = block is not None and block < len(blocks)
        if is_running:
            in_blocks.append(module)
        in_cache = is_running and holds_keys_or_values(module, tensors)
        chosen, why = config.choose(module, kind, in_cache=in_cache)
        if is_head(name) and chosen is not None:
            chosen, why = config.choose("lm_head", kind)  # under any name in the checkpoint
        shape = tensor.shape[::-1] if kind == "Conv1D" else tensor.shape
        if not is_running and (block is not None or not is_head(name)):
            role = role_outside_blocks(module) if block is None else DRAFT
            field = _BESIDE.get(role)
            beside: QuantizationConfig | None = getattr(config, field) if field is not None else None
            if field is None or beside is None or not _is_in_block(module, role):
                kept.append(KeptTensor(module, role))
            elif module in roles or chosen is None:
                kept.append(KeptTensor(module, roles.get(module, why)))
            else:
                layers.append(LayerPlan(module, None, shape, beside, kind, field))
        elif module in roles and not config.names(module):
            kept.append(KeptTensor(module, roles[module]))
        elif chosen is None:
            kept.append(KeptTensor(module, why))
        elif chosen.weight is None and chosen.output_tensors is not None:
            raise ConfigError(
                f"{module} would have quantized outputs but a float weight ({why}).",
                code="unsupported_config",
                hint="Checkpoints store activation scales only with quantized weights: set a weight spec too. Only "
                "a model in memory (ModelQuantizer) can have just quantized outputs.",
                field="/global_quant_config/weight",
            )
        elif chosen.weight is None:
            kept.append(KeptTensor(module, f"{why} has no weight spec"))
        else:
            layers.append(LayerPlan(module, block, shape, chosen, kind, why, in_cache))
    _check_found(config, layers)
    check_kv_cache(config, layers, in_blocks, model_config)
    check_whole_cache(layers, in_blocks, tensors)
    left = kept_layers(kept)
    kinds = {name: "Conv1D" if f"{name}.weight" in conv1d else "Linear" for name in left}
    kinds |= {layer.name: layer.kind for layer in layers} | {"lm_head": "Linear"}
    kinds |= {name: "Embedding" for name in config.layer_quant_config if f"{name}.weight" in tensors}  # if excluded
    if not any(map(is_head, tensors)):
        kept.append(KeptTensor("lm_head", "shares its weight with the embedding"))
    return (
        tuple(layers),
        tuple(kept),
        (*config.warn_of_unmatched(kinds), *_warn_of_unused(sorted(unused, key=natural_order))),
    )


def kept_layers(kept: Iterable[KeptTensor]) -> list[str]:
    """Return the names of the linear layers that stay in high precision."""
    return [entry.name for entry in kept if entry.is_layer]


def warn_of_layers_beside(layers: Sequence[LayerPlan]) -> Iterator[str]:
    """Yield warnings about quantized layers of towers and of draft heads."""
    if num_layers := sum(layer.is_in_tower for layer in layers):
        yield (
            f"{num_layers} layers of towers are rounded without calibration. An evaluation on text does not run "
            "them: to measure answers about images or sound, evaluate on such data, in the job or with bitfoundry "
            "evaluate --eval_dataset."
        )
    if num_layers := sum(layer.is_in_draft for layer in layers):
        yield f"{num_layers} layers of draft heads are rounded without calibration."


def _warn_of_unused(names: Sequence[str]) -> Iterator[str]:
    if names:
        yield (
            f"{len(names)} layer(s) in the files are unused, first {names[0]}: their blocks share the keys and "
            "values of an earlier one. They are not quantized."
        )


def _embedding(config: Config, module: str, tensor: TensorHeader, block: int | None) -> LayerPlan | None:
    """Return the plan of an embedding that ``layer_quant_config`` names in full; None for any other matrix.

    It is rounded as the checkpoint has it. Raises ConfigError if it would be rotated.
    """
    if block is not None or module not in config.layer_quant_config or not is_matrix(tensor):
        return None
    chosen, why = config.choose(module, "Embedding")
    if chosen is None or chosen.weight is None:
        return None
    if config.rotates_stream:
        raise ConfigError(
            f"Rotating the stream (r1) changes the embedding, but {module} is to be quantized.",
            code="cannot_rotate",
            hint="Remove rotation, use only r2, or do not quantize the embedding.",
            field="/algo_config",
        )
    return LayerPlan(module, None, tensor.shape, chosen, "Embedding", why)


def _is_in_block(module: str, role: str) -> bool:
    """Return True for a layer in a block of a tower or a draft head, and not of what leads into or out of blocks."""
    return _IN_LIST.search(module) is not None and (role != DRAFT or is_inside_draft(module))


def _check_found(config: Config, layers: Sequence[LayerPlan]) -> None:
    """Raise ConfigError if the config has a scheme for towers or for draft heads, and no layer gets it."""
    for what, field, code in (("towers", TOWERS, "no_towers"), ("draft heads", DRAFTS, "no_drafts")):
        if getattr(config, field) is not None and not any(layer.chosen_by == field for layer in layers):
            raise ConfigError(
                f"The {what} of this model are to be quantized, but no linear layers were found in blocks of {what}.",
                code=code,
                hint=f"Remove the scheme of {what}.",
                field=f"/{field}",
            )


def _kept_matrix(config: Config, name: str, tensor: TensorHeader) -> KeptTensor:
    module = name.removesuffix(".weight")
    if not is_stack_of_experts(name, tensor.shape):
        return KeptTensor(module, why_not_linear(name, tensor), is_layer=False)
    chosen, why = config.choose(module, "Linear")  # a stack of routed experts is excluded: else it had been refused
    return KeptTensor(module, why if chosen is None else SHARED)
