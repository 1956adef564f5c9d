"""All hidden states that a job takes through the decoder blocks, in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch

from quantcore.engine.blockwise.algorithms import BlockAlgorithms
from quantcore.engine.blockwise.backward import BackwardPass, StateGradients
from quantcore.engine.blockwise.running_block import CalibrationStreams, RunningBlock
from quantcore.engine.blockwise.savepoint import SavePoint, Stream
from quantcore.engine.calibration.ranges import quantized_activations
from quantcore.engine.calibration.reduction import Span
from quantcore.engine.data.windows import Windows
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.model.kinds import Kind
from quantcore.engine.pipeline.context import RunContext
from quantcore.engine.pipeline.file_to_file import Weights, rounded_when_read
from quantcore.engine.runtime.devices import held_memory_bytes
from quantcore.engine.runtime.hidden import Hidden
from quantcore.engine.runtime.states import states_kept
from quantcore.engine.runtime.streamed_model import StreamedModel
from quantcore.events import Eta, Progress
from quantcore.plan.planner import Plan
from quantcore.plan.workload import NUM_PROBES

RoundedAlone = Callable[[], AbstractContextManager[None]]
EDGE_PROBE_LEN = 32  # tokens for the proof of edges


@dataclass
class JobStreams:
    """The hidden states before the next block.

    ``learning`` is the input of the algorithms. ``held_out`` are this rank's evaluation windows, from number
    ``first_held_out`` on, through the float blocks; None if nothing needs them. ``logit_probes`` are the first
    evaluation windows through the quantized blocks: the files must give the same logits.
    """

    model: StreamedModel
    learning: CalibrationStreams
    held_out: Hidden | None
    first_held_out: int
    logit_probes: Hidden

    @classmethod
    def begin(
        cls,
        context: RunContext,
        model: StreamedModel,
        algorithms: BlockAlgorithms,
        calibration: Windows,
        evaluation: EvaluationText,
        *,
        with_held_out: bool,
        alone: RoundedAlone | None,
    ) -> Self:
        """Embed this rank's windows. Large numbers of calibration windows are stored on the disk of the result.

        The streams of quantized blocks are embedded inside ``alone``, see ``rounded_alone``.
        """
        learning = _open_learning(context, model, algorithms, calibration, alone)
        ids_NT, media, own = evaluation.ids_NT, evaluation.media, slice(NUM_PROBES)
        with nullcontext() if alone is None else alone():
            probes = algorithms.rotate_states(model.embed(ids_NT[own], media=media[own]))
        part = context.ranks.part(len(ids_NT))
        own = slice(part.start, part.stop)
        held_out = model.embed(ids_NT[own], media=media[own]) if with_held_out else None
        return cls(model, learning, held_out, part.start, probes)

    def take_gradients(self, gradients: StateGradients, algorithms: BlockAlgorithms) -> None:
        """Learn from these gradients of this rank's calibration windows, too, before the first block."""
        algorithms.rotate_states(Hidden(gradients.states))
        self.learning.gradients = gradients

    def enter(self, index: int) -> None:
        """Take all streams from the encoder into the decoder if block ``index`` is the decoder's first."""
        learning = self.learning
        self.model.enter(
            index, learning.calibration, learning.reference, learning.probe, self.held_out, self.logit_probes
        )

    def at(self, block: torch.nn.Module, index: int) -> RunningBlock:
        """Return the loaded block ``index`` with the streams that the algorithms learn from."""
        return RunningBlock(block, index, self.learning)

    def run_float(self, at: RunningBlock) -> None:
        """Take the held-out windows through the block with its original weights."""
        self.model.run_block(at.block, at.index, self.held_out)

    def run_prepared(self, at: RunningBlock) -> None:
        """Take the edge probe through the block after its scales have moved, before its weights are rounded."""
        self.model.run_block(at.block, at.index, self.learning.probe)

    def run_quantized(self, at: RunningBlock) -> None:
        """Take the streams of quantized blocks through this block."""
        self.model.run_block(at.block, at.index, self.logit_probes)
        at.advance_quantized()

    def save(self, savepoint: SavePoint, next_block: int, notes: Callable[[], Mapping[str, Any]]) -> bool:
        """Save all streams before ``next_block``, unless it is the end or blocks get more than their states.

        Values that blocks pass on, and what a decoder gets from its encoder, are only kept in memory: a job that stops
        there starts again from the beginning, or from the decoder's first block.
        """
        is_last = next_block == self.model.num_blocks
        if is_last or next_block > self.model.starts[-1] > 0 or self.logit_probes.arguments.pass_values_on:
            return False
        return savepoint.save(next_block, self._by_name(), notes)

    def restore(self, savepoint: SavePoint, saved: Mapping[str, Any] | None) -> int:
        """Restore the streams from ``saved``. Returns the number of the next block: 0 without ``saved``."""
        if saved is None:
            return 0
        savepoint.restore(saved, self._by_name())
        next_block: int = saved["next_block"]
        return next_block

    def _by_name(self) -> dict[str, Stream]:
        first = self.learning.span.windows.start
        named = {
            "calibration": (self.learning.calibration, first, False),
            "reference": (self.learning.reference, first, False),
            "probe": (self.learning.probe, 0, True),
            "probes": (self.logit_probes, 0, True),
            "held_out": (self.held_out, self.first_held_out, False),
        }
        return {name: Stream(hidden.states, start, shared) for name, (hidden, start, shared) in named.items() if hidden}


def rounded_alone(model: StreamedModel, plan: Plan, weights: Weights, *, with_towers: bool) -> RoundedAlone | None:
    """Return a context in which embedding and towers of ``model`` compute as those of the result.

    Returns None if they are the same. Towers run only for images and sound: ``with_towers``.
    """
    layers = tuple(layer for layer in plan.layers if layer.is_embedding or (with_towers and layer.is_in_tower))

    @contextmanager
    def as_in_result() -> Iterator[None]:
        modules = {layer: model.find_module(layer.name) for layer in layers}
        with model.reading(rounded_when_read(layers, weights)), quantized_activations(modules, {}, model.model):
            yield

    return as_in_result if layers else None


def no_gradients(model: StreamedModel) -> str | None:
    """Return why there can be no gradients of the model's predictions; None if there can."""
    if model.kind is not Kind.causal:
        return f"A model of the kind '{model.kind}' does not predict the next token"
    if model.num_shards > 1:
        return "Gradients need whole blocks, and here each process holds a part of a block"
    return None


def find_gradients(context: RunContext, model: StreamedModel, calibration: Windows) -> StateGradients:
    """Take this rank's calibration windows forward and backward through the float model. All ranks call it.

    The task's seed draws tokens from its predictions. A job that resumes does it again, with the same result.
    """
    windows = Span(len(calibration.ids_NT), context.ranks).windows
    eta = Eta(2 * model.num_blocks)

    def tell(done: int, total: int) -> None:
        context.emit(Progress("gradients", done, total, "block", eta.after(done), held_memory_bytes()))

    own = slice(windows.start, windows.stop)
    hidden = model.embed(calibration.ids_NT[own], media=calibration.media[own])
    return BackwardPass(model, hidden, context.folder, tell, windows.start).gradients(context.task.calibration.seed)


def _open_learning(
    context: RunContext,
    model: StreamedModel,
    algorithms: BlockAlgorithms,
    windows: Windows,
    alone: RoundedAlone | None,
) -> CalibrationStreams:
    """Embed this rank's calibration windows and the edge probe, as far as the algorithms need them."""
    if not context.plan.needs_calibration:
        return CalibrationStreams(None)
    span = Span(len(windows.ids_NT), context.ranks)
    part, own = span.windows, slice(span.windows.start, span.windows.stop)

    def embedded() -> Hidden:
        max_bytes = context.plan.memory_of_rank()["activations"] // context.ranks.size
        states = states_kept(len(part), max_bytes, model.device, context.folder)
        return algorithms.rotate_states(model.embed(windows.ids_NT[own], states, windows.media[own]))

    with nullcontext() if alone is None else alone():
        calibration = embedded()
    reference = None
    if algorithms.compares:
        reference = calibration.copy() if alone is None else embedded()
    probe = model.embed(windows.ids_NT[:1, :EDGE_PROBE_LEN]) if algorithms.needs_probe else None
    return CalibrationStreams(
        calibration,
        span,
        probe=None if probe is None else algorithms.rotate_states(probe),
        reference=reference,
        through_quantized=algorithms.through_quantized,
    )
