"""Round to nearest: every value takes the nearest code of the range that the spec's observer finds."""

from __future__ import annotations

import torch

from quantcore.affine import find_params
from quantcore.grouping import weight_grouping
from quantcore.layer import LayerPlan
from quantcore.observers import observer_for
from quantcore.qtensor import QTensor, quantize_weight
from quantcore.solvers import SOLVERS


@SOLVERS.add("rtn")
def solve(weight_OI: torch.Tensor, layer: LayerPlan) -> QTensor:
    """Quantize the finite ``weight_OI`` as ``layer`` says."""
    observer = observer_for(layer.weight, weight_grouping(layer.weight))
    observer.update(weight_OI)
    return quantize_weight(weight_OI, find_params(*observer.range(), layer.weight, weight_OI.dtype), layer.weight)
