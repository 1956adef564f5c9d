"""Round to nearest: every value gets the nearest code of a range, which calibration data helps to choose."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from quantcore.config.algorithms import RTNConfig
from quantcore.config.grouping import weight_grouping
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.calibration.stats import Needs, Stats
from quantcore.engine.observers import observer_for
from quantcore.engine.solvers import NONE, SOLVERS, GlobalScales, Weights
from quantcore.engine.solvers.groups import Groups
from quantcore.engine.solvers.measures import NUM_OUTPUTS, GroupMeasure, Metric, PooledMeasure
from quantcore.engine.solvers.ranges import FullRange, search
from quantcore.tensors.affine import QParams, find_params
from quantcore.tensors.qtensor import QTensor, quantize_weight
from quantcore.tensors.super_blocks import as_two_levels


@SOLVERS.add("rtn")
class RTN:
    """Rounds weight by weight; with calibration data, in the ranges that change the layer's output least."""

    def __init__(self, config: RTNConfig) -> None:
        self.needs = Needs(gram=config.needs_calibration)
        self.notes: list[str] = []

    def solve(
        self, weights: Weights, stats: Stats | None, global_scales: GlobalScales = NONE
    ) -> dict[LayerPlan, QTensor]:
        metric = None if stats is None else Metric.of_stats(stats)
        if metric is None or not metric.hessian_diagonal_I.any():
            return round_all(weights, global_scales)
        quantized = {}
        for layers in group_by_spec(weights):
            spec = layers[0].weight
            scales = [global_scales.get(layer) for layer in layers]
            ranges = search_ranges([weights[layer] for layer in layers], spec, metric, scales)
            for layer, params in zip(layers, ranges, strict=True):
                quantized[layer] = quantize_weight(weights[layer], params, spec)
        return {layer: quantized[layer] for layer in weights}


def round_all(weights: Weights, global_scales: GlobalScales) -> dict[LayerPlan, QTensor]:
    """Round every weight by itself."""
    return {
        layer: round_to_nearest(weight_OI, layer.weight, global_scales.get(layer))
        for layer, weight_OI in weights.items()
    }


def round_to_nearest(weight: torch.Tensor, spec: QuantizationSpec, global_scale: torch.Tensor | None = None) -> QTensor:
    """Quantize a finite weight [out, in, *kernel] in the ranges that the spec's observer finds in it."""
    return quantize_weight(weight, observed_ranges(weight, spec, global_scale), spec)


def observed_ranges(weight: torch.Tensor, spec: QuantizationSpec, global_scale: torch.Tensor | None = None) -> QParams:
    """Return the parameters of the ranges that the spec's observer finds in the weight.

    A given global scale is used.
    """
    observer = observer_for(spec, weight_grouping(spec))
    observer.update(weight)
    return as_two_levels(find_params(*observer.range(), spec, weight.dtype, global_scale), spec)


def group_by_spec(weights: Weights) -> list[list[LayerPlan]]:
    """Return lists of the layers that have the same spec and dtype."""
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
    """Return the parameters with which rounding of each weight [O, I] costs least by ``metric``.

    With a Gram matrix, the groups of a row are searched one after another, each with the effect of errors of the groups
    before it. Groups whose inputs have the largest mean square come first. If a group is the whole row, or rows share
    parameters, inputs that are far from each other count as independent. The full range is always tried.
    ``global_scales``: see ``FullRange.of``.
    """
    full = [FullRange.of(weight_OI, spec, scale) for weight_OI, scale in zip(weights, global_scales, strict=True)]
    if not spec.format.scaled:
        return [start.params() for start in full]
    groups = [Groups.of(spec, weight_OI) for weight_OI in weights]
    if not groups[0].is_local:
        return [_search_whole(*weight, metric) for weight in zip(weights, full, groups, strict=True)]
    params = _search_rows(torch.cat(list(weights)), FullRange.concat(full), groups[0].group_size, metric)
    heights = [len(weight_OI) for weight_OI in weights]
    zeros = [None] * len(full) if params.zero_point is None else torch.split(params.zero_point, heights)
    parts = zip(torch.split(params.scale, heights), zeros, full, strict=True)
    return [as_two_levels(QParams(scale, zero, start.global_scale), spec) for scale, zero, start in parts]


def transposed(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return the weight as [I, O], float32, contiguous."""
    return weight_OI.float().T.contiguous()


def _search_whole(weight_OI: torch.Tensor, full: FullRange, groups: Groups, metric: Metric) -> QParams:
    """Run ``search_ranges`` for a weight whose rows share parameters."""
    weight_IO = transposed(weight_OI)
    size = groups.group_size
    inputs = [slice(start, start + size) for start in range(0, len(weight_IO), size)]
    tiles = (metric.tiles(weight_IO[group], group, full) for group in inputs)
    return search(full, PooledMeasure(groups, [GroupMeasure(own, full.spec) for own in tiles]))


def _search_rows(weight_OI: torch.Tensor, full: FullRange, group_size: int, metric: Metric) -> QParams:
    """Run ``search_ranges`` for rows that share no parameters: some rows at a time, from group to group."""
    order_J = metric.hessian_diagonal_I.view(-1, group_size).sum(1).argsort(descending=True, stable=True)
    index_I = torch.arange(len(metric.hessian_diagonal_I), device=order_J.device)
    index_I = index_I.view(-1, group_size)[order_J].flatten()
    gram_II = None if metric.gram_II is None or len(order_J) == 1 else metric.gram_II[:, index_I]
    params, groups = full.params(), order_J.tolist()
    for start in range(0, len(weight_OI), NUM_OUTPUTS):
        rows = slice(start, start + NUM_OUTPUTS)
        weight_IN = transposed(weight_OI[rows])
        error_IN = torch.empty_like(weight_IN)  # in the order of the search, as the second axis of gram_II
        for number, group in enumerate(groups):
            inputs, done = slice(group * group_size, (group + 1) * group_size), slice(number * group_size)
            own = slice(done.stop, done.stop + group_size)
            cross_SN = None if gram_II is None else gram_II[inputs, done] @ error_IN[done]
            group_range = full.of_rows(rows, group)
            tiles = metric.tiles(weight_IN[inputs], inputs, group_range, cross_SN)
            best = search(group_range, GroupMeasure(tiles, full.spec))
            params.scale[rows, group] = best.scale
            if params.zero_point is not None and best.zero_point is not None:
                params.zero_point[rows, group] = best.zero_point
            if gram_II is not None:
                error_IN[own] = torch.cat([tile.lost(best, full.spec) for tile in tiles])
    return params
