"""Names of quantized and kept layers by the model's modules, in addition to the checkpoint's names.

The two may differ: ``embed_out`` in GPT-NeoX's files is ``lm_head`` in the model of Transformers, and ``vision_tower``
in Gemma 3's files is ``model.vision_tower``. Transformers looks up layers of a ``quantization_config`` among the module
names, vLLM among names derived from either spelling. So both names are written; readers ignore a name that matches
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from quantcore.checkpoint.shared_cache import missing_siblings
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.model.parameter_names import place_modules
from quantcore.engine.model.skeleton import build_declared
from quantcore.errors import ModelError


def with_module_names(
    model_config: Mapping[str, Any], layers: Sequence[LayerPlan], kept: Sequence[str]
) -> tuple[tuple[LayerPlan, ...], tuple[str, ...]]:
    """Return ``layers`` and ``kept`` with a second entry for each layer whose module has another name.

    ``kept`` also gains every linear module that no planned layer fills, even if the plan does not know its weight: a
    reader would treat it as quantized. Both are returned without that for a model that Transformers cannot build.
    Layers that a runtime fuses get the names that the model lacks, see ``missing_siblings``.
    """
    layers, kept = _with_siblings(model_config, layers, kept)
    try:
        model = build_declared(dict(model_config))
    except ModelError:
        return layers, kept
    places = place_modules(model, [*(layer.name for layer in layers), *kept])
    filled = {place for layer in layers for place in places.get(layer.name, ())}
    renamed = [replace(layer, name=place) for layer in layers for place in places.get(layer.name, ())]
    names = {layer.name for layer in layers}
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    modules = [*(place for name in kept for place in places.get(name, ())), *linears]
    return (
        (*layers, *(layer for layer in renamed if layer.name not in names)),
        tuple(dict.fromkeys((*kept, *(name for name in modules if name not in filled)))),
    )


def _with_siblings(
    model_config: Mapping[str, Any], layers: Sequence[LayerPlan], kept: Sequence[str]
) -> tuple[tuple[LayerPlan, ...], tuple[str, ...]]:
    planned = {layer.name: layer for layer in layers}
    more_kept = []
    for name, like in missing_siblings((*planned, *kept), model_config):
        if like in planned:
            planned[name] = replace(planned[like], name=name, config=replace(planned[like].config, output_tensors=None))
        else:
            more_kept.append(name)
    return tuple(planned.values()), (*kept, *more_kept)
