"""Measures the error that rounding causes in a layer's weight, and in its output on the calibration text."""

from __future__ import annotations

from math import log10

import torch

from quantcore.engine.blockwise.results import Solved
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.events import LayerQuantized


def measured(solved: Solved) -> LayerQuantized:
    """Return the errors of the layer's weight, and of its output on the calibration text."""
    layer, weight = solved.layer, solved.weight_OI.float()
    lost = weight - solved.restored_OI
    gram = None if solved.stats is None else solved.stats.gram_II
    ratios = [_ratio(lost.norm(), weight.norm())]
    if gram is not None:
        rounded = weight - round_to_nearest(weight, layer.weight).dequantize()
        power = [((part @ gram.float()) * part).sum().clamp(min=0).sqrt() for part in (lost, rounded, weight)]
        ratios += [*(_ratio(part, power[2]) for part in power[:2]), gram.any().float()]
    error, *of_output = torch.stack(ratios).tolist()  # an accelerator is waited for once
    output_error = rounding_error = None
    if of_output and of_output[2]:
        output_error, rounding_error = (round(value, 6) for value in of_output[:2])
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


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return torch.where(whole > 0, part / whole, 0.0)
