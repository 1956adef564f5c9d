"""Scales in two levels: small whole numbers for groups, times one float16 unit for a super-block of 256 inputs.

This is the form of GGUF's K-types and of IQ4_XS. ``scale_type`` uint6 (Q4_K, Q5_K): scales and minimums of 8 groups of
32 in 6 bits each, with a float16 unit for the scales and one for the minimums; uint4 (Q2_K): those of 16 groups of 16
in 4 bits. int8 (Q6_K) and int6 (Q3_K): scales of 16 groups of 16 in 8 and 6 bits; int6 also those of 8 groups of 32
(IQ4_XS). odd3 and odd4 (IQ1; IQ2 and IQ3): an odd number of units, up to 15 or 31. ``double_quant`` has its own
module. Ranges are found group by group; their stored form is fixed here, for whole rows, before any code is chosen.

Legend: R rows, B super-blocks of a row, G groups of one.
"""

from __future__ import annotations

import torch

from quantcore.config.spec import SUPER_BLOCK, QuantizationSpec, ScaleType
from quantcore.tensors.affine import QParams, minimum_of, zero_point_of
from quantcore.tensors.double_quant import NestedScales

LARGEST = {
    ScaleType.uint4: 15, ScaleType.odd3: 15, ScaleType.odd4: 31, ScaleType.uint6: 63, ScaleType.int6: 31,
    ScaleType.int8: 127,
}  # fmt: skip
"""Integers that stand for the largest scale of a super-block; the float16 unit follows from them."""


def as_two_levels(params: QParams, spec: QuantizationSpec) -> QParams:
    """Return parameters [R, all groups] in their stored form; unchanged if scales are stored one by one."""
    if spec.scale_type is ScaleType.double_quant:
        nested = NestedScales.of(params.scale)
        return QParams(nested.decode(), nested=nested)
    largest = LARGEST.get(spec.scale_type)
    if largest is None:
        return params
    num_groups = SUPER_BLOCK // (spec.group_size or SUPER_BLOCK)
    scale_RBG = params.scale.reshape(len(params.scale), -1, num_groups)
    if params.zero_point is None:
        is_odd = spec.scale_type in (ScaleType.odd3, ScaleType.odd4)
        return QParams(_whole(scale_RBG, largest, at_least=1, is_odd=is_odd).flatten(1))
    zero_RBG = params.zero_point.reshape(scale_RBG.shape)
    low_RBG = -minimum_of(zero_RBG, scale_RBG, spec)
    num_steps = spec.format.max - spec.format.min
    stored_RBG = _whole(low_RBG.clamp(min=0), largest, at_least=0)
    # The other end of the range does not move.
    scale_RBG = _whole(scale_RBG + (stored_RBG - low_RBG) / num_steps, largest, at_least=1).flatten(1)
    return QParams(scale_RBG, zero_point_of(-stored_RBG.flatten(1), scale_RBG, spec))


def two_levels(values_RBG: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (units [R, B] exact in float16, whole numbers [R, B, G]) of a result of ``as_two_levels``.

    The result is units times whole numbers.
    """
    unit_RB = (values_RBG.amax(-1) / largest).half().float()
    whole_RBG = (values_RBG / _above_zero(unit_RB).unsqueeze(-1)).round()
    return unit_RB, whole_RBG


def _whole(values_RBG: torch.Tensor, largest: int, *, at_least: int, is_odd: bool = False) -> torch.Tensor:
    """Return values >= 0 as whole multiples of a float16 unit; a super-block's largest is exactly ``largest`` units.

    If ``is_odd``, all multiples are odd, as ``at_least`` and ``largest`` are.
    """
    top_RB1 = values_RBG.amax(-1, keepdim=True)
    unit_RB1 = (top_RB1 / largest).half().float()
    smallest = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    unit_RB1 = torch.where((unit_RB1 == 0) & ((top_RB1 > 0) | (at_least > 0)), smallest, unit_RB1)
    units_RBG = values_RBG / _above_zero(unit_RB1)
    whole_RBG = (((units_RBG - 1) / 2).round() * 2 + 1 if is_odd else units_RBG.round()).clamp(at_least, largest)
    return torch.where((values_RBG == top_RB1) & (unit_RB1 > 0), largest, whole_RBG) * unit_RB1


def _above_zero(unit: torch.Tensor) -> torch.Tensor:
    """Return ``unit`` with zeros replaced by ones, to divide by."""
    return torch.where(unit == 0, torch.ones_like(unit), unit)
