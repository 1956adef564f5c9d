"""Quantized and kept layers by the names of the model's modules, beside those of the checkpoint.

The two may differ: GPT-NeoX's files say ``embed_out`` where the model of Transformers has ``lm_head``, and Gemma 3's
say ``vision_tower`` where it has ``model.vision_tower``. What a ``quantization_config`` says of a layer by name,
Transformers looks up among the module names, and vLLM among names that it makes of either spelling. So both stand
there; a name that fits nothing is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from quantcore.config.layer_plan import LayerPlan
from quantcore.errors import ModelError
from quantcore.model.names import place_modules
from quantcore.model.skeleton import build_declared


def with_module_names(
    model_config: Mapping[str, Any], layers: Sequence[LayerPlan], kept: Sequence[str]
) -> tuple[tuple[LayerPlan, ...], tuple[str, ...]]:
    """``layers`` and ``kept`` with a second entry for each layer that the model of Transformers calls otherwise.

    ``kept`` also gains every linear module that no planned layer fills, whatever the plan knows of its weight: a reader
    would take it for a quantized one. Unchanged for a model that Transformers cannot build.
    """
    try:
        model = build_declared(dict(model_config))
    except ModelError:
        return tuple(layers), tuple(kept)
    places = place_modules(model, [*(layer.name for layer in layers), *kept])
    filled = {places[layer.name] for layer in layers if layer.name in places}
    renamed = [replace(layer, name=places[layer.name]) for layer in layers if layer.name in places]
    names = {layer.name for layer in layers}
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    modules = [*(places[name] for name in kept if name in places), *linears]
    return (
        (*layers, *(layer for layer in renamed if layer.name not in names)),
        tuple(dict.fromkeys((*kept, *(name for name in modules if name not in filled)))),
    )
