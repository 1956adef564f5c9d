"""Round to nearest: every value takes the nearest code of the range that the spec's observer finds."""

from __future__ import annotations

import torch

from quantcore.affine import find_params
from quantcore.algorithms import RTNConfig
from quantcore.grouping import weight_grouping
from quantcore.layer import LayerPlan
from quantcore.observers import observer_for
from quantcore.qtensor import QTensor, quantize_weight
from quantcore.solvers import SOLVERS, Weights
from quantcore.spec import QuantizationSpec
from quantcore.stats import Needs, Stats


@SOLVERS.add("rtn")
class RTN:
    """Rounding, weight by weight."""

    def __init__(self, config: RTNConfig) -> None:
        self.needs = Needs(gram=config.range_search)

    def solve(self, weights: Weights, stats: Stats | None) -> dict[LayerPlan, QTensor]:
        return {layer: round_to_nearest(weight_OI, layer.weight) for layer, weight_OI in weights.items()}


def round_to_nearest(weight: torch.Tensor, spec: QuantizationSpec) -> QTensor:
    """A finite weight [out, in, *kernel] with the ranges that the spec's observer finds in it."""
    observer = observer_for(spec, weight_grouping(spec))
    observer.update(weight)
    return quantize_weight(weight, find_params(*observer.range(), spec, weight.dtype), spec)
