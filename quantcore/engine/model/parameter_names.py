"""Maps the tensors of a checkpoint to the parameters of the model that Transformers builds.

The names often differ: ``block_sparse_moe.experts.0.w1.weight`` in Mixtral's files goes to ``mlp.experts.gate_up_proj``
in the model. Transformers has the tables (``transformers/conversion_mapping.py``) and the matching
(``transformers/core_model_loading.py``); both are used here as in ``from_pretrained``, so there are no tables of ours
to maintain. Tensors that only change their name are placed, and so are the experts' matrices, in the model whose
experts are split (``quantcore.engine.model.experts``). Parameters that no layer is quantized for, such as the kernels
of convolutions, may also be assembled from several tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Interleave,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from quantcore.checkpoint.blocks import Blocks
from quantcore.engine.model.experts import Form, ProjectionNames, is_fused
from quantcore.errors import ModelError

FROM_FILE_TO_FILE = "Quantize it from file to file (--file2file_quantization), with a scheme that needs no data."
_EXPERT = re.compile(r"^(.*)\.(\d+)\.([^.]+)\.(weight|bias)$")
_PER_EXPERT = re.compile(r"\*\.([^.]+)\.weight$")  # in a source pattern: experts.*.w1.weight
_ROLES = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}


def place_tensors(
    model: PreTrainedModel, stored: Iterable[str], transforms: Sequence[WeightTransform] | None = None
) -> dict[str, str]:
    """Return the parameter or buffer of ``model`` (its experts split) that each of the ``stored`` tensors fills.

    ``transforms`` replace those that Transformers has for the model's class.
    Tensors without a place in the model are left out, as in Transformers: masks, RoPE tables, blocks for multi-token
    prediction, and tensors whose values would have to be rearranged.
    """
    state = model.state_dict()
    fused = {name: len(part.get_parameter("down_proj")) for name, part in model.named_modules() if is_fused(part)}
    placed: dict[str, str] = {}
    in_stacks: dict[str, list[str]] = {}
    for name, renamed, pattern in _renamed(model, stored, state, transforms):
        if pattern is None and renamed in state:
            placed[name] = renamed
        elif expert := _EXPERT.match(name if pattern else renamed):
            experts = renamed.rpartition(".")[0] if pattern else expert[1]
            if experts in fused:
                placed[name] = ".".join((*_expert_of(fused, experts, int(expert[2])), *expert.groups()[2:]))
            elif own := _EXPERT.match(name):  # Step 3.7 has other names for a stack and for the module of the experts
                in_stacks.setdefault(f"{own[1].rpartition('.')[0]}.{own[3]}.{own[4]}", []).append(name)
    for stack, renamed, _ in _renamed(model, in_stacks, state, transforms):
        experts = renamed.rpartition(".")[0]
        if experts in fused:
            placed |= {name: f"{experts}.{name.split('.experts.')[-1]}" for name in in_stacks[stack]}
    return placed


def _expert_of(fused: Mapping[str, int], experts: str, index: int) -> tuple[str, str]:
    """Return the module of an expert and its name in there. ``fused``: the modules, with their numbers of experts.

    Where a checkpoint has more experts than ``experts``, the others are in the modules beside it: ERNIE 4.5 VL numbers
    those for text and those for images together.
    """
    place, beside = index, [name for name in fused if name.rsplit(".", 2)[0] == experts.rsplit(".", 2)[0]]
    for name in beside if index >= fused[experts] else ():
        if place < fused[name]:
            return name, str(place)
        place -= fused[name]
    return experts, str(index)


@dataclass(frozen=True)
class Conversion:
    """A conversion by which Transformers makes the parameters ``targets`` out of the stored tensors ``sources``.

    ``patterns`` are those of the sources in Transformers' table.
    """

    model: PreTrainedModel
    sources: tuple[str, ...]
    patterns: tuple[str, ...]
    targets: tuple[str, ...]
    converter: WeightConverter

    def read(self, target: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the value of a parameter; ``read`` returns a stored tensor."""
        converter = deepcopy(self.converter)
        for name, pattern in zip(self.sources, self.patterns, strict=True):
            converter.add_tensor(target, name, pattern, read(name))  # type: ignore[arg-type]  # as when it saves
        value = converter.convert(self.targets[0], model=self.model, config=self.model.config)[target]
        result: torch.Tensor = value[0] if isinstance(value, list) else value
        return result


def find_conversions(model: PreTrainedModel, stored: Iterable[str], placed: Mapping[str, str]) -> list[Conversion]:
    """Return the conversions of those ``stored`` tensors that are not ``placed`` (see ``place_tensors``)."""
    state, transforms = model.state_dict(), get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in reversed(converters) for pattern in converter.source_patterns}
    parts: dict[str, list[tuple[str, str]]] = {}
    for name, renamed, pattern in _renamed(model, stored, state):
        if pattern is not None and name not in placed and renamed in state:
            parts.setdefault(renamed, []).append((pattern, name))
    conversions = []
    for renamed, pairs in parts.items():
        converter = by_pattern[pairs[0][0]]
        order = converter.source_patterns.index
        patterns, names = zip(*sorted(pairs, key=lambda pair: order(pair[0])), strict=True)
        first, *others = converter.target_patterns
        targets = (renamed, *(renamed.replace(first, other) for other in others))
        conversions.append(Conversion(model, names, patterns, targets, converter))
    return conversions


def find_assembled(
    model: PreTrainedModel, conversions: Iterable[Conversion], placed: Mapping[str, str]
) -> dict[str, Conversion]:
    """Return the parameters of ``model`` that a conversion makes and that no layer is quantized for.

    ``placed`` has the tensors that need no conversion. The weights of linear layers, as the files have them, and of
    experts do not count.
    """
    assembled: dict[str, Conversion] = {}
    for conversion in conversions:
        owners = [model.get_submodule(target.rpartition(".")[0]) for target in conversion.targets]
        are_weights = any(source.endswith(".weight") for source in conversion.sources)  # and not ``in_proj_weight``
        is_layer = any((isinstance(owner, nn.Linear) and are_weights) or is_fused(owner) for owner in owners)
        if not is_layer and placed.keys().isdisjoint(conversion.sources):
            assembled |= dict.fromkeys(conversion.targets, conversion)
    return assembled


def untie_stored(model: PreTrainedModel, placed: Iterable[str]) -> None:
    """Tie no two parameters of ``model`` that the checkpoint holds both; ``placed`` are those that it fills.

    ``from_pretrained`` unties them if their values differ; equal ones compute the same, tied or not. From now on call
    ``tie_weights(recompute_mapping=False)``: by default it reads config.json again.
    """
    filled = set(placed)
    for name, source in list(model.all_tied_weights_keys.items()):
        if name in filled and source in filled:
            del model.all_tied_weights_keys[name]


def check_shares_nothing(model: PreTrainedModel, blocks: Blocks) -> None:
    """Raise ModelError if a block uses weights of another; ``blocks`` have the model's own names."""
    for name, source in sorted(model.all_tied_weights_keys.items()):
        if name.startswith(blocks.prefixes) and source.startswith(blocks.prefixes):
            raise ModelError(
                f"Blocks of this model share weights: '{name}' is '{source}'. Running it block by block is not "
                "supported.",
                code="unsupported_architecture",
                hint=FROM_FILE_TO_FILE,
            )


def check_not_rearranged(
    model: PreTrainedModel,
    stored: Iterable[str],
    placed: Mapping[str, str],
    assembled: Iterable[str],
    towers: Iterable[str] = (),
) -> None:
    """Raise ModelError if Transformers makes the weight of a layer of ``model`` out of several ``stored`` tensors.

    Stacked experts and ``assembled`` parameters are allowed. Other such tensors are not ``placed`` (see
    ``place_tensors``). Parameters of the modules called ``towers`` do not count: they are not run.
    """
    ignored = tuple(f"{tower}." for tower in towers)
    filled = {*placed.values(), *assembled}
    split = {f"{name.rsplit('.', 3)[0]}." for name in filled if _EXPERT.match(name)}
    others = (name for name in model.state_dict() if not name.startswith(ignored))
    names = [name for name in others if name not in filled and name not in model.all_tied_weights_keys]
    empty = [name for name in names if f"{name.rpartition('.')[0]}." not in split]
    if not empty:
        return
    parts: dict[str, list[str]] = {}
    for name, renamed, _ in _renamed(model, stored, model.state_dict()):
        if name not in placed:
            parts.setdefault(renamed, []).append(name)
    made = next((name for name in empty if name in parts), None)
    if made is not None:
        raise ModelError(
            f"Transformers builds '{made}' from stored tensors of other shapes ('{parts[made][0]}'). Running such a "
            "model is not supported.",
            code="unsupported_architecture",
            hint=FROM_FILE_TO_FILE,
        )


def _renamed(
    model: PreTrainedModel,
    stored: Iterable[str],
    state: dict[str, Any],
    transforms: Sequence[WeightTransform] | None = None,
) -> Iterator[tuple[str, str, str | None]]:
    """Yield each stored tensor, its parameter, and the pattern if it fills that one only together with others."""
    transforms = get_model_conversion_mapping(model) if transforms is None else transforms
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        yield name, renamed, pattern


def place_modules(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the modules of ``model`` (its experts split) for the weight of each layer, by the layer's stored name.

    ``stored`` are names of layers. A layer whose weight becomes a part of a larger one maps to that one's module, one
    whose weight is cut to the modules of its parts; a layer without a place in the model is left out.
    """
    weights = {f"{name}.weight": name for name in stored}
    placed = place_tensors(model, weights)
    places: dict[str, tuple[str, ...]] = {name: (place,) for name, place in placed.items()}
    for conversion in find_conversions(model, weights, placed):
        places |= dict.fromkeys(conversion.sources, conversion.targets)
    return {weights[name]: tuple(place.rpartition(".")[0] for place in found) for name, found in places.items()}


def stores_single_experts(model: PreTrainedModel) -> bool:
    """Return whether checkpoints of this kind of model hold each expert's matrices singly; else they hold stacks."""
    sources = (source for transform in get_model_conversion_mapping(model) for source in transform.source_patterns)
    return any(_PER_EXPERT.search(source) for source in sources)


def projection_names(model: PreTrainedModel) -> ProjectionNames:
    """Return the names of an expert's projections in checkpoints of this kind; the common ones by default."""
    if any(is_fused(module) and not Form.of(module).is_concatenated for module in model.modules()):
        return ProjectionNames(gate=None, up="gate_up_proj")
    names: dict[str, str] = {}
    for transform in get_model_conversion_mapping(model):
        if transform.target_patterns[0].endswith("experts.gate_up_proj") and _alternates(transform):
            return ProjectionNames(gate=None, up="gate_up_proj")
        leaves = [match[1] for source in transform.source_patterns if (match := _PER_EXPERT.search(source))]
        target = transform.target_patterns[0].rpartition(".")[2]
        names |= dict(zip(_ROLES.get(target, ()), leaves, strict=False))
    return ProjectionNames(**names)


def _alternates(transform: object) -> bool:
    """Return True if a conversion takes apart rows that alternate (Inkling's gate and up)."""
    operations = transform.operations if isinstance(transform, WeightConverter) else []
    return any(isinstance(operation, Interleave) for operation in operations)
