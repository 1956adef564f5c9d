"""Rounds weights input by input, where the codes of later inputs compensate the errors of earlier ones.

Legend: K inputs in the order in which they are rounded, O outputs, J groups of inputs that share parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from quantcore.config.spec import QuantizationSpec
from quantcore.engine.solvers.groups import GroupParams, Groups
from quantcore.formats.vectors import num_inputs, snap_
from quantcore.plan.workload import KERNEL_INPUTS
from quantcore.tensors.affine import QParams
from quantcore.tensors.kernels import switch

ONE_BY_ONE = 16  # inputs that are processed one by one, without matrix products between them
ROUNDED_TOGETHER = 64  # inputs that are rounded together if they do not move each other
NUM_PANELS = 4  # of a triangular product: 10/16 of the work of a whole one


@dataclass(frozen=True)
class Table:
    """The parameters of rows of weights, for every group of inputs.

    ``zero_JO`` is None if symmetric, ``global_O`` if there is no global scale.
    """

    scale_JO: torch.Tensor
    zero_JO: torch.Tensor | None
    global_O: torch.Tensor | None

    @classmethod
    def of(cls, params: Sequence[QParams], groups: Sequence[Groups]) -> Table:
        """Make the table of weights that are concatenated along the rows."""
        pairs = list(zip(params, groups, strict=True))
        scale_JO = torch.cat([layout.spread(own.scale) for own, layout in pairs], dim=1).contiguous()
        zeros = [layout.spread(own.zero_point) for own, layout in pairs if own.zero_point is not None]
        globals_ = [
            own.global_scale.expand(layout.index_JO.shape[1]) for own, layout in pairs if own.global_scale is not None
        ]
        zero_JO = torch.cat(zeros, dim=1).contiguous() if zeros else None
        return cls(scale_JO, zero_JO, torch.cat(globals_) if globals_ else None)

    def of_rows(self, rows: slice | torch.Tensor) -> Table:
        """Return the parameters of some outputs; a view for a slice."""
        zero_JO = None if self.zero_JO is None else self.zero_JO[:, rows]
        return Table(self.scale_JO[:, rows], zero_JO, None if self.global_O is None else self.global_O[rows])

    def params(self, heights: Sequence[int]) -> list[QParams]:
        """Return the inverse of ``of``, for rows that share no parameters.

        ``heights`` are the weights' numbers of rows.
        """
        ends = accumulate(heights)
        parts = [self.of_rows(slice(end - height, end)) for end, height in zip(ends, heights, strict=True)]
        return [
            QParams(
                part.scale_JO.T.contiguous(),
                None if part.zero_JO is None else part.zero_JO.T.contiguous(),
                None if part.global_O is None else part.global_O[0].clone(),
            )
            for part in parts
        ]


class Grid:
    """Rounds weights to the grid of ``table``'s parameters.

    ``group_K`` is the group of each input; ``group_index_K`` the same on the table's device. ``step_JO`` and
    ``zero_JO`` are the parameters of each group as float32.
    """

    def __init__(
        self, spec: QuantizationSpec, table: Table, group_K: Sequence[int], group_index_K: torch.Tensor
    ) -> None:
        self.spec, self.table, self._group_K = spec, table, group_K
        self._format, self._round_method = spec.format, spec.round_method.value
        scale_JO = table.scale_JO
        self.step_JO = scale_JO if table.global_O is None else scale_JO * table.global_O
        self.zero_JO = None if table.zero_JO is None else table.zero_JO.float()
        zeros = [None] * len(scale_JO) if self.zero_JO is None else self.zero_JO.unbind()
        steps = self.step_JO.unbind()
        self.group_index_K = group_index_K
        self._params_J = [GroupParams(*params) for params in zip(scale_JO.unbind(), steps, zeros, strict=True)]

    def put(self, start: int, params_O: QParams) -> None:
        """Set the parameters of the group of the input ``start``, in the table, too."""
        group = self._group_K[start]
        self.table.scale_JO[group] = params_O.scale
        self.step_JO[group] = params_O.step
        if params_O.zero_point is not None and self.table.zero_JO is not None and self.zero_JO is not None:
            self.table.zero_JO[group] = params_O.zero_point
            self.zero_JO[group] = params_O.zero_point

    def params_of_each(self, start: int, end: int) -> list[GroupParams]:
        """Return the parameters of some inputs one by one, [O] each."""
        return [self._params_J[group] for group in self._group_K[start:end]]

    def params(self, start: int, end: int) -> GroupParams:
        """Return the parameters of some inputs, [K, O]."""
        groups = self.group_index_K[start:end]
        zero = None if self.zero_JO is None else self.zero_JO[groups]
        return GroupParams(self.table.scale_JO[groups], self.step_JO[groups], zero)

    def round_(self, x: torch.Tensor, params: GroupParams) -> torch.Tensor:
        """Round x [K, O] or [O] in place to values of the format's grid: ``affine.quantize`` for transposed weights.

        Of a format with vectors x has the inputs of whole vectors.
        """
        if self.spec.over is not None and self.table.global_O is not None:
            self.spec.over.format.round_(x.div_(self.table.global_O)).div_(params.scale)
        elif params.zero is None:
            x.div_(params.step)
        else:
            torch.addcdiv(params.zero, x, params.step, out=x)
        return self._format.round_(snap_(self._format, x, 0), self._round_method)

    def subtract_(self, x: torch.Tensor, values: torch.Tensor, params: GroupParams) -> torch.Tensor:
        """Compute x -= dequantize(values), in place; x is [..., O]."""
        return x.addcmul_(values if params.zero is None else values - params.zero, params.step, value=-1)


class RangeFinder(NamedTuple):
    """Finds the parameters of each group of ``group_size`` inputs when the sweep reaches it.

    ``find(start, end)`` is called once the errors of earlier inputs have moved the group's weights. It sets the
    parameters of the grid.
    """

    group_size: int
    find: Callable[[int, int], None]


class Columns:
    """Rows of weights, [K, O], while they are rounded.

    ``value_KO`` becomes the rounded values, on the format's grid, ``error_KO`` the target minus the dequantized values.
    """

    def __init__(self, target_KO: torch.Tensor, grid: Grid) -> None:
        self.target_KO, self.grid = target_KO, grid
        self.value_KO, self.error_KO = target_KO.clone(), target_KO.clone()
        self._kernel = _kernel_for(grid, target_KO.device)
        self._together = num_inputs(grid.spec.format)
        self._at_once = max(ONE_BY_ONE, self._together) if self._kernel is None else KERNEL_INPUTS

    def round(self) -> None:
        """Round each input by itself."""
        for start in range(0, len(self.value_KO), ROUNDED_TOGETHER):
            end = start + ROUNDED_TOGETHER
            params = self.grid.params(start, end)
            values = self.grid.round_(self.value_KO[start:end], params)
            self.grid.subtract_(self.error_KO[start:end], values, params)

    def sweep(self, error_feedback_KK: torch.Tensor, finder: RangeFinder | None = None) -> None:
        """Round one input after another; before, input k moves by the sum of error_feedback[k, l] * error[l], l < k."""
        self._sweep(0, len(self.value_KO), error_feedback_KK, finder)

    def improve(self, row_scaled_KK: torch.Tensor) -> None:
        """Make a pass of coordinate descent: each input in turn is rounded to the best value given all others.

        Before rounding, this value is the target plus the sum of row_scaled[k, l] * error[l] over all l but k.
        """
        self.value_KO.copy_(self.target_KO)
        size = -(-len(row_scaled_KK) // NUM_PANELS // self._together) * self._together
        for start in range(0, len(row_scaled_KK), size):
            end = start + size
            later = row_scaled_KK[start:end, start:end].triu(1)
            for first in range(0, size if self._together > 1 else 0, self._together):  # errors that change together
                later[first : first + self._together, first : first + self._together] = 0
            self.value_KO[start:end].addmm_(later, self.error_KO[start:end])
            self.value_KO[start:end].addmm_(row_scaled_KK[start:end, end:], self.error_KO[end:])
        self.error_KO.copy_(self.target_KO)
        self.sweep(row_scaled_KK)

    def cost(self, gram_KK: torch.Tensor) -> torch.Tensor:
        """Return error^T gram error of every row, [O]."""
        total_O = self.error_KO.new_zeros(self.error_KO.shape[1])
        size = -(-len(gram_KK) // NUM_PANELS)
        for start in range(0, len(gram_KK), size):
            end = start + size
            moved = gram_KK[start:end, start:end] @ self.error_KO[start:end]
            moved.addmm_(gram_KK[start:end, :start], self.error_KO[:start], alpha=2)
            total_O += torch.linalg.vecdot(moved, self.error_KO[start:end], dim=0)
        return total_O

    def _sweep(self, start: int, end: int, error_feedback_KK: torch.Tensor, finder: RangeFinder | None) -> None:
        """Run ``sweep`` on inputs that have moved by all errors before ``start``: on half of them, then the rest."""
        size = end - start
        if finder is not None and size == finder.group_size:
            finder.find(start, end)
            finder = None
        if finder is None and size <= self._at_once:
            self._sweep_one_by_one(start, end, error_feedback_KK)
            return
        unit = self._at_once if finder is None else finder.group_size
        middle = start + -(-size // (2 * unit)) * unit
        self._sweep(start, middle, error_feedback_KK, finder)
        self.value_KO[middle:end].addmm_(error_feedback_KK[middle:end, start:middle], self.error_KO[start:middle])
        self._sweep(middle, end, error_feedback_KK, finder)

    def _sweep_one_by_one(self, start: int, end: int, error_feedback_KK: torch.Tensor) -> None:
        inputs = slice(start, end)
        if self._kernel is not None:
            of_inputs = error_feedback_KK[inputs, inputs], self.grid.group_index_K[inputs]
            self._kernel(self.value_KO[inputs], self.error_KO[inputs], *of_inputs)
            return
        if self._together > 1:
            self._sweep_vectors(inputs, error_feedback_KK[inputs, inputs])
            return
        feedback = error_feedback_KK[inputs, inputs].contiguous().unbind()
        values, errors = self.value_KO[inputs].unbind(), self.error_KO[inputs].unbind()
        for k, params in enumerate(self.grid.params_of_each(start, end)):
            if k:
                values[k].addmv_(self.error_KO[start : start + k].T, feedback[k][:k])
            self.grid.round_(values[k], params)
            self.grid.subtract_(errors[k], values[k], params)

    def _sweep_vectors(self, inputs: slice, error_feedback_KK: torch.Tensor) -> None:
        """Round the inputs of one vector after another: to the vector nearest to the values that would be best for all.

        Errors of other inputs move those of a vector together, as in block LDLQ (Tseng et al. 2024, "QuIP#").
        """
        target_KO, values_KO, errors_KO = self.target_KO[inputs], self.value_KO[inputs], self.error_KO[inputs]
        for first in range(0, len(values_KO), self._together):
            own = slice(first, first + self._together)
            moved_KO = torch.addmm(values_KO[own] - target_KO[own], error_feedback_KK[own, :first], errors_KO[:first])
            values_KO[own] = target_KO[own] + torch.linalg.solve(error_feedback_KK[own, own], moved_KO)
            params = self.grid.params(inputs.start + own.start, inputs.start + own.stop)
            self.grid.subtract_(errors_KO[own], self.grid.round_(values_KO[own], params), params)


def _kernel_for(grid: Grid, device: torch.device) -> Callable[..., None] | None:
    """Return the kernel of ``Columns._sweep_one_by_one``; None if torch computes it."""
    spec = grid.spec
    if spec.over is not None or not switch.are_used_on(device):
        return None
    from quantcore.tensors.kernels import columns, rounding

    found = rounding.rounding_of(spec.format, spec.round_method.value)
    if found is None:
        return None
    return partial(columns.round_in_turn, step_JO=grid.step_JO, zero_JO=grid.zero_JO, rounding=found)
