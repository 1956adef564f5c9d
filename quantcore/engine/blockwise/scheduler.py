"""Divides the groups of layers of a block among the ranks; a solver chooses the codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.blockwise.results import Group, Solved
from quantcore.engine.blockwise.row_tiles import concat, row_tiles
from quantcore.engine.calibration.stats import Stats
from quantcore.engine.runtime.ranks import Ranks, spread
from quantcore.engine.runtime.shards import whole
from quantcore.engine.solvers import GlobalScales, Solver
from quantcore.events import Warned
from quantcore.formats.weight_layout import canonical
from quantcore.plan import workload
from quantcore.tensors.qtensor import QTensor

Collect = Callable[[dict[str, nn.Module], int], dict[str, Stats]]
"""Function from the modules of a group, by name, and the rank that solves it to the statistics of their inputs."""


class Scheduler:
    """Assigns each group to the rank that owns the matrix of its input, and very large groups to all ranks by rows.

    ``plain`` solves groups without statistics. ``is_sequential``: the input of each group comes through the codes of
    the groups before.
    """

    def __init__(self, solver: Solver, plain: Solver, ranks: Ranks, *, is_sequential: bool) -> None:
        self._solver = solver
        self._plain = plain
        self._ranks = ranks
        self._sequential = is_sequential

    def solve(
        self, groups: list[Group], global_scales: GlobalScales, warnings: list[Warned], collect: Collect | None
    ) -> Iterator[Solved]:
        """Yield the codes of all layers, group by group. Messages of the solver are added to ``warnings``.

        ``collect`` takes the statistics of a group's input again, on its owner, if groups are solved sequentially; None
        if that is impossible.
        """
        owners = _owners(groups, self._ranks.size)
        by_all = self._solved_by_all(groups)
        own = [number for number, owner in enumerate(owners) if owner == self._ranks.rank and number not in by_all]
        in_parallel = self._ranks.size > 1 and not self._sequential
        ahead = {}
        if in_parallel:
            weights_of = ((number, _weights(group)) for number, group in enumerate(groups) if number not in by_all)
            own_weights = {number: weights for number, weights in weights_of if number in own}
            ahead = {
                number: self._solve_group(groups[number], own_weights.pop(number), global_scales) for number in own
            }
        for number, group in enumerate(groups):
            if self._sequential and number and group.stats is not None and collect is not None:
                modules = {layer.name: module for layer, module in group.layers.items()}
                group = replace(group, stats=next(iter(collect(modules, owners[number]).values()), group.stats))
            if number in by_all:
                quantized, notes = self._solve_by_rows(group, _weights(group), global_scales, owners[number])
            else:
                if not in_parallel:
                    weights = _weights(group)
                    if number in own:
                        ahead[number] = self._solve_group(group, weights, global_scales)
                quantized, notes = self._ranks.share(ahead.pop(number, ([], [])), owners[number])
            warnings += [Warned("solver", note) for note in notes]
            for (layer, module), codes in zip(group.layers.items(), quantized, strict=True):
                weight_OI = canonical(whole(module.get_parameter("weight")), layer.kind)
                yield Solved(layer, weight_OI, codes, group.stats, owners[number])

    def _solved_by_all(self, groups: list[Group]) -> set[int]:
        """Return the groups that all ranks solve by rows, because most ranks would otherwise wait for one."""
        size = self._ranks.size
        rows = [sum(layer.out_features for layer in group.layers) for group in groups]
        widths = [next(iter(group.layers)).in_features for group in groups]
        costs = [sum(workload.solving_flops(width, count)) for width, count in zip(widths, rows, strict=True)]
        chosen = set(range(len(groups))) if self._sequential and size > 1 else workload.too_large_for_one(costs, size)
        needs = self._solver.needs  # rows that move each other are solved one after the other
        has_gram = [group.stats is not None and needs.gram and not needs.outputs for group in groups]
        return {number for number in chosen if rows[number] > workload.SOLVED_ROWS and has_gram[number]}

    def _solve_by_rows(
        self, group: Group, weights: dict[LayerPlan, torch.Tensor], global_scales: GlobalScales, owner: int
    ) -> tuple[list[QTensor], list[str]]:
        """Solve a group on all ranks. Each gets the matrix from the ``owner`` and factorizes it."""
        group = replace(group, stats=self._ranks.share(group.stats, owner))
        tiles = row_tiles(weights, global_scales)
        own_rows = concat(tiles[number] for number in self._ranks.part(len(tiles)))
        own_weights = {layer: weights[layer][rows] for layer, rows in own_rows.items()}
        quantized, notes = self._solve_group(group, own_weights, global_scales) if own_rows else ([], [])
        parts = self._ranks.gather((dict(zip(own_rows, quantized, strict=True)), notes))
        all_rows = [QTensor.concat([rows[layer] for rows, _ in parts if layer in rows]) for layer in weights]
        return all_rows, list(dict.fromkeys(note for _, notes in parts for note in notes))

    def _solve_group(
        self, group: Group, weights: dict[LayerPlan, torch.Tensor], global_scales: GlobalScales
    ) -> tuple[list[QTensor], list[str]]:
        """Return the codes of the group's layers, and the messages of the solver."""
        solver = self._plain if group.stats is None else self._solver
        solved = solver.solve(weights, group.stats, global_scales)
        notes = list(solver.notes)
        solver.notes.clear()
        return [solved[layer] for layer in weights], notes


def _owners(groups: list[Group], size: int) -> list[int]:
    """Return the rank that solves each group: the one that has the matrices of its input."""
    rounding = spread([sum(math.prod(layer.shape) for layer in group.layers) for group in groups], size)
    return [owner if group.stats is None else group.stats.owner for owner, group in zip(rounding, groups, strict=True)]


def _weights(group: Group) -> dict[LayerPlan, torch.Tensor]:
    """Return the weights [out, in] of the group's layers. All ranks call it where these are sharded."""
    return {
        layer: canonical(whole(module.get_parameter("weight")), layer.kind) for layer, module in group.layers.items()
    }
