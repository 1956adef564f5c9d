"""Round to nearest: every value takes the nearest code of a range, which calibration data helps to choose."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from quantcore.calibration.stats import Needs, Stats
from quantcore.config.algorithms import RTNConfig
from quantcore.config.grouping import weight_grouping
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import QuantizationSpec
from quantcore.numerics.affine import QParams, find_params
from quantcore.numerics.qtensor import QTensor, quantize_weight
from quantcore.numerics.super_blocks import as_two_levels
from quantcore.observers import observer_for
from quantcore.solvers import NONE, SOLVERS, GlobalScales, Weights
from quantcore.solvers.cells import Cells
from quantcore.solvers.measures import NUM_OUTPUTS, Metric, PooledMeasure, RunMeasure
from quantcore.solvers.ranges import FullRange, search


@SOLVERS.add("rtn")
class RTN:
    """Rounding, weight by weight; with calibration data, in the ranges that change the layer's output least."""

    def __init__(self, config: RTNConfig) -> None:
        self.needs = Needs(gram=config.range_search)
        self.notes: list[str] = []

    def solve(
        self, weights: Weights, stats: Stats | None, global_scales: GlobalScales = NONE
    ) -> dict[LayerPlan, QTensor]:
        if stats is None or stats.gram_II is None or not stats.gram_II.any():
            return round_all(weights, global_scales)
        metric = Metric.of_gram(stats.gram_II)
        quantized = {}
        for layers in group_by_spec(weights):
            spec = layers[0].weight
            given = [global_scales.get(layer) for layer in layers]
            found = search_ranges([weights[layer] for layer in layers], spec, metric, given)
            for layer, params in zip(layers, found, strict=True):
                quantized[layer] = quantize_weight(weights[layer], params, spec)
        return {layer: quantized[layer] for layer in weights}


def round_all(weights: Weights, global_scales: GlobalScales) -> dict[LayerPlan, QTensor]:
    """Every weight rounded by itself."""
    return {
        layer: round_to_nearest(weight_OI, layer.weight, global_scales.get(layer))
        for layer, weight_OI in weights.items()
    }


def round_to_nearest(weight: torch.Tensor, spec: QuantizationSpec, global_scale: torch.Tensor | None = None) -> QTensor:
    """A finite weight [out, in, *kernel] with the ranges that the spec's observer finds in it."""
    return quantize_weight(weight, observed_ranges(weight, spec, global_scale), spec)


def observed_ranges(weight: torch.Tensor, spec: QuantizationSpec, global_scale: torch.Tensor | None = None) -> QParams:
    """The parameters of the ranges that the spec's observer finds in the weight alone, under a given global scale."""
    observer = observer_for(spec, weight_grouping(spec))
    observer.update(weight)
    return as_two_levels(find_params(*observer.range(), spec, weight.dtype, global_scale), spec)


def group_by_spec(weights: Weights) -> list[list[LayerPlan]]:
    """The layers in lists of those that have the same spec and dtype."""
    lists: dict[Hashable, list[LayerPlan]] = {}
    for layer, weight_OI in weights.items():
        lists.setdefault((layer.weight, weight_OI.dtype), []).append(layer)
    return list(lists.values())


def search_ranges(
    weights: Sequence[torch.Tensor],
    spec: QuantizationSpec,
    metric: Metric,
    global_scales: Sequence[torch.Tensor | None],
) -> list[QParams]:
    """The parameters with which rounding of each weight [O, I] costs least by ``metric``.

    With a Gram matrix, the groups of a row are searched one after another, those whose inputs have most power first:
    each with what the errors of the ones before it do to its own. Where a group is the whole row, or rows share
    parameters, inputs that are far from each other count as independent. The range from end to end is always tried.
    ``global_scales``: see ``FullRange.of``.
    """
    full = [FullRange.of(weight_OI, spec, given) for weight_OI, given in zip(weights, global_scales, strict=True)]
    if not spec.format.scaled:
        return [one.params() for one in full]
    cells = [Cells.of(spec, weight_OI) for weight_OI in weights]
    if not cells[0].is_local:
        return [_search_whole(*one, metric) for one in zip(weights, full, cells, strict=True)]
    found = _search_rows(torch.cat(list(weights)), FullRange.joined(full), cells[0].run, metric)
    heights = [len(weight_OI) for weight_OI in weights]
    zeros = [None] * len(full) if found.zero_point is None else torch.split(found.zero_point, heights)
    parts = zip(torch.split(found.scale, heights), zeros, full, strict=True)
    return [as_two_levels(QParams(scale, zero, one.global_scale), spec) for scale, zero, one in parts]


def transposed(weight_OI: torch.Tensor) -> torch.Tensor:
    """[I, O] in float32, laid out so."""
    return weight_OI.float().T.contiguous()


def _search_whole(weight_OI: torch.Tensor, full: FullRange, cells: Cells, metric: Metric) -> QParams:
    """``search_ranges`` of a weight whose rows share parameters."""
    weight_IO = transposed(weight_OI)
    runs = [slice(start, start + cells.run) for start in range(0, len(weight_IO), cells.run)]
    tiles = (metric.tiles(weight_IO[run], run, full) for run in runs)
    return search(full, PooledMeasure(cells, [RunMeasure(of_run, full.spec) for of_run in tiles]))


def _search_rows(weight_OI: torch.Tensor, full: FullRange, run: int, metric: Metric) -> QParams:
    """``search_ranges`` where no two rows share parameters: some rows at a time, from run to run."""
    order_J = metric.power_I.view(-1, run).sum(1).argsort(descending=True, stable=True)
    position_I = torch.arange(len(metric.power_I), device=order_J.device).view(-1, run)[order_J].flatten()
    gram_II = None if metric.gram_II is None or len(order_J) == 1 else metric.gram_II[:, position_I]
    found = full.params()
    for start in range(0, len(weight_OI), NUM_OUTPUTS):
        rows = slice(start, start + NUM_OUTPUTS)
        weight_IN = transposed(weight_OI[rows])
        error_IN = torch.empty_like(weight_IN)  # in the order of the search, as the second axis of gram_II
        for number, group in enumerate(order_J.tolist()):
            inputs, done = slice(group * run, (group + 1) * run), slice(number * run)
            cross_SN = None if gram_II is None else gram_II[inputs, done] @ error_IN[done]
            here = full.of_rows(rows, group)
            tiles = metric.tiles(weight_IN[inputs], inputs, here, cross_SN)
            best = search(here, RunMeasure(tiles, full.spec))
            found.scale[rows, group] = best.scale
            if found.zero_point is not None and best.zero_point is not None:
                found.zero_point[rows, group] = best.zero_point
            if gram_II is not None:
                error_IN[number * run : (number + 1) * run] = torch.cat([tile.lost(best, full.spec) for tile in tiles])
    return found
