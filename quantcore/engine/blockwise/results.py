"""Results of the algorithms on one block: before its codes are chosen, and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.calibration.ranges import Activations
from quantcore.engine.calibration.stats import Stats
from quantcore.engine.transforms.mappings.scale_pair import FoundEdges
from quantcore.events import Warned
from quantcore.tensors.qtensor import QTensor

Modules = dict[LayerPlan, nn.Module]


@dataclass
class Prepared:
    """The result of calibration for a block's layers, after its scales have moved.

    ``names`` are those of the layers in the block. ``changed``: parameters (names in the block) with new values,
    including those that will be quantized. ``edges`` is None if no scale was moved; ``fold_error`` is the change of the
    block's update by moving scales.
    """

    stats: dict[LayerPlan, Stats]
    activations: dict[LayerPlan, Activations]
    names: dict[LayerPlan, str] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    warnings: list[Warned] = field(default_factory=list)
    edges: FoundEdges | None = None
    fold_error: float | None = None


@dataclass(frozen=True)
class Solved:
    """The result of a layer: ``weight_OI`` before rounding (float, folded), its codes, and the rank that solved it."""

    layer: LayerPlan
    weight_OI: torch.Tensor
    quantized: QTensor
    stats: Stats | None
    owner: int = 0

    @cached_property
    def restored_OI(self) -> torch.Tensor:
        """The dequantized weight, float32."""
        return self.quantized.dequantize()


@dataclass(frozen=True)
class Group:
    """Layers that read the same input, and its statistics: None after few tokens, or if they must not be used."""

    layers: Modules
    stats: Stats | None
