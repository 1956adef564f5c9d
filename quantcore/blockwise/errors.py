"""Measures the error that rounding causes in a layer's weight, and in its output on the calibration text."""

from __future__ import annotations

from math import log10

import torch

from quantcore.blockwise.results import Solved
from quantcore.events import LayerQuantized
from quantcore.solvers.rtn import round_to_nearest


def measured(solved: Solved) -> LayerQuantized:
    """Return the errors of the layer's weight, and of its output on the calibration text."""
    layer, weight = solved.layer, solved.weight_OI.float()
    lost = weight - solved.restored_OI
    error = _ratio(lost.norm(), weight.norm())
    gram = None if solved.stats is None else solved.stats.gram_II
    output_error = rounding_error = None
    if gram is not None and gram.any():
        rounded = weight - round_to_nearest(weight, layer.weight).dequantize()
        power = [((part @ gram.float()) * part).sum().clamp(min=0).sqrt() for part in (lost, rounded, weight)]
        output_error, rounding_error = (round(_ratio(part, power[2]), 6) for part in power[:2])
    return LayerQuantized(
        name=layer.name,
        block=-1 if layer.block is None else layer.block,
        relative_error=round(error, 6),
        sqnr_db=round(min(-20 * log10(error), 999.0), 2) if error > 0 else 999.0,
        scheme=layer.scheme,
        output_error=output_error,
        rounding_error=rounding_error,
        num_tokens=None if solved.stats is None else solved.stats.num_own,
    )


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> float:
    return (part / whole).item() if whole > 0 else 0.0
