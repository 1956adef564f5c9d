"""The global scale (NVFP4) of layers that belong together: one for all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from quantcore.affine import find_global_scale
from quantcore.layer import LayerPlan
from quantcore.slices import whole
from quantcore.spec import ScaleType


def shared_global_scales(modules: Mapping[LayerPlan, nn.Module]) -> dict[LayerPlan, torch.Tensor]:
    """One for the layers of a module that have one spec and as many inputs, a float32 number; other specs have none.

    Consumers compute what reads one tensor (q, k and v, or gate and up) in one product, with one global scale: vLLM
    takes the smallest of those that it finds. Whether layers do read one tensor is not always known here, so some share
    that need not. It costs nothing: an e4m3 scale has all its bits down to 2^-14 of the largest one.
    """
    families: dict[object, list[LayerPlan]] = {}
    for layer in modules:
        if layer.weight.scale_type is ScaleType.e4m3 and layer.weight.over is None:
            family = (layer.name.rpartition(".")[0], layer.block, layer.in_features, layer.weight)
            families.setdefault(family, []).append(layer)
    found: dict[LayerPlan, torch.Tensor] = {}
    for layers in families.values():
        ends = torch.stack(
            [torch.stack(torch.aminmax(whole(modules[layer].get_parameter("weight")))) for layer in layers]
        )
        scale = find_global_scale(ends.amin().float(), ends.amax().float(), layers[0].weight)
        assert scale is not None
        found |= dict.fromkeys(layers, scale)
    return found
