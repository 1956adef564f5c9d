"""Measures the loss of a config without GPTQ: one pass through the model, nothing is written."""

from __future__ import annotations

from torch import nn

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.engine.blockwise.algorithms import BlockAlgorithms
from quantcore.engine.blockwise.results import Prepared
from quantcore.engine.blockwise.running_block import RunningBlock
from quantcore.engine.calibration.ranges import quantized_activations
from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.evaluation.divergence import measure, summarize_both
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.provenance import identity_of
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.mixed_precision.sensitivity import Sensitivity
from quantcore.engine.runtime.hidden import Hidden
from quantcore.engine.runtime.vocabulary import in_parts
from quantcore.events import Emit, Eta, Progress
from quantcore.importing.model import Model
from quantcore.plan.planner import Plan
from quantcore.report.quality import Quality


class Trial:
    """A measurement of configs on ``text``; ranges of activations are learned on the windows of ``sensitivity``."""

    def __init__(self, model: Model, sensitivity: Sensitivity, text: EvaluationText, emit: Emit) -> None:
        self._sensitivity = sensitivity
        self._text = text
        self._emit = emit
        self._original, self._rounded = open_model(model), open_model(model)
        states_NTH = BaselineCache(identity_of(model.folder)).states(
            text.identity, lambda: self._original.last_states_NTH(text, lambda done: None)
        )
        self._states = [state[None].to(self._original.streamed.device) for state in states_NTH]

    def quality(self, config: Config, plan: Plan) -> Quality:
        """Measure the model rounded by ``config``, compared with the original (see ``report.quality``)."""
        streamed = self._rounded.streamed
        algorithms = BlockAlgorithms(config, streamed.dtype)
        hidden = streamed.embed(self._text.ids_NT, media=self._text.media)
        eta = Eta(plan.num_blocks)
        for index in range(plan.num_blocks):
            with streamed.block(index) as block:
                layers = self._modules(plan, index)
                at = self._sensitivity.at(block, index, plan)
                prepared = algorithms.prepare(at, layers)
                _round(algorithms, at, layers, prepared)
                with quantized_activations(layers, prepared.activations, block):
                    streamed.run_block(block, index, hidden)
            self._emit(Progress("trial", index + 1, plan.num_blocks, "block", eta.after(index + 1)))
        self._rounded.has_run = True
        return self._compared(algorithms, plan, hidden)

    def _compared(self, algorithms: BlockAlgorithms, plan: Plan, hidden: Hidden) -> Quality:
        with self._original.vocabulary(self._states[0]) as original, self._rounded.head() as logits:
            layers = self._modules(plan, None)
            prepared = algorithms.prepare_head(layers, logits, self._sensitivity.behind(plan))
            _round(algorithms, None, layers, prepared)
            with quantized_activations(layers, prepared.activations, logits.model):
                rounded = in_parts(logits, hidden.states[0])
                measured = measure(rounded, list(hidden.states), self._text, (original, self._states))
        return summarize_both(measured, self._text)

    def _modules(self, plan: Plan, index: int | None) -> dict[LayerPlan, nn.Module]:
        return {layer: self._rounded.streamed.find_module(layer.name) for layer in plan.layers_of(index)}


def _round(
    algorithms: BlockAlgorithms, at: RunningBlock | None, layers: dict[LayerPlan, nn.Module], prepared: Prepared
) -> None:
    """Replace the weight of each module by its dequantized codes."""
    for _ in algorithms.solve(at, layers, prepared):
        pass
