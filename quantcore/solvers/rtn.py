"""Round to nearest: every value takes the nearest code of its group's min-max range."""

from __future__ import annotations

import torch

from quantcore.affine import affine_params, min_max, quantize, scale_dtype
from quantcore.layer import LayerPlan
from quantcore.qtensor import QParams, QTensor
from quantcore.solvers import SOLVERS


@SOLVERS.add("rtn")
def solve(weight_OI: torch.Tensor, layer: LayerPlan) -> QTensor:
    """Quantize the finite ``weight_OI`` as ``layer`` says."""
    spec = layer.weight
    minimum, maximum = min_max(weight_OI, *layer.num_scales)
    scale, zero_point = affine_params(minimum, maximum, spec, scale_dtype(spec, weight_OI.dtype))
    codes = quantize(weight_OI, scale, zero_point, spec.format, spec.round_method.value)
    return QTensor(codes, QParams(scale, zero_point), spec.format)
