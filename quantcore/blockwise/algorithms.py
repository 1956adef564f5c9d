"""The algorithms on one decoder block: everything between its float weights and its codes.

``prepare`` runs the calibration windows through the block, moves scales along its edges and learns the ranges of
activations; ``solve`` then chooses the codes, layer by layer. Both work on whatever holds the block: the streamed model
of the pipeline or a model in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import or_

import torch
from torch import nn

from quantcore.blockwise.running_block import CalibrationStreams, RunningBlock
from quantcore.calibration.collector import StatsCollector
from quantcore.calibration.experts import MIN_TOKENS, share_ranges, too_few_tokens
from quantcore.calibration.ranges import Activations, Watched, collect_ranges, learned, ranges_of_all
from quantcore.calibration.stats import Stats
from quantcore.config.algorithms import AlgoConfig, BiasCorrectionConfig, RotationConfig, RTNConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.edges.discovery import EdgeFinder, FoundEdges, listed_edges
from quantcore.edges.edge import Edge, kind_of
from quantcore.errors import ConfigError, NumericsError
from quantcore.events import Warned
from quantcore.numerics.qtensor import QTensor
from quantcore.numerics.weight_layout import canonical, stored
from quantcore.rotation.model_rotation import ModelRotation
from quantcore.runtime import workload
from quantcore.runtime.hidden import Hidden
from quantcore.runtime.ranks import ALONE, Ranks, spread
from quantcore.runtime.shards import put, whole
from quantcore.solvers import SOLVERS, TUNERS, GlobalScales, Tuner
from quantcore.solvers.rows import joined, pieces
from quantcore.solvers.shared import shared_global_scales
from quantcore.transforms import SMOOTHINGS, Consumer, Smoothing

FOLD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest relative change of a block's update by folding: rounding of the folded weights gives less, a fault far more.
"""

PLAIN = RTNConfig(range_search=False)
Modules = dict[LayerPlan, nn.Module]


@dataclass
class Prepared:
    """What is known of a block's layers once its scales are where they stay.

    ``names`` are those of the layers in the block. ``changed``: parameters (names in the block) that have new values,
    those to be quantized among them. ``edges`` is None where no scale was moved; ``fold_error`` is how much moving them
    changed the block's update.
    """

    stats: dict[LayerPlan, Stats]
    activations: dict[LayerPlan, Activations]
    names: dict[LayerPlan, str] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    warnings: list[Warned] = field(default_factory=list)
    edges: FoundEdges | None = None
    fold_error: float | None = None


@dataclass(frozen=True)
class Solved:
    """One layer's result: ``weight_OI`` as it was before rounding (float, folded), its codes, and the rank that found
    them."""

    layer: LayerPlan
    weight_OI: torch.Tensor
    quantized: QTensor
    stats: Stats | None
    owner: int = 0

    @cached_property
    def restored_OI(self) -> torch.Tensor:
        """What the codes stand for, float32."""
        return self.quantized.dequantize()


@dataclass(frozen=True)
class Group:
    """Layers that read the same input, and what is known of it: None if that is too little, or not to be used."""

    layers: Modules
    stats: Stats | None


class BlockAlgorithms:
    """What ``config.algo_config`` asks for, made once for a model."""

    def __init__(self, config: Config, dtype: torch.dtype, ranks: Ranks = ALONE) -> None:
        self._dtype = dtype
        self._ranks = ranks
        self._solver_config: AlgoConfig = PLAIN
        self._tuner: Tuner | None = None
        self._rotation_config: RotationConfig | None = None
        self._rotation: ModelRotation | None = None
        self._corrects_biases = False
        self._smoothings: list[tuple[AlgoConfig, Smoothing]] = []
        for one in config.algo_config:
            if isinstance(one, RotationConfig):
                self._rotation_config = one
            elif one.name in SMOOTHINGS:
                self._smoothings.append((one, SMOOTHINGS.get(one.name)(one)))
            elif one.name in TUNERS:
                _check_alone(one.name, ranks)
                self._tuner, self._solver_config = TUNERS.get(one.name)(one), RTNConfig()
            elif isinstance(one, BiasCorrectionConfig):
                self._corrects_biases = True
            else:
                self._solver_config = one
        self._solver = SOLVERS.get(self._solver_config.name)(self._solver_config)
        self._plain = SOLVERS.get(PLAIN.name)(PLAIN)
        self._finder = EdgeFinder()
        self._said: set[object] = set()
        self._sequential: bool = getattr(self._solver_config, "true_sequential", False)
        self._needs = reduce(or_, (smoothing.needs for _, smoothing in self._smoothings), self._solver.needs)
        self.compares = config.compares
        """Whether what the quantized blocks give is compared with what the float ones do."""
        self.through_quantized = self._sequential or self.compares
        """Whether statistics are taken behind the quantized blocks."""
        self.needs_probe = bool(self._smoothings) or self._rotation_config is not None
        self._learns = bool(self._smoothings) or self._corrects_biases or self._solver_config != PLAIN

    @property
    def rotates_stream(self) -> bool:
        """Whether what lies around the blocks has to be rotated as well."""
        return self._rotation_config is not None and self._rotation_config.r1

    def rotate_states(self, hidden: Hidden) -> Hidden:
        """The hidden states in front of the first block, in place, as the blocks will read them."""
        if self._rotation_config is None or not len(hidden.states):
            return hidden
        if self._rotation is None:
            self._rotation = ModelRotation(self._rotation_config, hidden.states[0].shape[-1])
        if self.rotates_stream:
            for window, state in enumerate(hidden.states):
                hidden.states[window] = self._rotation.rotate_state(state)
        return hidden

    def rotate_outside(
        self, model: nn.Module, embed: Callable[[], torch.Tensor], logits: Callable[[torch.Tensor], torch.Tensor],
        like: torch.Tensor,
    ) -> set[str]:  # fmt: skip
        """Rotate what lies around the blocks, if that is asked for; the names of the changed parameters."""
        return set() if self._rotation is None else self._rotation.rotate_outside(model, embed, logits, like)

    def prepare(self, at: RunningBlock, layers: Modules) -> Prepared:
        """Statistics, scales, ranges: leaves the float block computing what it computed, in a rotated stream or not.

        Raises NumericsError if a fold changed the block's function, CalibrationError or NumericsError for inputs whose
        range cannot be learned.
        """
        if at.streams.calibration is None:
            return Prepared({}, {})
        names = _names(at.block, layers)
        modules = {names[layer]: module for layer, module in layers.items()}
        advance = not at.streams.through_quantized
        rotated = self._rotate(at)
        if not self._smoothings:
            with collect_ranges(layers) as ranges:
                stats = self._collect(modules, at, advance=advance)
            prepared = self._prepared(names, stats, ranges)
            prepared.changed = rotated
            return prepared
        is_static = any(layer.config.needs_calibration for layer in layers)
        before = at.update()
        found = self._finder.find(at.block, at.update)
        others = {name: at.block.get_submodule(name) for edge in found.edges for name in edge.consumers}
        stats = self._collect(others | modules, at, advance=advance and not is_static)
        changed, refused = self._smooth(at, found, names, stats)
        error = ((at.update() - before).norm() / before.norm()).item()
        _check_fold(at.index, error, self._dtype)
        with collect_ranges(layers) as ranges:
            if is_static:
                at.run(advance=advance)
        prepared = self._prepared(names, stats, ranges)
        prepared.changed = rotated | changed
        prepared.warnings += refused
        prepared.edges, prepared.fold_error = found, error
        return prepared

    def prepare_head(
        self, layers: Modules, logits: Callable[[torch.Tensor], torch.Tensor], streams: CalibrationStreams
    ) -> Prepared:
        """As ``prepare``, for layers behind the last block; ``logits`` runs them on a window."""
        if streams.calibration is None or not layers:
            return Prepared({}, {})
        names = {layer: layer.name for layer in layers}
        collector = StatsCollector({layer.name: module for layer, module in layers.items()}, self._needs, streams.span)
        with torch.no_grad(), collect_ranges(layers) as ranges, collector.watching():
            for state in streams.calibration.states:
                logits(state)
        return self._prepared(names, collector.stats() if self._learns else {}, ranges)

    def solve(self, at: RunningBlock | None, layers: Modules, prepared: Prepared) -> Iterator[Solved]:
        """Codes for every layer; its module holds what they stand for when a result is given.

        ``at`` is None for layers behind the blocks. What solvers have to say is added to the warnings of ``prepared``.
        """
        chosen = self._solve_groups(at, layers, prepared)
        if self._tuner is not None and at is not None and at.streams.reference is not None:
            untuned = list(chosen)
            start = {solved.layer: solved.quantized for solved in untuned if solved.stats is not None}
            tuned = self._tuner.tune(layers, start, at.output, at.streams.reference.states)
            chosen = (replace(solved, quantized=tuned.get(solved.layer, solved.quantized)) for solved in untuned)
        for solved in chosen:
            restored = solved.restored_OI
            module = layers[solved.layer]
            put(module.get_parameter("weight"), stored(restored.to(self._dtype), solved.layer.kind))
            if self._corrects_biases and solved.stats is not None and getattr(module, "bias", None) is not None:
                bias = module.get_parameter("bias")
                lost = (solved.weight_OI.float() - restored) @ solved.stats.mean_I
                put(bias, whole(bias) + lost.to(bias.dtype))
                prepared.changed.add(f"{prepared.names[solved.layer]}.bias")
            yield solved

    def _solve_groups(self, at: RunningBlock | None, layers: Modules, prepared: Prepared) -> Iterator[Solved]:
        """The solver's codes, input by input."""
        global_scales = shared_global_scales(layers)
        groups = self._groups(layers, prepared)
        owners = _owners(groups, self._ranks.size)
        together = self._solved_together(groups)
        mine = [number for number, owner in enumerate(owners) if owner == self._ranks.rank and number not in together]
        at_once = self._ranks.size > 1 and not self._sequential
        ahead = {}
        if at_once:
            weights_of = ((number, _weights(one)) for number, one in enumerate(groups) if number not in together)
            known = {number: weights for number, weights in weights_of if number in mine}
            ahead = {number: self._solve_group(groups[number], known.pop(number), global_scales) for number in mine}
        for number, group in enumerate(groups):
            if self._sequential and number and group.stats is not None and at is not None:
                again = self._collect(
                    {layer.name: module for layer, module in group.layers.items()}, at, owner=owners[number]
                )
                group = replace(group, stats=next(iter(again.values()), group.stats))
            if number in together:
                quantized, notes = self._solve_by_rows(group, _weights(group), global_scales, owners[number])
            else:
                if not at_once:
                    weights = _weights(group)
                    if number in mine:
                        ahead[number] = self._solve_group(group, weights, global_scales)
                quantized, notes = self._ranks.share(ahead.pop(number, ([], [])), owners[number])
            prepared.warnings += [Warned("solver", note) for note in notes]
            for (layer, module), one in zip(group.layers.items(), quantized, strict=True):
                weight_OI = canonical(whole(module.get_parameter("weight")), layer.kind)
                yield Solved(layer, weight_OI, one, group.stats, owners[number])

    def _solved_together(self, groups: list[Group]) -> set[int]:
        """The groups that all ranks solve, each some rows: else most of them would wait for one."""
        size = self._ranks.size
        rows = [sum(layer.out_features for layer in group.layers) for group in groups]
        widths = [next(iter(group.layers)).in_features for group in groups]
        costs = [sum(workload.solving_flops(width, count)) for width, count in zip(widths, rows, strict=True)]
        chosen = set(range(len(groups))) if self._sequential and size > 1 else workload.too_large_for_one(costs, size)
        has_gram = [group.stats is not None and self._solver.needs.gram for group in groups]
        return {number for number in chosen if rows[number] > workload.SOLVED_ROWS and has_gram[number]}

    def _solve_by_rows(
        self, group: Group, weights: dict[LayerPlan, torch.Tensor], global_scales: GlobalScales, owner: int
    ) -> tuple[list[QTensor], list[str]]:
        """``_solve_group`` by all ranks. Each factorizes the matrix, which only the ``owner`` had, for itself."""
        group = replace(group, stats=self._ranks.share(group.stats, owner))
        cut = pieces(weights, global_scales)
        mine = joined(cut[number] for number in self._ranks.part(len(cut)))
        own = {layer: weights[layer][rows] for layer, rows in mine.items()}
        quantized, notes = self._solve_group(group, own, global_scales) if mine else ([], [])
        found = self._ranks.gather((dict(zip(mine, quantized, strict=True)), notes))
        all_rows = [QTensor.joined([rows[layer] for rows, _ in found if layer in rows]) for layer in weights]
        return all_rows, list(dict.fromkeys(note for _, notes in found for note in notes))

    def _solve_group(
        self, group: Group, weights: dict[LayerPlan, torch.Tensor], global_scales: GlobalScales
    ) -> tuple[list[QTensor], list[str]]:
        """The codes of its layers, and what the solver has to say."""
        solver = self._plain if group.stats is None else self._solver
        solved = solver.solve(weights, group.stats, global_scales)
        notes = list(solver.notes)
        solver.notes.clear()
        return [solved[layer] for layer in weights], notes

    def _rotate(self, at: RunningBlock) -> set[str]:
        if self._rotation is None:
            return set()
        return self._rotation.rotate_block(
            at.block, at.output_of, at.probe.states[0], lambda: self._finder.find(at.block, at.update)
        )

    def _collect(
        self, modules: dict[str, nn.Module], at: RunningBlock, *, advance: bool = False, owner: int | None = None
    ) -> dict[str, Stats]:
        """Run all windows; the statistics of the modules' inputs, where any algorithm asks for them."""
        if not self._learns:
            at.run(advance=advance)
            return {}
        collector = StatsCollector(modules, self._needs, at.streams.span)
        with collector.watching():
            at.run(collector=collector, advance=advance)
        return collector.stats(owner)

    def _smooth(
        self, at: RunningBlock, found: FoundEdges, names: dict[LayerPlan, str], stats: dict[str, Stats]
    ) -> tuple[set[str], list[Warned]]:
        """Choose and fold the scales of all edges, one smoothing after the other; ``stats`` follow.

        The names of the parameters that changed, and what is to be said of edges that a config lists in vain.
        """
        planned = {name: layer for layer, name in names.items()}
        changed: set[str] = set()
        refused: list[Warned] = []
        for config, smoothing in self._smoothings:
            listing = getattr(config, "scaling_layers", ())
            listed = listed_edges(at.block, at.update, listing, found) if listing else found
            if listing:
                refused += self._refused(listed)
            for edge in listed.edges:
                consumers = [
                    Consumer(_weight(at.block, name), stats[name], planned.get(name))
                    for name in edge.consumers
                    if name in stats and stats[name].num_tokens >= MIN_TOKENS
                ]
                if all(consumer.layer is None for consumer in consumers):
                    continue
                scale = smoothing.choose(edge, consumers)
                if scale is not None:
                    changed.update(edge.fold(at.block, scale))
                    _divide(stats, edge, scale)
        return changed, refused

    def _refused(self, listed: FoundEdges) -> list[Warned]:
        """Each edge of a config's ``scaling_layers`` that is none, said once a model."""
        new = [one for one in listed.rejected if (one.producer, one.consumers) not in self._said]
        self._said.update((one.producer, one.consumers) for one in new)
        return [
            Warned(
                "edge_rejected",
                f"No scale can move from {one.producer} to {', '.join(one.consumers)}, as scaling_layers wants:"
                f" {one.reason}.",
            )
            for one in new
        ]

    def _prepared(
        self, names: dict[LayerPlan, str], stats: dict[str, Stats], ranges: dict[LayerPlan, Watched]
    ) -> Prepared:
        shared, warnings = share_ranges(ranges_of_all(ranges, self._ranks))
        known: dict[LayerPlan, Stats] = {}
        if stats:
            planned = {name: layer for layer, name in names.items()}
            seen = {layer: stats[name].num_tokens if name in stats else 0 for name, layer in planned.items()}
            known = {
                planned[name]: one for name, one in stats.items() if name in planned and one.num_tokens >= MIN_TOKENS
            }
            warnings = [*warnings, *too_few_tokens(seen)]
        activations = {layer: learned(layer, shared[layer], self._dtype) for layer in shared}
        return Prepared(known, activations, names, warnings=warnings)

    def _groups(self, layers: Modules, prepared: Prepared) -> list[Group]:
        """The layers that are solved together: those that read the same input, in the order in which they run."""
        wanted = getattr(self._solver_config, "inside_layer_modules", ())
        stats = prepared.stats
        groups: dict[object, Group] = {}
        for layer in (*stats, *(layer for layer in layers if layer not in stats)):
            known = stats.get(layer) if not wanted or prepared.names[layer] in wanted else None
            group = groups.setdefault(layer if known is None else id(known), Group({}, known))
            group.layers[layer] = layers[layer]
        return list(groups.values())


def _owners(groups: list[Group], size: int) -> list[int]:
    """The rank that solves each group: the one that has the matrices of its input."""
    rounding = spread([sum(math.prod(layer.shape) for layer in group.layers) for group in groups], size)
    return [owner if group.stats is None else group.stats.owner for owner, group in zip(rounding, groups, strict=True)]


def _weights(group: Group) -> dict[LayerPlan, torch.Tensor]:
    """[out, in] of its layers. All ranks call it where these are sharded."""
    return {
        layer: canonical(whole(module.get_parameter("weight")), layer.kind) for layer, module in group.layers.items()
    }


def _names(block: nn.Module, layers: Modules) -> dict[LayerPlan, str]:
    """What the block calls the layers, in its own words."""
    names = {id(module): name for name, module in block.named_modules()}
    return {layer: names[id(module)] for layer, module in layers.items()}


def _weight(block: nn.Module, name: str) -> torch.Tensor:
    """[out, in], perhaps in slices."""
    module = block.get_submodule(name)
    return canonical(module.get_parameter("weight"), kind_of(module))


def _divide(stats: dict[str, Stats], edge: Edge, scale_F: torch.Tensor) -> None:
    """Let the statistics of the edge's consumers follow the fold; those that were one object stay one."""
    before = {name: stats[name] for name in edge.consumers if name in stats}
    after = {id(one): one.divided(edge.spread(scale_F)) for one in before.values()}
    stats.update({name: after[id(one)] for name, one in before.items()})


def _check_alone(algorithm: str, ranks: Ranks) -> None:
    if ranks.size > 1:
        raise ConfigError(
            f"{algorithm} tunes a block on all windows together, which {ranks.size} processes cannot share yet.",
            code="unsupported_config",
            hint="Run it in one process, or take gptq or gptaq.",
            field="/algo_config",
        )


def _check_fold(index: int, error: float, dtype: torch.dtype) -> None:
    if error <= FOLD_TOLERANCE[dtype]:
        return
    raise NumericsError(
        f"Moving scales changed what decoder block {index} computes by {error:.1e} of its update;"
        f" {FOLD_TOLERANCE[dtype]:.0e} is allowed for {dtype}.",
        code="fold_changed_the_model",
        hint="Leave smoothquant, autosmoothquant and awq out, or give the checkpoint in float32.",
    )
