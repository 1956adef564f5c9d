"""Runs algorithms on the decoder blocks of a model in memory, one after the other, as the pipeline does from files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.engine.blockwise.algorithms import BlockAlgorithms
from quantcore.engine.blockwise.reported_errors import measured
from quantcore.engine.blockwise.results import Prepared, Solved
from quantcore.engine.blockwise.running_block import CalibrationStreams, RunningBlock
from quantcore.engine.calibration.ranges import Activations, quantized_activations
from quantcore.engine.calibration.reduction import Span
from quantcore.engine.model.kinds import Kind, inputs_of
from quantcore.engine.runtime.arguments import Arguments
from quantcore.engine.runtime.block_capture import NonBlockParts, blocks_replaced
from quantcore.engine.runtime.hidden import Hidden
from quantcore.engine.transforms.rotation.model_rotation import untie
from quantcore.errors import CalibrationError, ConfigError, ModelError
from quantcore.nn.calibration import evaluating, run
from quantcore.nn.gradients import state_gradients
from quantcore.nn.log import log
from quantcore.nn.progress import Progress
from quantcore.nn.result import EdgeResult, LayerResult
from quantcore.tensors.affine import QParams

EDGE_PROBE_LEN = 32


@dataclass(frozen=True)
class Applied:
    """The choices of the algorithms for each layer (scales of weights, ranges of activations), and the errors."""

    weights: dict[LayerPlan, QParams] = field(default_factory=dict)
    activations: dict[LayerPlan, Activations] = field(default_factory=dict)
    layers: dict[LayerPlan, LayerResult] = field(default_factory=dict)
    edges: list[EdgeResult] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def apply_algorithms(
    model: nn.Module, config: Config, modules: dict[LayerPlan, nn.Module], batches: Sequence[Any], progress: Progress
) -> Applied:
    """Quantize the layers inside the decoder blocks of ``model`` in place with ``config.algo_config``.

    The weights then are their dequantized codes. Layers outside the blocks, and those whose weights stay float, do not
    change. Raises ModelError for a model that is not a chain of blocks, CalibrationError for no batches, and any error
    of ``BlockAlgorithms``.
    """
    if config.imatrix is not None:
        raise ConfigError(
            "An importance matrix names the tensors of a checkpoint, not the modules of a model in memory.",
            code="unsupported_config",
            hint="Remove imatrix, or quantize files: quantcore.run or bitfoundry quantize.",
            field="/algo_config",
        )
    if not batches:
        raise CalibrationError(
            "The dataloader is empty, but the algorithms in algo_config need data.",
            code="no_calibration_data",
            hint="Pass quantize_model a dataloader with a few batches, or remove algo_config.",
        )
    if config.distills is not None:
        raise ConfigError(
            "distill tunes the scales of a checkpoint that is quantized block by block, not of a model in memory.",
            code="unsupported_config",
            hint="Remove distill, or quantize files: quantcore.run or bitfoundry quantize.",
            field="/algo_config",
        )
    blocks = find_blocks(model, modules)
    dtype = next(iter(modules.values())).get_parameter("weight").dtype
    algorithms = BlockAlgorithms(config, dtype)
    applied = Applied()
    with evaluating(model), torch.no_grad():
        streams = _open_streams(model, blocks, batches, algorithms)
        for index, block in enumerate(progress.track(blocks, "quantize")):
            inside = {id(module) for module in block.modules()}
            layers = {
                plan: module
                for plan, module in modules.items()
                if id(module) in inside and plan.config.weight is not None
            }
            at = RunningBlock(block, index, streams)
            prepared = algorithms.prepare(at, layers)
            if streams.probe is not None:
                streams.probe.advance(block, index)
            begin = time.monotonic()
            for solved in algorithms.solve(at, layers, prepared):
                applied.weights[solved.layer] = solved.quantized.params
                applied.layers[solved.layer] = layer_result(solved, time.monotonic() - begin)
                begin = time.monotonic()
            for warning in prepared.warnings:
                log.warning(warning.message)
            applied.warnings.extend(warning.message for warning in prepared.warnings)
            applied.edges.extend(_edges(prepared, index))
            applied.activations.update(prepared.activations)
            with quantized_activations(layers, prepared.activations, at.block):
                at.advance_quantized()
        _rotate_outside(model, blocks, algorithms, streams)
    return applied


def layer_result(solved: Solved, seconds: float) -> LayerResult:
    """Return the errors of a solved layer."""
    errors, layer = measured(solved), solved.layer
    return LayerResult(
        layer.name,
        layer.scheme,
        layer.shape,
        errors.relative_error,
        errors.sqnr_db,
        errors.output_error,
        errors.rounding_error,
        errors.num_tokens,
        seconds,
    )


def _edges(prepared: Prepared, block: int) -> Iterator[EdgeResult]:
    if prepared.edges is not None:
        for edge in prepared.edges.edges:
            yield EdgeResult(block, edge.producer, edge.consumers, prepared.fold_error)
        for rejected in prepared.edges.rejected:
            yield EdgeResult(block, rejected.producer, rejected.consumers, None, rejected.reason)


def find_blocks(model: nn.Module, modules: dict[LayerPlan, nn.Module]) -> nn.ModuleList:
    """Return the list of modules that holds most of the layers. Raises ModelError if there is none."""
    ids = {id(module) for module in modules.values()}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    counts = [sum(id(part) in ids for part in blocks.modules()) for blocks in lists]
    if not any(counts):
        raise ModelError(
            "Algorithms work on decoder blocks, but this model has no list of modules with layers to quantize.",
            code="unsupported_architecture",
            hint="Remove algo_config: dataclasses.replace(config, algo_config=()).",
        )
    return lists[counts.index(max(counts))]


def _open_streams(
    model: nn.Module, blocks: nn.ModuleList, batches: Sequence[Any], algorithms: BlockAlgorithms
) -> CalibrationStreams:
    """Return the streams of hidden states before the first block, one state for each batch."""
    hidden = Hidden([])
    with _without_cache(model):
        for batch in batches:
            arguments = [Arguments() for _ in blocks]
            with blocks_replaced(blocks, arguments, num_returned=hidden.num_returned) as relay:
                hidden.states.append(relay.run(partial(run, model, batch)))
            hidden.num_returned = relay.num_returned
            hidden.arguments.add(arguments)
    algorithms.rotate_states(hidden)
    gradients = state_gradients(model, list(blocks), batches) if algorithms.needs_backward else None
    if gradients is not None:
        algorithms.rotate_states(Hidden(gradients.states))
    shortest = min(range(len(batches)), key=lambda window: hidden.states[window].numel())
    probe = Hidden([hidden.states[shortest]], hidden.arguments.only(shortest))
    return CalibrationStreams(
        hidden,
        Span(sum(len(state) for state in hidden.states)),
        probe=probe,
        reference=hidden.copy() if algorithms.compares else None,
        gradients=gradients,
        through_quantized=algorithms.through_quantized,
    )


def _rotate_outside(
    model: nn.Module, blocks: nn.ModuleList, algorithms: BlockAlgorithms, streams: CalibrationStreams
) -> None:
    """Rotate embeddings and head of a Transformers model if the config says so; they then no longer share a weight."""
    if not algorithms.rotates_stream:
        return
    assert streams.probe is not None
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            "Rotating the stream needs the embedding and head of a Transformers model, but this is not one.",
            code="cannot_rotate",
            hint="Remove r1.",
        )
    untie(model)
    model.config.tie_word_embeddings = False
    like = streams.probe.states[0]
    with _without_cache(model), blocks_replaced(blocks, [Arguments() for _ in blocks], num_returned=0) as relay:
        outside = NonBlockParts(model, relay, like.device, Kind.causal, partial(inputs_of, model, Kind.causal))
        ids_NT = torch.arange(like.shape[1])[None] % model.config.get_text_config().vocab_size
        relay.run(lambda: outside(like))
        algorithms.rotate_outside(model, lambda: outside.embed(ids_NT), outside, like)


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Switch the key-value cache off inside the block, because blocks run several times on the same tokens."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    if before:
        config.use_cache = False
    try:
        yield
    finally:
        if before:
            config.use_cache = before
