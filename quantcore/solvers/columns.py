"""Rounding input by input, where what the codes of one get wrong is made good by those of the others.

Legend: K inputs in the order in which they are rounded, O outputs, J runs of inputs that share parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from quantcore.config.spec import QuantizationSpec
from quantcore.numerics.affine import QParams
from quantcore.solvers import fused
from quantcore.solvers.cells import Cell, Cells

ONE_BY_ONE = 16  # inputs that are taken one by one, without matrix products between them
ROUNDED_TOGETHER = 64  # inputs that are rounded together where they do not move each other
NUM_PANELS = 4  # of a triangular product: 10/16 of the work of a whole one


@dataclass(frozen=True)
class Table:
    """The parameters of rows of weights, as every run of inputs has them.

    ``zero_JO`` is None if symmetric, ``global_O`` if there is no global scale.
    """

    scale_JO: torch.Tensor
    zero_JO: torch.Tensor | None
    global_O: torch.Tensor | None

    @classmethod
    def of(cls, params: Sequence[QParams], cells: Sequence[Cells]) -> Table:
        """Make the table of weights that lie one below another."""
        pairs = list(zip(params, cells, strict=True))
        scale_JO = torch.cat([where.spread(one.scale) for one, where in pairs], dim=1).contiguous()
        zeros = [where.spread(one.zero_point) for one, where in pairs if one.zero_point is not None]
        globals_ = [
            one.global_scale.expand(where.index_JO.shape[1]) for one, where in pairs if one.global_scale is not None
        ]
        zero_JO = torch.cat(zeros, dim=1).contiguous() if zeros else None
        return cls(scale_JO, zero_JO, torch.cat(globals_) if globals_ else None)

    def of_rows(self, rows: slice) -> Table:
        """Return the parameters of some outputs; a view."""
        zero_JO = None if self.zero_JO is None else self.zero_JO[:, rows]
        return Table(self.scale_JO[:, rows], zero_JO, None if self.global_O is None else self.global_O[rows])

    def params(self, heights: Sequence[int]) -> list[QParams]:
        """The inverse of ``of``, where no two rows share parameters; ``heights`` are the weights' numbers of rows."""
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
    """Rounds weights to the grid of ``table``'s parameters; ``group_K`` says in which run an input is."""

    def __init__(self, spec: QuantizationSpec, table: Table, group_K: Sequence[int]) -> None:
        self.spec, self.table, self._group_K = spec, table, group_K
        self._format, self._round_method = spec.format, spec.round_method.value
        scale_JO = table.scale_JO
        self._step_JO = scale_JO if table.global_O is None else scale_JO * table.global_O
        self._zero_JO = None if table.zero_JO is None else table.zero_JO.float()
        zeros = [None] * len(scale_JO) if self._zero_JO is None else self._zero_JO.unbind()
        self._runs = [Cell(*cell) for cell in zip(scale_JO.unbind(), self._step_JO.unbind(), zeros, strict=True)]

    def put(self, start: int, params_O: QParams) -> None:
        """Set the parameters of the run of the input ``start``, in the table, too."""
        group = self._group_K[start]
        self.table.scale_JO[group] = params_O.scale
        self._step_JO[group] = params_O.step
        if params_O.zero_point is not None and self.table.zero_JO is not None and self._zero_JO is not None:
            self.table.zero_JO[group] = params_O.zero_point
            self._zero_JO[group] = params_O.zero_point

    def cells(self, start: int, end: int) -> list[Cell]:
        """Return the parameters of some inputs one by one, [O] each."""
        return [self._runs[group] for group in self._group_K[start:end]]

    def cell(self, start: int, end: int) -> Cell:
        """Return the parameters of some inputs, [K, O]."""
        groups = self._group_K[start:end]
        zero = None if self._zero_JO is None else self._zero_JO[groups]
        return Cell(self.table.scale_JO[groups], self._step_JO[groups], zero)

    def round_(self, x: torch.Tensor, cell: Cell) -> torch.Tensor:
        """x [..., O] in place to values of the format's grid: ``affine.quantize`` for weights that lie transposed."""
        if self.spec.over is not None and self.table.global_O is not None:
            self.spec.over.format.round_(x.div_(self.table.global_O)).div_(cell.scale)
        elif cell.zero is None:
            x.div_(cell.step)
        else:
            torch.addcdiv(cell.zero, x, cell.step, out=x)
        return self._format.round_(x, self._round_method)

    def subtract_(self, x: torch.Tensor, values: torch.Tensor, cell: Cell) -> torch.Tensor:
        """x -= dequantize(values), in place; x is [..., O]."""
        return x.addcmul_(values if cell.zero is None else values - cell.zero, cell.step, value=-1)


class Found(NamedTuple):
    """Where parameters are found on the way: ``find(start, end)`` is called when the weights of a run of ``run`` inputs
    are as the errors before have moved them; it sets those of the grid."""

    run: int
    find: Callable[[int, int], None]


class Columns:
    """Rows of weights, [K, O], on their way to codes.

    ``value_KO`` becomes what they are rounded to, on the format's grid, ``error_KO`` the target without what that
    stands for.
    """

    def __init__(self, target_KO: torch.Tensor, grid: Grid) -> None:
        self.target_KO, self.grid = target_KO, grid
        self.value_KO, self.error_KO = target_KO.clone(), target_KO.clone()

    def round(self) -> None:
        """Round each input by itself."""
        for start in range(0, len(self.value_KO), ROUNDED_TOGETHER):
            end = start + ROUNDED_TOGETHER
            cell = self.grid.cell(start, end)
            values = self.grid.round_(self.value_KO[start:end], cell)
            self.grid.subtract_(self.error_KO[start:end], values, cell)

    def sweep(self, error_feedback_KK: torch.Tensor, found: Found | None = None) -> None:
        """Round one input after another. Before that, k moves by the sum of error_feedback[k, l] * error[l], l < k."""
        self._sweep(0, len(self.value_KO), error_feedback_KK, found)

    def improve(self, row_scaled_KK: torch.Tensor) -> None:
        """One pass of coordinate descent: each input in turn is rounded to what is best given all others.

        Before rounding, that is the target plus the sum of row_scaled[k, l] * error[l] over all l but k.
        """
        self.value_KO.copy_(self.target_KO)
        size = -(-len(row_scaled_KK) // NUM_PANELS)
        for start in range(0, len(row_scaled_KK), size):
            end = start + size
            self.value_KO[start:end].addmm_(row_scaled_KK[start:end, start:end].triu(1), self.error_KO[start:end])
            self.value_KO[start:end].addmm_(row_scaled_KK[start:end, end:], self.error_KO[end:])
        self.error_KO.copy_(self.target_KO)
        self.sweep(row_scaled_KK)

    def cost(self, gram_KK: torch.Tensor) -> torch.Tensor:
        """error^T gram error of every row, [O]."""
        total_O = self.error_KO.new_zeros(self.error_KO.shape[1])
        size = -(-len(gram_KK) // NUM_PANELS)
        for start in range(0, len(gram_KK), size):
            end = start + size
            moved = gram_KK[start:end, start:end] @ self.error_KO[start:end]
            moved.addmm_(gram_KK[start:end, :start], self.error_KO[:start], alpha=2)
            total_O += torch.linalg.vecdot(moved, self.error_KO[start:end], dim=0)
        return total_O

    def _sweep(self, start: int, end: int, error_feedback_KK: torch.Tensor, found: Found | None) -> None:
        """``sweep`` of some inputs that have moved by all errors before ``start``: half of them, then the rest."""
        size = end - start
        if found is not None and size == found.run:
            found.find(start, end)
            found = None
        if found is None and size <= ONE_BY_ONE:
            self._sweep_one_by_one(start, end, error_feedback_KK)
            return
        unit = ONE_BY_ONE if found is None else found.run
        middle = start + -(-size // (2 * unit)) * unit
        self._sweep(start, middle, error_feedback_KK, found)
        self.value_KO[middle:end].addmm_(error_feedback_KK[middle:end, start:middle], self.error_KO[start:middle])
        self._sweep(middle, end, error_feedback_KK, found)

    def _sweep_one_by_one(self, start: int, end: int, error_feedback_KK: torch.Tensor) -> None:
        inputs = slice(start, end)
        if fused.pays(self.value_KO.device):
            part = self.value_KO[inputs], self.error_KO[inputs], error_feedback_KK[inputs, inputs]
            if (done := fused.turns(self.grid, *part, self.grid.cell(start, end))) is not None:
                self.value_KO[inputs], self.error_KO[inputs] = done
                return
        feedback = error_feedback_KK[inputs, inputs].contiguous().unbind()
        values, errors = self.value_KO[inputs].unbind(), self.error_KO[inputs].unbind()
        for k, cell in enumerate(self.grid.cells(start, end)):
            if k:
                values[k].addmv_(self.error_KO[start : start + k].T, feedback[k][:k])
            self.grid.round_(values[k], cell)
            self.grid.subtract_(errors[k], values[k], cell)
