"""The global scale (NVFP4) that related layers share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import QuantizationSpec, ScaleType
from quantcore.engine.runtime.shards import whole
from quantcore.tensors.affine import find_global_scale


def shared_global_scales(modules: Mapping[LayerPlan, nn.Module]) -> dict[LayerPlan, torch.Tensor]:
    """Compute one global scale (float32) for the layers of a module with the same spec and number of inputs.

    Layers with other specs get none.

    Consumers compute layers that read one tensor (q, k and v, or gate and up) in one product, with one global scale:
    vLLM uses the smallest of those in the files. It is not always known here if layers read one tensor, so some share
    a scale without need. This costs nothing: an e4m3 scale has all its bits down to 2^-14 of the largest one.
    """
    scales: dict[LayerPlan, torch.Tensor] = {}
    for layers in by_global_scale(modules):
        if has_global_scale(layers[0].weight):
            weights = (whole(modules[layer].get_parameter("weight")) for layer in layers)
            scales |= dict.fromkeys(layers, global_scale(weights, layers[0].weight))
    return scales


def by_global_scale(layers: Iterable[LayerPlan]) -> list[list[LayerPlan]]:
    """Return lists of the layers that share a global scale; a layer without one is a list by itself."""
    lists: dict[object, list[LayerPlan]] = {}
    for layer in layers:
        key: object = (layer.name.rpartition(".")[0], layer.block, layer.in_features, layer.weight)
        lists.setdefault(key if has_global_scale(layer.weight) else layer.name, []).append(layer)
    return list(lists.values())


def has_global_scale(spec: QuantizationSpec) -> bool:
    return spec.scale_type is ScaleType.e4m3 and spec.over is None


def global_scale(weights: Iterable[torch.Tensor], spec: QuantizationSpec) -> torch.Tensor:
    """Compute the scale that all ``weights`` share, with one of them in memory at a time."""
    ends = torch.stack([torch.stack(torch.aminmax(weight)) for weight in weights])
    scale = find_global_scale(ends.amin().float(), ends.amax().float(), spec)
    assert scale is not None
    return scale
