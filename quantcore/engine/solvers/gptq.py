"""GPTQ (Frantar et al. 2022) and its successors: rounds weights input by input, so that later ones compensate errors.

With H = gram + damping = U U^T, U upper triangular, a row of errors E = weights - codes costs E H E^T = |E U|^2. Column
k of E U depends only on the inputs up to k. It is least when weight k plus sum_{l < k} E_l U_lk / U_kk is rounded to
nearest: that is GPTQ, seen as Babai's nearest plane (Chen et al. 2025, "The Geometry of LLM Quantization"). It takes
one Cholesky factorization and no inverse. U_kk^2 is the final cost of an error in weight k, by which the ranges are
searched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from quantcore.config.algorithms import GPTAQConfig, GPTQConfig, QronosConfig, YAQAConfig
from quantcore.config.grouping import PER_TOKEN
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.calibration.stats import Needs, Stats
from quantcore.engine.observers import observer_for
from quantcore.engine.solvers import NONE, SOLVERS, GlobalScales, Weights
from quantcore.engine.solvers.columns import Columns, Grid, RangeFinder, Table
from quantcore.engine.solvers.groups import Groups
from quantcore.engine.solvers.hessian import Hessian, order_of
from quantcore.engine.solvers.measures import GroupMeasure, Metric
from quantcore.engine.solvers.ranges import FullRange, kernel_for, search
from quantcore.engine.solvers.rows import CoupledRows, Rows
from quantcore.engine.solvers.rtn import group_by_spec, observed_ranges, round_all, search_ranges, transposed
from quantcore.formats.vectors import num_inputs
from quantcore.plan import workload
from quantcore.tensors.affine import QParams, find_params
from quantcore.tensors.qtensor import QTensor

NUM_PASSES = 1  # of coordinate descent: it reduces the error on other text by 3 %, a second one would by 1 %


@SOLVERS.add("gptq")
class GPTQ:
    """Rounds the inputs with the largest mean square first (``desc_act``), or in their own order.

    With ``static_groups`` ranges are found in the original weights. Without, those of a group are found when it is
    reached, in weights that already compensate earlier errors; ``desc_act`` then orders whole groups, and the inputs
    within each. In both cases files need no index of groups. If rows share parameters, ranges are always static.

    A pass of coordinate descent improves the codes (QuantEase, Behdin et al. 2023). A row for which rounding to nearest
    with the same parameters is better uses those codes. ``notes`` lists deviations from the config.
    """

    def __init__(self, config: GPTQConfig) -> None:
        self._config = config
        self._dtype = torch.float64 if config.hessian_dtype == "float64" else torch.float32
        self.needs = Needs(gram=True, float64=config.hessian_dtype == "float64")
        self.notes: list[str] = []

    def solve(
        self, weights: Weights, stats: Stats | None, global_scales: GlobalScales = NONE
    ) -> dict[LayerPlan, QTensor]:
        if stats is None or stats.gram_II is None or not stats.gram_II.any():
            return round_all(weights, global_scales)
        hessians: dict[tuple[int | None, int], Hessian] = {}

        def hessian(group_size: int | None, vector_size: int) -> Hessian:
            key = group_size, vector_size
            if key not in hessians:
                hessians[key] = self._hessian(stats, group_size, vector_size, weights)
            return hessians[key]

        solved: dict[LayerPlan, QTensor] = {}
        for layers in group_by_spec(weights):
            scales = [global_scales.get(layer) for layer in layers]
            own = {layer: weights[layer] for layer in layers}
            solved.update(zip(layers, self._solve_rows(own, scales, stats, hessian), strict=True))
        return {layer: solved[layer] for layer in weights}

    def _hessian(self, stats: Stats, group_size: int | None, vector_size: int, weights: Weights) -> Hessian:
        assert stats.gram_II is not None
        diagonal_I = stats.hessian_diagonal_I
        if vector_size > 1:  # inputs with one mean keep their order
            diagonal_I = diagonal_I.view(-1, vector_size).mean(1).repeat_interleave(vector_size)
        order_K = order_of(diagonal_I, group_size, act_order=self._config.desc_act)
        hessian = Hessian.of(stats.gram_II, stats.num_tokens, order_K, self._config.damp_percent, self._dtype)
        if hessian.damp_percent != hessian.wanted:
            names = ", ".join(layer.name for layer in weights)
            self.notes.append(
                f"damp_percent was raised from {hessian.wanted:.2g} to {hessian.damp_percent:.2g} for {names}: with "
                "less, the Hessian is not positive definite."
            )
        return hessian

    def _solve_rows(
        self,
        layers: Weights,
        global_scales: Sequence[torch.Tensor | None],
        stats: Stats,
        hessian_of: Callable[[int | None, int], Hessian],
    ) -> list[QTensor]:
        """Solve the weights [O, I] of layers with one spec and dtype as the rows of one weight."""
        spec, weights = next(iter(layers)).weight, list(layers.values())
        groups = [Groups.of(spec, weight_OI) for weight_OI in weights]
        group_size = groups[0].group_size
        is_static = self._config.static_groups or not groups[0].is_local or groups[0].num_scales[1] == 1
        is_static = is_static or spec.scale_type.in_two_levels  # scales that are stored together must be found together
        hessian = hessian_of(None if is_static else group_size, num_inputs(spec.format))
        target_OI, first_O = self._target(torch.cat(weights), stats, hessian)
        heights = [len(weight_OI) for weight_OI in weights]
        if is_static:
            targets = [target.to(weights[0].dtype) for target in torch.split(target_OI, heights)]
            params = self._static_params(targets, global_scales, spec, hessian)
        else:
            pairs = zip(weights, global_scales, strict=True)
            params = [FullRange.of(weight_OI, spec, scale).params() for weight_OI, scale in pairs]
        order = self._rows(layers, stats)
        target_OI = target_OI[order.order_O]
        table = Table.of(params, groups).of_rows(order.order_O)
        codes_OI = torch.empty(target_OI.shape, dtype=getattr(torch, spec.format.storage), device=target_OI.device)
        group_index_K = hessian.order_K // group_size
        group_K = group_index_K.tolist()
        for number, rows in enumerate(order.tiles):
            grid = Grid(spec, table.of_rows(rows), group_K, group_index_K)
            target_KO = transposed(target_OI[rows])[hessian.order_K]
            columns = Columns(order.moved(number, target_KO), grid)
            if first_O is not None:
                columns.value_KO[0] = first_O[order.order_O][rows]
            finder = None if is_static else self._finder(columns, hessian, group_size, weights[0].dtype)
            _choose_codes(columns, hessian, finder)
            order.note(number, target_KO, columns)
            codes_OI[rows, hessian.order_K] = spec.format.encode(columns.value_KO).T
        if not is_static:
            params = table.of_rows(order.places_O).params(heights)
        codes = (part.clone() for part in torch.split(codes_OI[order.places_O], heights))
        return [QTensor(part, own, spec) for part, own in zip(codes, params, strict=True)]

    def _rows(self, layers: Weights, stats: Stats) -> Rows:
        """Return the order of the rows of all layers, of which each may depend on those before it."""
        return Rows(sum(map(len, layers.values())))

    def _target(
        self, weight_OI: torch.Tensor, stats: Stats, hessian: Hessian
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weights to round, and another start value of the first input [O] if it differs."""
        return weight_OI, None

    def _static_params(
        self,
        targets: list[torch.Tensor],
        global_scales: Sequence[torch.Tensor | None],
        spec: QuantizationSpec,
        hessian: Hessian,
    ) -> list[QParams]:
        if not self._config.range_search:
            pairs = zip(targets, global_scales, strict=True)
            return [observed_ranges(target_OI, spec, scale) for target_OI, scale in pairs]
        squared_u_I = torch.empty_like(hessian.squared_u_K)
        squared_u_I[hessian.order_K] = hessian.squared_u_K
        return search_ranges(targets, spec, Metric(squared_u_I), global_scales)

    def _finder(self, columns: Columns, hessian: Hessian, group_size: int, dtype: torch.dtype) -> RangeFinder:
        """Return what finds a group's parameters in the current weights."""
        spec, global_O = columns.grid.spec, columns.grid.table.global_O
        kernel = kernel_for(spec, dtype, group_size, columns.value_KO.device)
        searched = partial(_searched, spec, dtype) if kernel is None else kernel

        def find(start: int, end: int) -> None:
            values_SO = columns.value_KO[start:end]
            if self._config.range_search:
                params = QParams(*searched(values_SO, hessian.squared_u_K[start:end], global_O), global_O)
            else:
                observer = observer_for(spec, PER_TOKEN)
                observer.update(values_SO.T)
                minimum_O1, maximum_O1 = observer.range()
                params = find_params(minimum_O1[:, 0], maximum_O1[:, 0], spec, dtype, global_O)
            columns.grid.put(start, params)

        return RangeFinder(group_size, find)


def _searched(
    spec: QuantizationSpec,
    dtype: torch.dtype,
    values_SO: torch.Tensor,
    squared_u_S: torch.Tensor,
    global_O: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scale and zero point [O] of a group of inputs, whose errors cost ``squared_u_S``."""
    full = FullRange(values_SO.amin(0), values_SO.amax(0), spec, dtype, global_O)
    tiles = Metric(squared_u_S).tiles(values_SO, slice(None), full)
    found = search(full, GroupMeasure(tiles, spec))
    return found.scale, found.zero_point


class _Shifted(GPTQ):
    """GPTQ towards other weights, W + share * W shift H^-1.

    With y the float model's input of the layer and x the quantized model's, shift = mean (y - x) x^T. |W y - Q x|^2 is,
    up to a constant, (T - Q) gram (T - Q)^T with T = W + W shift gram^-1: the least-squares weights for x. So a
    ``share`` of 1 compensates all changes made by earlier layers.
    """

    def __init__(self, config: GPTQConfig, share: float) -> None:
        super().__init__(config)
        self.needs = self.needs | Needs(shift=True)
        self._share = share

    def _target(
        self, weight_OI: torch.Tensor, stats: Stats, hessian: Hessian
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if stats.shift_II is None:
            return weight_OI, None
        shift_II = stats.shift_II.float()
        target_OI = torch.empty_like(weight_OI, dtype=torch.float32)
        firsts: list[torch.Tensor] = []
        for start in range(0, len(weight_OI), workload.SOLVED_ROWS):
            rows = slice(start, start + workload.SOLVED_ROWS)
            wide_OI = weight_OI[rows].float()
            moved_KO = (wide_OI @ shift_II).mul_(self._share).T[hessian.order_K]
            target_OI[rows, hessian.order_K] = wide_OI[:, hessian.order_K] + hessian.solve(moved_KO).T
            first_O = self._first(wide_OI, moved_KO, hessian)
            firsts += [] if first_O is None else [first_O]
        return target_OI, torch.cat(firsts) if firsts else None

    def _first(self, weight_OI: torch.Tensor, moved_KO: torch.Tensor, hessian: Hessian) -> torch.Tensor | None:
        return None


@SOLVERS.add("gptaq")
class GPTAQ(_Shifted):
    """GPTAQ (Li et al. 2025): compensates the changes of the input by earlier layers, too, by a share ``alpha``.

    The paper corrects the change of each input by the weights after it. Here the least-squares weights for all changes
    at once are the target, which gives a lower cost of the same objective.
    """

    def __init__(self, config: GPTAQConfig) -> None:
        super().__init__(config, config.alpha)


@SOLVERS.add("yaqa")
class YAQA(GPTAQ):
    """YAQA (Tseng et al. 2025, arXiv:2505.22988): rounds for the model's predictions, not for the layers' outputs.

    To second order an error E of a weight costs the model tr(E^T A E H), with A and H the second moments of the
    gradients by the layer's outputs and of its inputs (sketch A of the paper). So errors move later weights along the
    inputs, as in GPTQ, and along the outputs (``CoupledRows``). Calibration weights the tokens by their gradients.
    """

    def __init__(self, config: YAQAConfig) -> None:
        super().__init__(config)
        self._output_damp_percent = config.output_damp_percent
        self.needs = self.needs | Needs(outputs=True)

    def _rows(self, layers: Weights, stats: Stats) -> Rows:
        if not stats.outputs:
            return super()._rows(layers, stats)
        assert stats.gram_II is not None
        outputs = [stats.outputs.get(layer.name) for layer in layers]
        heights = [len(weight_OI) for weight_OI in layers.values()]
        return CoupledRows(outputs, heights, self._output_damp_percent, len(stats.gram_II), stats.gram_II.device)


@SOLVERS.add("qronos")
class Qronos(_Shifted):
    """Qronos (Zhang et al. 2025): rounds the first input's weights to the best values if all others stay.

    The other weights become the least-squares weights for x given these codes, and so on, input by input. From the
    second input on this is the same computation as GPTAQ's here with ``alpha`` 1.
    """

    def __init__(self, config: QronosConfig) -> None:
        super().__init__(config, 1.0)

    def _first(self, weight_OI: torch.Tensor, moved_KO: torch.Tensor, hessian: Hessian) -> torch.Tensor | None:
        first = hessian.order_K[0]
        return weight_OI[:, first] + moved_KO[0] / hessian.diagonal_K[0]


def _choose_codes(columns: Columns, hessian: Hessian, finder: RangeFinder | None) -> None:
    """Round all inputs, improve the codes, and let no row be worse than rounded to nearest."""
    columns.sweep(hessian.error_feedback_KK, finder)
    for _ in range(NUM_PASSES):
        columns.improve(hessian.row_scaled_KK)
    nearest = Columns(columns.target_KO, columns.grid)
    nearest.round()
    worse_O = columns.cost(hessian.gram_KK) > nearest.cost(hessian.gram_KK)
    columns.value_KO = torch.where(worse_O, nearest.value_KO, columns.value_KO)
