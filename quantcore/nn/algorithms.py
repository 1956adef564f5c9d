"""Algorithms on a model in memory: its decoder blocks, one after the other, as the pipeline does it from files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quantcore.blockwise.algorithms import BlockAlgorithms
from quantcore.blockwise.running_block import CalibrationStreams, RunningBlock
from quantcore.calibration.ranges import Activations, quantized_activations
from quantcore.calibration.reduction import Span
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.errors import CalibrationError, ModelError
from quantcore.nn.calibration import evaluating, run, shown
from quantcore.nn.log import log
from quantcore.numerics.affine import QParams
from quantcore.rotation.model_rotation import untie
from quantcore.runtime.arguments import Arguments
from quantcore.runtime.hidden import Hidden
from quantcore.runtime.relay import Outside, blocks_replaced

EDGE_PROBE_LEN = 32


@dataclass(frozen=True)
class Applied:
    """What the algorithms chose: how each layer's weight is read, and the ranges of its input and output."""

    weights: dict[LayerPlan, QParams]
    activations: dict[LayerPlan, Activations]


def apply_algorithms(
    model: nn.Module, config: Config, modules: dict[LayerPlan, nn.Module], batches: Sequence[Any]
) -> Applied:
    """Quantize the layers inside the decoder blocks of ``model`` in place, as ``config.algo_config`` says.

    The weights then are what the codes stand for. Layers outside the blocks, and those whose weights stay float, are
    left alone. Raises ModelError for a model that is no chain of blocks, CalibrationError for no batches, and what
    ``BlockAlgorithms`` raises.
    """
    if not batches:
        raise CalibrationError(
            "The dataloader gave no batch, and the algorithms of algo_config learn from some.",
            code="no_calibration_data",
            hint="Give quantize_model a dataloader with a few batches, or leave algo_config out.",
        )
    blocks = find_blocks(model, modules)
    dtype = next(iter(modules.values())).get_parameter("weight").dtype
    algorithms = BlockAlgorithms(config, dtype)
    weights: dict[LayerPlan, QParams] = {}
    activations: dict[LayerPlan, Activations] = {}
    with evaluating(model), torch.no_grad():
        streams = _open_streams(model, blocks, batches, algorithms)
        for index, block in enumerate(shown(blocks, "quantize")):
            inside = {id(module) for module in block.modules()}
            layers = {
                plan: one for plan, one in modules.items() if id(one) in inside and plan.config.weight is not None
            }
            at = RunningBlock(block, index, streams)
            prepared = algorithms.prepare(at, layers)
            if streams.probe is not None:
                streams.probe.advance(block, index)
            for solved in algorithms.solve(at, layers, prepared):
                weights[solved.layer] = solved.quantized.params
            for warning in prepared.warnings:
                log.warning(warning.message)
            activations |= prepared.activations
            with quantized_activations(layers, prepared.activations):
                at.advance_quantized()
        _rotate_outside(model, blocks, algorithms, streams)
    return Applied(weights, activations)


def find_blocks(model: nn.Module, modules: dict[LayerPlan, nn.Module]) -> nn.ModuleList:
    """The list of modules that holds most of the layers. Raises ModelError if there is none."""
    wanted = {id(module) for module in modules.values()}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    counts = [sum(id(part) in wanted for part in blocks.modules()) for blocks in lists]
    if not any(counts):
        raise ModelError(
            "Algorithms work on decoder blocks, and this model has no list of modules with layers to quantize.",
            code="unsupported_architecture",
            hint="Leave algo_config out: dataclasses.replace(config, algo_config=()).",
        )
    return lists[counts.index(max(counts))]


def _open_streams(
    model: nn.Module, blocks: nn.ModuleList, batches: Sequence[Any], algorithms: BlockAlgorithms
) -> CalibrationStreams:
    """What reaches the first block from every batch."""
    hidden = Hidden([])
    with _without_cache(model):
        for batch in batches:
            arguments = [Arguments() for _ in blocks]
            with blocks_replaced(blocks, arguments, num_returned=hidden.num_returned) as relay:
                hidden.states.append(relay.run(partial(run, model, batch)))
            hidden.num_returned = relay.num_returned
            hidden.arguments.add(arguments)
    algorithms.rotate_states(hidden)
    shortest = min(range(len(batches)), key=lambda window: hidden.states[window].numel())
    probe = Hidden([hidden.states[shortest]], hidden.arguments.only(shortest))
    return CalibrationStreams(
        hidden,
        Span(sum(len(state) for state in hidden.states)),
        probe=probe,
        reference=hidden.copy() if algorithms.compares else None,
        through_quantized=algorithms.through_quantized,
    )


def _rotate_outside(
    model: nn.Module, blocks: nn.ModuleList, algorithms: BlockAlgorithms, streams: CalibrationStreams
) -> None:
    """Rotate embeddings and head of a Transformers model, if the config says so. They do not share a weight then."""
    if not algorithms.rotates_stream:
        return
    assert streams.probe is not None
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            "A rotated stream needs to know the model's embedding and head, and this is no Transformers model.",
            code="cannot_rotate",
            hint="Leave out r1.",
        )
    untie(model)
    model.config.tie_word_embeddings = False
    like = streams.probe.states[0]
    with _without_cache(model), blocks_replaced(blocks, [Arguments() for _ in blocks], num_returned=0) as relay:
        outside = Outside(model, relay, like.device)
        ids_NT = torch.arange(like.shape[1])[None] % model.config.get_text_config().vocab_size
        relay.run(lambda: outside(like))
        algorithms.rotate_outside(model, lambda: outside.embed(ids_NT), outside, like)


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Blocks run several times on the same tokens: nothing may be remembered in between."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    if before:
        config.use_cache = False
    try:
        yield
    finally:
        if before:
            config.use_cache = before
