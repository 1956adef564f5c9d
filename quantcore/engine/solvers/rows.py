"""The order in which a solver takes the rows of weights, and how errors in some rows move the rows after them.

Legend: O outputs (rows of weights), K inputs in the order in which they are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from quantcore.engine.solvers.columns import Columns
from quantcore.plan import workload

STEPS = 8
"""Number of tiles into which rows that move each other are divided at least.

Rows within a tile do not move each other. Three times as many tiles take twice the time and gain nothing.
"""
MIN_TILE = 64
"""Smallest number of rows in such a tile."""


class Rows:
    """Rows that do not move each other, in their own order, in tiles that bound the memory."""

    def __init__(self, num_rows: int) -> None:
        self.order_O: slice | torch.Tensor = slice(None)
        """The rows in the order in which they are solved."""
        self.places_O: slice | torch.Tensor = slice(None)
        """The place of each row in that order."""
        self.tiles = [slice(start, start + workload.SOLVED_ROWS) for start in range(0, num_rows, workload.SOLVED_ROWS)]

    def moved(self, tile: int, target_KO: torch.Tensor) -> torch.Tensor:
        """Return the best weights for the rows of a tile, given the errors of the rows before."""
        return target_KO

    def note(self, tile: int, target_KO: torch.Tensor, columns: Columns) -> None:
        """Take the errors of a tile that has been solved; ``target_KO`` as it was before ``moved``."""


@dataclass
class _Coupled:
    """Rows that move each other: their numbers in the order in which they are solved, and their errors so far.

    With A = V V^T, V upper triangular, errors E of these rows cost tr(E^T A E H) = |V^T E U|^2, H = U U^T the Hessian
    of the inputs. Rows j of V^T E depend only on the rows i before them and on themselves. So they are best rounded
    from their weights plus V_jj^-T V_ij^T E_i: feedback along outputs, as GPTQ has it along inputs.
    """

    order_O: torch.Tensor
    upper_OO: torch.Tensor
    error_OK: torch.Tensor
    tiles: list[slice] = field(init=False)

    def __post_init__(self) -> None:
        size = max(MIN_TILE, -(-len(self.order_O) // STEPS))
        self.tiles = [slice(start, start + size) for start in range(0, len(self.order_O), size)]

    @classmethod
    def of(cls, gram_OO: torch.Tensor, first_row: int, damp_percent: float, num_inputs: int) -> _Coupled:
        """``gram_OO``: the second moments of the gradients by these outputs, without damping.

        If all are zero, because the predictions do not depend on these outputs, the rows do not move each other.
        """
        mean = gram_OO.diagonal().mean()
        order_O = gram_OO.diagonal().argsort(descending=True, stable=True)
        damped_OO = gram_OO[order_O][:, order_O].flip(0, 1)
        damped_OO.diagonal().add_(torch.where(mean > 0, damp_percent * mean, 1.0))
        upper_OO = torch.linalg.cholesky(damped_OO).flip(0, 1)
        return cls(order_O + first_row, upper_OO, gram_OO.new_empty(len(gram_OO), num_inputs))

    def moves(self, tile: slice) -> torch.Tensor:
        """Return by how much the rows of a tile move, [o, K]."""
        before = slice(0, tile.start)
        own, others = self.upper_OO[tile, tile].T, self.upper_OO[before, tile].T
        shares = torch.linalg.solve_triangular(own, others, upper=False)
        moved: torch.Tensor = shares @ self.error_OK[before]
        return moved


Member = tuple[_Coupled, slice, slice]
"""Some rows of a part, and their places in a tile."""


class CoupledRows(Rows):
    """Rows of several layers, of which those of one layer move each other by the ``outputs`` of ``Stats`` (YAQA).

    Those with the largest gradients are solved first, in tiles; the first tiles of all layers together as far as the
    memory allows, then the second ones. Rows of a layer without gradients (None) do not move, nor do rows of zeros.
    """

    def __init__(
        self,
        outputs: Sequence[Sequence[torch.Tensor] | None],
        heights: Sequence[int],
        damp_percent: float,
        num_inputs: int,
        device: torch.device,
    ) -> None:
        super().__init__(0)
        self._parts: list[_Coupled] = []
        for end, height, grams in zip(accumulate(heights), heights, outputs, strict=True):
            start = end - height
            sizes = [rows.stop - rows.start for rows in workload.output_blocks(height)]
            for gram_OO in grams or [torch.eye(size, device=device) for size in sizes]:
                self._parts.append(_Coupled.of(gram_OO, start, damp_percent, num_inputs))
                start += len(gram_OO)
        self._members: list[list[Member]] = []  # of each tile
        ordered: list[torch.Tensor] = []
        for step in range(max(len(part.tiles) for part in self._parts)):
            self._open_tile()
            for part in self._parts:
                if step < len(part.tiles):
                    rows = part.order_O[part.tiles[step]]
                    ordered.append(rows)
                    self._add(part, part.tiles[step], len(rows))
        self.order_O = torch.cat(ordered)
        self.places_O = self.order_O.argsort()

    def _open_tile(self) -> None:
        start = self.tiles[-1].stop if self.tiles else 0
        self.tiles.append(slice(start, start))
        self._members.append([])

    def _add(self, part: _Coupled, rows: slice, num_rows: int) -> None:
        """Add rows of a part to the last tile, or to a new one if that would be too large."""
        size = self.tiles[-1].stop - self.tiles[-1].start
        if size and size + num_rows > workload.SOLVED_ROWS:
            self._open_tile()
            size = 0
        tile = self.tiles[-1]
        self._members[-1].append((part, rows, slice(size, size + num_rows)))
        self.tiles[-1] = slice(tile.start, tile.stop + num_rows)

    def moved(self, tile: int, target_KO: torch.Tensor) -> torch.Tensor:
        moved_KO = target_KO.clone()
        for part, rows, places in self._members[tile]:
            if rows.start:
                moved_KO[:, places] += part.moves(rows).T
        return moved_KO.mul_(target_KO.any(0))

    def note(self, tile: int, target_KO: torch.Tensor, columns: Columns) -> None:
        params = columns.grid.params(0, len(target_KO))
        error_KO = columns.grid.subtract_(target_KO, columns.value_KO, params)
        for part, rows, places in self._members[tile]:
            part.error_OK[rows] = error_KO[:, places].T
