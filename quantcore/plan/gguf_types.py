"""Gives the tensors of a model the GGUF types that a config asks for by their role in the model. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from quantcore.checkpoint.layers import is_head
from quantcore.checkpoint.layout import TensorHeader
from quantcore.checkpoint.model_config import ModelConfig
from quantcore.checkpoint.roles import find_roles
from quantcore.config.gguf_types import EMBEDDING, GGUF_TYPES, HEAD, MIXES
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config, QuantizationConfig
from quantcore.errors import ConfigError
from quantcore.export import holds_codes
from quantcore.export.gguf.converted import converted_names
from quantcore.export.gguf.tensor_names import ARCHITECTURES, Place, Places, has_own_layout
from quantcore.plan.gguf_mixes import EMBEDDINGS, WITH_OTHER_RULES, Traits, types_in_mix

SEARCHED_BELOW_BITS = 5


def with_gguf_types(config: Config, model_config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> Config:
    """Return ``config`` with the types that ``config.gguf`` gives to tensors, as layers by name.

    A type of the embedding or the output projection comes before the layers of ``config``, a mix after them. Raises
    ConfigError for two types of one matrix, which is both in some models, and for a mix that llama.cpp's rules do not
    give one type a layer; ModelError and ConfigError for a model that llama.cpp's converter does not convert.
    """
    if config.gguf is None:
        return config
    types = {EMBEDDING: config.gguf.token_embedding_type, HEAD: config.gguf.output_type}
    is_tied = not any(map(is_head, tensors))
    if is_tied:
        types = {EMBEDDING: _of_shared(types[EMBEDDING], types[HEAD])}
    first = {name: kind for name, kind in types.items() if kind is not None}
    rest, kept = ({}, []) if config.gguf.mix is None else _in_mix(config.gguf.mix, model_config, tensors)
    layers = {name: _layer(kind, is_embedding=name == EMBEDDING) for name, kind in first.items()}
    layers |= {name: layer for name, layer in config.layer_quant_config.items() if name not in layers}
    layers |= {name: layer for name, layer in rest.items() if name not in layers}
    return replace(config, layer_quant_config=layers, exclude=(*config.exclude, *kept))


def _layer(kind: str, *, is_embedding: bool) -> QuantizationConfig:
    """Return the scheme of a type; for an embedding of few bits with the ranges of the least squared error.

    No solver comes after it there. On Gemma 3 270M's embedding these ranges take 13 % off the error of Q2_K, 9 % of
    Q3_K and 2 % of Q4_K, and nothing of types with more bits.
    """
    spec = GGUF_TYPES[kind]
    if is_embedding and spec.format.bits < SEARCHED_BELOW_BITS:
        spec = replace(spec, observer_cls="PerGroupMSEObserver")
    return QuantizationConfig(weight=spec)


@dataclass(frozen=True)
class _InFile:
    """The tensors of a GGUF file, by name, and the names of those that each tensor of the checkpoint lies in."""

    shapes: Mapping[str, Sequence[int]]
    places: Mapping[str, tuple[Place, ...]]
    traits: Traits

    @classmethod
    def of(cls, model_config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> Self:
        if has_own_layout(model_config):
            places = Places(model_config)
            found = {name: place for name in tensors if (place := places.find(name)) is not None}
            traits = _traits(model_config)
            shapes = {
                place.name: tensors[name].shape if place.index is None else (traits.num_experts, *tensors[name].shape)
                for name, place in found.items()
            }
            return cls(shapes, {name: (place,) for name, place in found.items()}, traits)
        names = converted_names(model_config, tensors)
        fields = names.fields
        heads, shared = (_first(fields[f"attention.{name}"]) for name in ("head_count", "head_count_kv"))
        per_value = heads // (shared or heads or 1) if shared != 0 else 0
        experts = int(fields["expert_count"] or 0)
        traits = Traits(fields["architecture"], int(fields["block_count"] or 0), per_value, experts)
        return cls(names.shapes, names.places, traits)


def _first(value: Any) -> int:
    """Return a number of the metadata, or that of the first layer."""
    return int((value[0] if isinstance(value, list) else value) or 0)


def _traits(config: Mapping[str, Any]) -> Traits:
    sizes = ModelConfig(config)
    heads = sizes.num_heads or 1
    per_value = heads // (sizes.num_key_value_heads or heads)
    name = ARCHITECTURES[str(config["model_type"])].name
    return Traits(name, sizes.num_layers or 0, per_value, sizes.num_experts or 0)


def _in_mix(
    mix: str, model_config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> tuple[dict[str, QuantizationConfig], list[str]]:
    """Return the schemes of a mix by the layers' names, and the names of layers that llama.cpp keeps in floats.

    Named are the embedding, layers that have not the usual type, and those that would be kept for their role.
    """
    file = _InFile.of(model_config, tensors)
    if file.traits.architecture in WITH_OTHER_RULES:
        raise _refused(mix, f"llama.cpp chooses the types of '{file.traits.architecture}' by rules of its own")
    types = types_in_mix(mix, file.shapes, file.traits)
    roles = find_roles({name: tensor.shape for name, tensor in tensors.items()})
    layers, kept = {}, []
    for name, tensor in tensors.items():
        module, stored = name.removesuffix(".weight"), [place.name for place in file.places.get(name, ())]
        if not stored or module == name or len(tensor.shape) != 2:
            continue
        kinds = {types[each] for each in stored}
        kind = kinds.pop()
        if kinds:
            raise _refused(mix, f"'{name}' lies in tensors of different types: {', '.join(stored)}")
        is_embedding = any(each in EMBEDDINGS for each in stored)
        if kind is None:
            kept += [] if module in roles else [module]
        elif kind != MIXES[mix] or is_embedding or module in roles:
            layers[HEAD if is_head(name) else module] = _layer(kind, is_embedding=is_embedding)
    return layers, kept


def _refused(mix: str, reason: str) -> ConfigError:
    return ConfigError(
        f"The named mix {mix} is not possible for this model: {reason}.",
        code="incompatible_export",
        hint=f"Give one type for all layers, such as gguf_{MIXES[mix].lower()}.",
        field="/config/preset",
    )


def warn_of_growth(
    layers: Sequence[LayerPlan], tensors: Mapping[str, TensorHeader], sizes: Mapping[str, int], before: int
) -> tuple[str, ...]:
    """Return warnings of the formats whose files would be larger (``sizes``, bytes) than the model is ``before``."""
    embedding = tensors.get(f"{EMBEDDING}.weight")
    stays_float = embedding is not None and not any(layer.is_embedding for layer in layers)
    return tuple(
        f"The {export} files ({size / 1e6:.1f} MB) will be larger than the model that they are made from"
        f" ({before / 1e6:.1f} MB)."
        + (
            f" The embedding stays in floats ({embedding.num_bytes / 1e6:.1f} MB): token_embedding_type quantizes it."
            if export == "gguf" and stays_float and embedding is not None
            else ""
        )
        for export, size in sizes.items()
        if size > before and holds_codes(export)
    )


def _of_shared(embedding: str | None, output: str | None) -> str | None:
    """Return the type of the matrix that is both embedding and output projection."""
    if embedding is not None and output is not None and embedding != output:
        raise ConfigError(
            "This model uses one matrix as embedding and as output projection, but token_embedding_type is"
            f" {embedding} and output_type is {output}.",
            code="unsupported_config",
            hint="Give only one of them.",
            field="/config/output_type",
        )
    return embedding or output
