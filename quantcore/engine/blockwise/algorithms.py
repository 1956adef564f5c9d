"""The algorithms on one decoder block: everything between its float weights and its codes.

``prepare`` runs the calibration windows through the block, moves scales along its edges and learns the ranges of
activations; ``solve`` then chooses the codes, layer by layer. Both work on whatever holds the block: the streamed model
of the pipeline or a model in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from quantcore.config.algorithms import (
    AlgoConfig,
    AutoRoundConfig,
    BiasCorrectionConfig,
    DistillConfig,
    RotationConfig,
    RTNConfig,
)
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.engine.blockwise.results import Group, Modules, Prepared, Solved
from quantcore.engine.blockwise.running_block import CalibrationStreams, RunningBlock
from quantcore.engine.blockwise.scheduler import Scheduler
from quantcore.engine.blockwise.smoother import Smoother, check_fold
from quantcore.engine.calibration.collector import StatsCollector
from quantcore.engine.calibration.expert_token_topup import MIN_TOKENS
from quantcore.engine.calibration.experts import lent_tokens, share_ranges, too_few_tokens
from quantcore.engine.calibration.imatrix import GivenInputs
from quantcore.engine.calibration.ranges import Watched, collect_ranges, learned, ranges_of_all
from quantcore.engine.calibration.reduction import Span
from quantcore.engine.calibration.stats import Stats
from quantcore.engine.runtime.hidden import Hidden
from quantcore.engine.runtime.ranks import ALONE, Ranks
from quantcore.engine.runtime.shards import put, whole
from quantcore.engine.solvers import SOLVERS, TUNERS, Tuner
from quantcore.engine.solvers.global_scale import shared_global_scales
from quantcore.engine.transforms import SMOOTHINGS
from quantcore.engine.transforms.mappings.discovery import EdgeFinder
from quantcore.engine.transforms.rotation.model_rotation import ModelRotation
from quantcore.errors import ConfigError
from quantcore.events import Warned
from quantcore.formats.weight_layout import stored

PLAIN = RTNConfig(range_search=False)


class BlockAlgorithms:
    """Runs the algorithms of ``config.algo_config`` on one block after another of a model.

    ``given``: what is known of the inputs of layers without calibration.
    """

    def __init__(
        self, config: Config, dtype: torch.dtype, ranks: Ranks = ALONE, given: GivenInputs | None = None
    ) -> None:
        self._given = given
        self._dtype = dtype
        self._ranks = ranks
        self._solver_config: AlgoConfig = PLAIN
        self._tuner: Tuner | None = None
        self._rotation_config: RotationConfig | None = None
        self._rotation: ModelRotation | None = None
        self._corrects_biases = False
        self._smoother = Smoother([algorithm for algorithm in config.algo_config if algorithm.name in SMOOTHINGS])
        for algorithm in config.algo_config:
            if isinstance(algorithm, RotationConfig):
                self._rotation_config = algorithm
            elif isinstance(algorithm, AutoRoundConfig):
                self._tuner = TUNERS.get(algorithm.name)(algorithm)
                self._solver_config = algorithm.start(inside_layer_modules=algorithm.inside_layer_modules)
            elif isinstance(algorithm, DistillConfig):
                _check_alone(algorithm.name, ranks)  # it runs after all blocks
            elif isinstance(algorithm, BiasCorrectionConfig):
                self._corrects_biases = True
            elif algorithm.name not in SMOOTHINGS:
                self._solver_config = algorithm
        solver = SOLVERS.get(self._solver_config.name)(self._solver_config)
        is_sequential: bool = getattr(self._solver_config, "true_sequential", False)
        self._scheduler = Scheduler(solver, SOLVERS.get(PLAIN.name)(PLAIN), ranks, is_sequential=is_sequential)
        self._finder = EdgeFinder()
        self._needs = self._smoother.needs | solver.needs
        self.compares = config.compares
        """True if the outputs of quantized blocks are compared with those of the float ones."""
        self.through_quantized = is_sequential or self.compares
        """True if statistics are taken behind the quantized blocks."""
        self.needs_backward = config.needs_backward
        """True if gradients of the float model's predictions are used."""
        self.needs_probe = bool(self._smoother) or self._rotation_config is not None
        self._learns = bool(self._smoother) or self._corrects_biases or self._solver_config != PLAIN

    @property
    def rotates_stream(self) -> bool:
        """True if embeddings and head must be rotated as well."""
        return self._rotation_config is not None and self._rotation_config.r1

    def rotate_states(self, hidden: Hidden) -> Hidden:
        """Rotate the hidden states in front of the first block in place, as the blocks will read them."""
        if self._rotation_config is None or not len(hidden.states):
            return hidden
        if self._rotation is None:
            self._rotation = ModelRotation(self._rotation_config, hidden.states[0].shape[-1])
        if self.rotates_stream:
            for window, state in enumerate(hidden.states):
                hidden.states[window] = self._rotation.rotate_state(state)
        return hidden

    def rotate_outside(
        self,
        model: nn.Module,
        embed: Callable[[], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        like: torch.Tensor,
    ) -> set[str]:
        """Rotate the modules around the blocks, if configured; return the names of the changed parameters."""
        return set() if self._rotation is None else self._rotation.rotate_outside(model, embed, logits, like)

    def prepare(self, at: RunningBlock, layers: Modules) -> Prepared:
        """Collect statistics and ranges, rotate, and move scales, without changing the float block's function.

        Only the stream may be rotated. Raises NumericsError if a fold changed the block's function, CalibrationError or
        NumericsError for inputs whose range cannot be learned.
        """
        names = _names(at.block, layers)
        if at.streams.calibration is None:
            return Prepared(self._given_stats(layers), {}, names)
        modules = {names[layer]: module for layer, module in layers.items()}
        advance = not at.streams.through_quantized
        rotated = self._rotate(at)
        if not self._smoother or not layers:
            with collect_ranges(layers, at.block) as ranges:
                stats = self._collect(modules, at, advance=advance)
            prepared = self._prepared(names, stats, ranges)
            prepared.changed = rotated
            return prepared
        is_static = any(layer.config.needs_calibration for layer in layers)
        before = at.update()
        discovery = self._finder.find(at.block, at.update)
        others = {name: at.block.get_submodule(name) for edge in discovery.edges for name in edge.consumers}
        stats = self._collect(others | modules, at, advance=advance and not is_static)
        changed, refused = self._smoother.smooth(at, discovery, names, stats)
        error = ((at.update() - before).norm() / before.norm()).item()
        check_fold(at, error, self._dtype)
        with collect_ranges(layers, at.block) as ranges:
            if is_static:
                at.run(advance=advance)
        prepared = self._prepared(names, stats, ranges)
        prepared.changed = rotated | changed
        prepared.warnings += refused
        prepared.edges, prepared.fold_error = discovery, error
        return prepared

    def prepare_head(
        self, layers: Modules, logits: Callable[[torch.Tensor], torch.Tensor], streams: CalibrationStreams
    ) -> Prepared:
        """Do the same as ``prepare`` for layers behind the last block; ``logits`` runs them on a window."""
        names = {layer: layer.name for layer in layers}
        if streams.calibration is None or not layers:
            return Prepared(self._given_stats(layers), {}, names)
        collector = StatsCollector({layer.name: module for layer, module in layers.items()}, self._needs, streams.span)
        alone = nn.ModuleList(layers.values())  # no attention is around them
        with torch.no_grad(), collect_ranges(layers, alone) as ranges, collector.watching():
            for state in streams.calibration.states:
                logits(state)
        return self._prepared(names, collector.stats() if self._learns else {}, ranges)

    def solve(self, at: RunningBlock | None, layers: Modules, prepared: Prepared) -> Iterator[Solved]:
        """Yield the result of each layer, whose module holds the dequantized weight by then.

        ``at`` is None for layers behind the blocks. Messages of solvers are added to the warnings of ``prepared``.
        """
        collect = None if at is None else lambda modules, owner: self._collect(modules, at, owner=owner)
        groups, global_scales = self._groups(layers, prepared), shared_global_scales(layers)
        chosen = self._scheduler.solve(groups, global_scales, prepared.warnings, collect)
        if self._tuner is not None and at is not None and at.streams.reference is not None:
            untuned = list(chosen)
            start = {solved.layer: solved.quantized for solved in untuned if solved.stats is not None}
            targets = at.streams.reference.states
            span = Span(len(targets)) if self._ranks.size == 1 else at.streams.span  # a state may have several windows
            tuned = self._tuner.tune(layers, start, at.output, targets, span)
            prepared.warnings += [Warned("tuner", note) for note in self._tuner.notes]
            self._tuner.notes.clear()
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

    def _given_stats(self, layers: Modules) -> dict[LayerPlan, Stats]:
        """Return statistics of the layers whose inputs are given, each on one of the ranks in turn."""
        if self._given is None:
            return {}
        return {
            layer: self._given.stats(layer.name, module.get_parameter("weight").device, number % self._ranks.size)
            for number, (layer, module) in enumerate(layers.items())
        }

    def _rotate(self, at: RunningBlock) -> set[str]:
        if self._rotation is None:
            return set()
        return self._rotation.rotate_block(
            at.block, at.output_of, at.probe.states[0], lambda: self._finder.find(at.block, at.update)
        )

    def _collect(
        self, modules: dict[str, nn.Module], at: RunningBlock, *, advance: bool = False, owner: int | None = None
    ) -> dict[str, Stats]:
        """Run all windows; return the statistics of the modules' inputs, or none if no algorithm needs them."""
        if not self._learns:
            at.run(advance=advance)
            return {}
        collector = StatsCollector(modules, self._needs, at.streams.span)
        with collector.watching():
            at.run(collector=collector, advance=advance)
        return collector.stats(owner)

    def _prepared(
        self, names: dict[LayerPlan, str], stats: dict[str, Stats], ranges: dict[LayerPlan, Watched]
    ) -> Prepared:
        shared, warnings = share_ranges(ranges_of_all(ranges, self._ranks))
        enough: dict[LayerPlan, Stats] = {}
        if stats:
            planned = {name: layer for layer, name in names.items()}
            seen = {layer: stats[name].num_tokens if name in stats else 0 for name, layer in planned.items()}
            named = {id(own): own.for_layers({name: planned[name].name for name in planned}) for own in stats.values()}
            enough = {
                planned[name]: named[id(own)]
                for name, own in stats.items()
                if name in planned and own.num_tokens >= MIN_TOKENS
            }
            lent = {layer: own.num_own for layer, own in enough.items() if own.num_lent}
            warnings = [*warnings, *too_few_tokens(seen), *lent_tokens(lent)]
        activations = {layer: learned(layer, shared[layer], self._dtype) for layer in shared}
        return Prepared(enough, activations, names, warnings=warnings)

    def _groups(self, layers: Modules, prepared: Prepared) -> list[Group]:
        """Group the layers that read the same input, which are solved together, in the order in which they run."""
        inside = getattr(self._solver_config, "inside_layer_modules", ())
        stats = prepared.stats
        groups: dict[object, Group] = {}
        for layer in (*stats, *(layer for layer in layers if layer not in stats)):
            own_stats = stats.get(layer) if not inside or prepared.names[layer] in inside else None
            group = groups.setdefault(layer if own_stats is None else id(own_stats), Group({}, own_stats))
            group.layers[layer] = layers[layer]
        return list(groups.values())


def _names(block: nn.Module, layers: Modules) -> dict[LayerPlan, str]:
    """Return the name of each layer inside the block."""
    names = {id(module): name for name, module in block.named_modules()}
    return {layer: names[id(module)] for layer, module in layers.items()}


def _check_alone(algorithm: str, ranks: Ranks) -> None:
    if ranks.size > 1:
        raise ConfigError(
            f"{algorithm} tunes on all windows together, which does not yet work with {ranks.size} processes.",
            code="unsupported_config",
            hint="Run it in one process, or use gptq or gptaq.",
            field="/algo_config",
        )
