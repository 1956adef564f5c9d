"""Results of the algorithms on one block: before its codes are chosen, and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from quantcore.calibration.ranges import Activations
from quantcore.calibration.stats import Stats
from quantcore.config.layer_plan import LayerPlan
from quantcore.edges.edge import FoundEdges
from quantcore.events import Warned
from quantcore.numerics.qtensor import QTensor

Modules = dict[LayerPlan, nn.Module]


@dataclass
class Prepared:
    """What calibration learned of a block's layers, once its scales have moved for good.

    ``names`` are those of the layers in the block. ``changed``: parameters (names in the block) that have new values,
    those to be quantized among them. ``edges`` is None where no scale was moved; ``fold_error`` is how much moving them
    changed the block's update.
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
    """One layer's result: ``weight_OI`` before rounding (float, folded), its codes, and the rank that solved it."""

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
    """Layers that read the same input, and its statistics: None if few tokens came, or if they are not to be used."""

    layers: Modules
    stats: Stats | None
