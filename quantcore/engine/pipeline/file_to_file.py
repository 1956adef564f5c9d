"""File to file: rounds weights that need no data, from the checkpoint into the artifact, one tensor at a time.

No text is read, no block is run and no model class is built, so that any architecture works: the plan recognizes linear
weights by names and shapes. Memory holds one weight. The pipeline's own functions round and write, so the bytes are the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from quantcore.config.algorithms import RTNConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.blockwise.results import Solved
from quantcore.engine.calibration.imatrix import GivenInputs
from quantcore.engine.containers.dequantize import open_source
from quantcore.engine.evaluation.provenance import provenance
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.pipeline.context import RunContext
from quantcore.engine.pipeline.writer import ResultWriter
from quantcore.engine.runtime.devices import default_device, release_freed_memory
from quantcore.engine.runtime.ranks import spread
from quantcore.engine.solvers.global_scale import by_global_scale, global_scale, has_global_scale
from quantcore.engine.solvers.rtn import RTN, round_to_nearest
from quantcore.engine.verification.expectation import ExpectedDigests
from quantcore.engine.verification.gate_inputs import Outcome
from quantcore.errors import at_block
from quantcore.events import Eta, Progress, Saved
from quantcore.formats.weight_layout import canonical, stored
from quantcore.tensors.qtensor import check_finite
from quantcore.tensors.source import TORCH_DTYPES, Source

ROUND = RTN(RTNConfig())
"""Rounds to nearest, in ranges that the inputs help to choose if anything is known of them."""


def round_files(context: RunContext) -> Outcome:
    """Read every weight once, choose its codes, write them, drop it. Raises NumericsError for one that is not finite.

    Processes as many blocks at a time as there are ranks, so that none is idle; each rank takes some of their layers.
    Resumes after the saved blocks.
    """
    plan, ranks, saved = context.plan, context.ranks, context.saved
    source = open_source(context.model)
    dtype = TORCH_DTYPES[context.model.headers.main_dtype]
    weights = Weights(source, dtype, default_device(), context.given)
    nothing_NT = torch.empty(0, 1, dtype=torch.long)
    expected = ExpectedDigests(EvaluationText(nothing_NT, nothing_NT[:, 0], 0, 0), torch.empty(0))
    writer = ResultWriter(context, source, expected)
    with writer.opened():
        first_block = 0 if saved is None else saved["next_block"]
        eta = Eta(plan.num_blocks - first_block)
        for begin in range(first_block, plan.num_blocks, ranks.size):
            end = min(begin + ranks.size, plan.num_blocks)
            layers = [layer for index in range(begin, end) for layer in plan.layers_of(index)]
            round_layers(layers, weights, writer)
            context.emit(Progress("quantize", end, plan.num_blocks, "block", eta.after(end - first_block)))
            if end < plan.num_blocks and context.savepoint.save(end, {}, writer.notes):
                context.emit(Saved(end, plan.num_blocks))
        round_layers((*plan.layers_of(None), *plan.layers_rounded_alone), weights, writer)
        writer.copy_the_rest()
        writer.finish()
    source_of = provenance(context.task, nothing_NT, nothing_NT) if ranks.is_first else {}
    return Outcome(writer.expected, writer.done, writer.warnings, writer.edges, source_of, None)


class Weights:
    """Reads weights one at a time, onto ``device`` and in the model's ``dtype``; ``given`` is known of their inputs."""

    def __init__(
        self, source: Source, dtype: torch.dtype, device: torch.device, given: GivenInputs | None = None
    ) -> None:
        self.source = source
        self.given = given
        self._dtype = dtype
        self._device = device

    def read(self, layer: LayerPlan) -> torch.Tensor:
        """Read the weight, [out, in]. Raises NumericsError if it holds NaN or infinity."""
        weight = self.source.read(f"{layer.name}.weight").to(self._device, self._dtype)
        check_finite(weight, layer.name)
        return canonical(weight, layer.kind)

    def read_bias(self, layer: LayerPlan) -> nn.Parameter | None:
        """Read the layer's bias if it has one."""
        name = f"{layer.name}.bias"
        if name not in self.source:
            return None
        return nn.Parameter(self.source.read(name).to(self._device, self._dtype), requires_grad=False)


def round_layers(layers: Sequence[LayerPlan], weights: Weights, writer: ResultWriter) -> None:
    """Write the codes of ``layers``, each on one rank; layers that share a global scale on the same rank."""
    groups = by_global_scale(layers)
    costs = [sum(layer.in_features * layer.out_features for layer in group) for group in groups]
    for group, owner in zip(groups, spread(costs, writer.ranks.size), strict=True):
        if writer.writes(owner):
            with at_block(group[0].block):
                for solved in rounded(group, weights, owner):
                    writer.write(solved, {})
                    release_freed_memory()
        for layer in group:
            writer.leave(layer)
            if layer.config.bias is not None:
                writer.write_bias(layer, weights.read_bias(layer))
    writer.tell()


def rounded_when_read(layers: Sequence[LayerPlan], weights: Weights) -> Callable[[str], torch.Tensor]:
    """Return a function that reads tensors: the weights and biases of ``layers`` as ``round_layers`` writes them."""
    groups = {f"{layer.name}.weight": (layer, group) for group in by_global_scale(layers) for layer in group}
    biases = {f"{layer.name}.bias": layer.config.bias for layer in layers if layer.config.bias is not None}

    def read(name: str) -> torch.Tensor:
        if name in groups:
            layer, group = groups[name]
            solved = next(solved for solved in rounded(group, weights, 0) if solved.layer is layer)
            return stored(solved.restored_OI, layer.kind)
        tensor = weights.source.read(name)
        return round_to_nearest(tensor, biases[name]).dequantize() if name in biases else tensor

    return read


def rounded(layers: Sequence[LayerPlan], weights: Weights, owner: int) -> Iterator[Solved]:
    """Yield the codes of layers that share a global scale if their spec has one; the weights then are read twice."""
    spec = layers[0].weight
    scale = global_scale(map(weights.read, layers), spec) if has_global_scale(spec) else None
    for layer in layers:
        weight_OI = weights.read(layer)
        stats = None if weights.given is None else weights.given.stats(layer.name, weight_OI.device, owner)
        scales = {} if scale is None else {layer: scale}
        [quantized] = ROUND.solve({layer: weight_OI}, stats, scales).values()
        yield Solved(layer, weight_OI, quantized, stats, owner)
