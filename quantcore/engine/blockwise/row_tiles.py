"""Tiles of weight rows that ranks solve separately, cut where solvers cut anyway, so that no bit of a code changes."""

from __future__ import annotations

from collections.abc import Iterable

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.solvers import GlobalScales, Weights
from quantcore.engine.solvers.global_scale import has_global_scale
from quantcore.engine.solvers.groups import rows_are_apart
from quantcore.engine.solvers.rtn import group_by_spec
from quantcore.plan import workload

Rows = dict[LayerPlan, slice]


def row_tiles(weights: Weights, global_scales: GlobalScales) -> list[Rows]:
    """Cut the rows of ``weights`` [out, in] of layers that read one input into tiles, in order.

    There is a single tile where rows share parameters, or the stored form of these.
    """
    tiles: list[Rows] = []
    for layers in group_by_spec(weights):
        if not all(_is_by_rows(layer.weight, has_its_scale=layer in global_scales) for layer in layers):
            return [{layer: slice(0, len(weight_OI)) for layer, weight_OI in weights.items()}]
        ends, end = {}, 0
        for layer in layers:
            ends[layer] = range(end, end + len(weights[layer]))
            end = ends[layer].stop
        for start in range(0, end, workload.SOLVED_ROWS):
            tile = {layer: _cut(start, start + workload.SOLVED_ROWS, rows) for layer, rows in ends.items()}
            tiles.append({layer: rows for layer, rows in tile.items() if rows.start < rows.stop})
    return tiles


def concat(parts: Iterable[Rows]) -> Rows:
    """Join neighbouring tiles into one."""
    joined: Rows = {}
    for part in parts:
        for layer, rows in part.items():
            joined[layer] = slice(joined[layer].start, rows.stop) if layer in joined else rows
    return joined


def _cut(start: int, stop: int, rows: range) -> slice:
    """Return the part of a layer's ``rows`` that lies within a tile, counted from the layer's first row."""
    return slice(max(start, rows.start) - rows.start, min(stop, rows.stop) - rows.start)


def _is_by_rows(spec: QuantizationSpec, *, has_its_scale: bool) -> bool:
    needs_all = spec.scale_type.in_two_levels or spec.over is not None or (has_global_scale(spec) and not has_its_scale)
    return rows_are_apart(spec) and not needs_all
