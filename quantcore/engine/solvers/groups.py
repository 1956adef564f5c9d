"""Parameters of a transposed weight, [I, O], in which the values of one input are contiguous.

Legend of the solvers: I inputs, O outputs (rows of weights), J groups of inputs; R, G rows and groups of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from quantcore.config.grouping import weight_grouping
from quantcore.config.spec import QuantizationSpec
from quantcore.tensors.affine import QParams


class GroupParams(NamedTuple):
    """The parameters of weights [..., O]: the stored scale, the value of one step of the grid, the zero point."""

    scale: torch.Tensor
    step: torch.Tensor
    zero: torch.Tensor | None

    @classmethod
    def of(cls, params: QParams) -> GroupParams:
        """Convert ``params``, with the zero point as a float."""
        return cls(params.scale, params.step, None if params.zero_point is None else params.zero_point.float())

    def at(self, index: int | slice | tuple[slice, slice]) -> GroupParams:
        """Return a part of the parameters, as views."""
        return GroupParams(self.scale[index], self.step[index], None if self.zero is None else self.zero[index])


def rows_are_apart(spec: QuantizationSpec) -> bool:
    """Return True if no two rows of a weight share any parameters."""
    grouping = weight_grouping(spec)
    return grouping.axis is not None and (grouping.axis % 2 == 1) is not grouping.across


@dataclass(frozen=True)
class Groups:
    """The assignment of parameters [R, G] to parts of a weight [O, I].

    In each row, ``group_size`` consecutive inputs share them: a group. ``index_JO`` is the index of each group's
    parameters in the flattened [R, G]. ``is_local``: no two rows of the weight share any, so that each can be solved by
    itself; then R is O, and G is J.
    """

    group_size: int
    num_scales: tuple[int, int]
    is_local: bool
    index_JO: torch.Tensor

    @classmethod
    def of(cls, spec: QuantizationSpec, weight_OI: torch.Tensor) -> Groups:
        """Return the groups of a weight shaped like ``weight_OI``, whose values do not matter."""
        grouping = weight_grouping(spec)
        num_outputs, num_inputs = weight_OI.shape
        num_rows, num_groups = grouping.num_scales((num_outputs, num_inputs))
        is_local = rows_are_apart(spec)
        index_RG = torch.arange(num_rows * num_groups, device=weight_OI.device).view(num_rows, num_groups)
        if is_local:
            return cls(num_inputs // num_groups, (num_rows, num_groups), True, index_RG.T)
        size = weight_OI.numel() // index_RG.numel()
        group_size = num_inputs if grouping.axis is None else 1
        if grouping.block is not None:
            size, group_size = grouping.block[0] * grouping.block[1], grouping.block[1]
        index_OI = grouping.join(index_RG.unsqueeze(-1).expand(-1, -1, size), (num_outputs, num_inputs))
        return cls(group_size, (num_rows, num_groups), False, index_OI[:, ::group_size].T.contiguous())

    def spread(self, params: torch.Tensor) -> torch.Tensor:
        """Return the parameters [..., R, G] of every group of inputs, [..., J, O]."""
        return params.transpose(-1, -2) if self.is_local else params.flatten(-2)[..., self.index_JO]

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums of the values [..., J, O] of groups that share parameters, [..., R, G]."""
        if self.is_local:
            return x.transpose(-1, -2)
        num_rows, num_groups = self.num_scales
        pooled = x.new_zeros(*x.shape[:-2], num_rows * num_groups)
        return pooled.index_add_(-1, self.index_JO.flatten(), x.flatten(-2)).view(*x.shape[:-2], num_rows, num_groups)
