"""The divergence that each layer's scheme causes, measured one layer at a time without quantizing the model.

To second order the divergence KL(original || changed) is half the expected square of the change of log p(y), with y
drawn from the original's own predictions: the Fisher information (Martens, "New insights and perspectives on the
natural gradient method", arXiv:1412.1193). So one pass forward and one backward through the float model, block by
block, suffice for all layers and schemes: with the gradient g of log p at a layer's output, a scheme that changes that
output by d changes log p by <g, d>. Memory holds one block, and the hidden states before every block (on disk if they
are large).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from quantcore.blockwise.algorithms import BlockAlgorithms
from quantcore.blockwise.running_block import CalibrationStreams, RunningBlock
from quantcore.calibration.ranges import Activations
from quantcore.checkpoint.experts import EXPERT
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.evaluation.model import EvaluatedModel
from quantcore.evaluation.perplexity import rows_at_a_time
from quantcore.events import Emit, Eta, Progress
from quantcore.numerics.affine import fake_quantize_activation
from quantcore.numerics.weight_layout import canonical
from quantcore.plan.planner import Plan
from quantcore.runtime.states import States, states_kept
from quantcore.runtime.streamed_model import StreamedModel

Losses = dict[tuple[str, ...], dict[str, float]]
"""Divergence in nats a token, by unit (the names of its layers) and scheme."""


@dataclass
class Call:
    """A call of a layer: its inputs [..., I], its outputs [..., O], and the gradient of log p(y) by the outputs."""

    name: str
    inputs: torch.Tensor
    outputs: torch.Tensor
    gradient: torch.Tensor = field(init=False)


@dataclass(frozen=True)
class Changed:
    """A layer in one scheme: the change of its weight [O, I], and the static parameters of its activations."""

    layer: LayerPlan
    delta_OI: torch.Tensor
    static: Activations

    def change_of_log_p(self, call: Call, module: nn.Module, gradients: Gradients) -> float:
        """Return the scheme's change of log p(y) through this call, to first order."""
        config, x, g = self.layer.config, call.inputs.detach().float(), gradients.at_outputs
        if config.input_tensors is None and config.output_tensors is None:
            return _dot(self.delta_OI.float(), gradients.of_weight)
        weight_OI = canonical(module.get_parameter("weight").data, self.layer.kind).float()
        seen = x
        if config.input_tensors is not None:
            seen = fake_quantize_activation(x, config.input_tensors, self.static.inputs).float()
        change = functional.linear(seen, self.delta_OI.float()) + functional.linear(seen - x, weight_OI)
        if config.output_tensors is not None:
            after = call.outputs.detach().float() + change
            change += fake_quantize_activation(after, config.output_tensors, self.static.outputs).float() - after
        return _dot(g, change)


@dataclass(frozen=True)
class Gradients:
    """Float32 gradients of log p(y) for a layer's call: by its output [..., O], and by its weight [O, I]."""

    at_outputs: torch.Tensor
    of_weight: torch.Tensor

    @classmethod
    def of(cls, call: Call) -> Gradients:
        g, x = call.gradient.float(), call.inputs.detach().float()
        return cls(g, g.flatten(0, -2).T @ x.flatten(0, -2))


class Sensitivity:
    """The float ``model`` and the hidden states [1, T, H] of all windows before every block and after the last.

    ``plans`` holds the config and the plan of the model in each scheme.
    """

    def __init__(
        self, model: EvaluatedModel, windows_NT: torch.Tensor, plans: Mapping[str, tuple[Config, Plan]], folder: Path,
        emit: Emit,
    ) -> None:  # fmt: skip
        self._model = model
        self._plans = plans
        self._emit = emit
        self._num_blocks = model.streamed.num_blocks
        self._num_windows, self._seq_len = windows_NT.shape
        self._eta = Eta(2 * self._num_blocks)
        self._hidden = model.streamed.embed(windows_NT)
        self._states = self._forward(folder)

    def losses(self, seed: int) -> Losses:
        """Measure every unit in every scheme; ``seed`` draws the tokens y from the original's predictions."""
        losses: Losses = {}
        gradients = self._gradients_behind(torch.Generator().manual_seed(seed))
        for index in reversed(range(self._num_blocks)):
            with self._model.streamed.block(index) as block:
                losses = self._losses_of_block(block, index, gradients) | losses
            self._tell(2 * self._num_blocks - index)
        return losses

    def at(self, block: nn.Module, index: int, plan: Plan) -> RunningBlock:
        """Return the loaded block, with the windows before it if ``plan`` calibrates on them."""
        return RunningBlock(block, index, self._streams(index, plan))

    def behind(self, plan: Plan) -> CalibrationStreams:
        """Return the streams after the last block."""
        return self._streams(self._num_blocks, plan)

    def _streams(self, index: int, plan: Plan) -> CalibrationStreams:
        if not plan.needs_calibration:
            return CalibrationStreams(None)
        states = [self._in_front_of(index, window) for window in range(self._num_windows)]
        return CalibrationStreams(replace(self._hidden, states=states))

    def _forward(self, folder: Path) -> States:
        streamed, num = self._model.streamed, self._num_windows
        first = self._hidden.states[0]
        size = (self._num_blocks + 1) * num
        states = states_kept(size, size * first.nbytes, streamed.device, folder)
        states.extend(self._hidden.states)
        for index in range(self._num_blocks):
            with streamed.block(index) as block:
                streamed.run_block(block, index, self._hidden)
            states.extend(self._hidden.states)
            self._tell(index + 1)
        self._model.has_run = True
        return states

    def _tell(self, done: int) -> None:
        self._emit(Progress("sensitivity", done, 2 * self._num_blocks, "block", self._eta.after(done)))

    def _in_front_of(self, index: int, window: int) -> torch.Tensor:
        state: torch.Tensor = self._states[index * self._num_windows + window]
        return state

    def _gradients_behind(self, generator: torch.Generator) -> list[torch.Tensor]:
        """Return d log p(y) / d(states after the last block), one [1, T, H] for each window."""
        gradients: list[torch.Tensor] = []
        with self._model.head() as logits:
            for window in range(self._num_windows):
                state = self._in_front_of(self._num_blocks, window).clone().requires_grad_()
                with torch.enable_grad():
                    log_p = _log_p_of_drawn(logits(state)[0], generator)
                    gradients += torch.autograd.grad(log_p, state)
        return gradients

    def _losses_of_block(self, block: nn.Module, index: int, gradients: list[torch.Tensor]) -> Losses:
        """Measure the losses of a block's units.

        Moves ``gradients`` from the block's outputs to its inputs, in place.
        """
        schemes = {name: self._in_scheme(block, index, *planned) for name, planned in self._plans.items()}
        modules = _in_all(list(schemes.values()), self._model.streamed)
        units: dict[str, tuple[str, ...]] = {}
        squares: dict[tuple[str, ...], dict[str, float]] = {}
        for window in range(self._num_windows):
            calls = self._pass_back(block, index, window, modules, gradients)
            units = units or units_of(calls, list(modules))
            changes = {unit: dict.fromkeys(schemes, 0.0) for unit in units.values()}
            for call in calls:
                gradients_of_call = Gradients.of(call)
                for scheme, changed in schemes.items():
                    change = changed[call.name].change_of_log_p(call, modules[call.name], gradients_of_call)
                    changes[units[call.name]][scheme] += change
            for unit, change_of in changes.items():
                sums = squares.setdefault(unit, dict.fromkeys(schemes, 0.0))
                for scheme, value in change_of.items():
                    sums[scheme] += value**2
        half_a_token = 1 / (2 * self._num_windows * self._seq_len)
        return {unit: {name: total * half_a_token for name, total in sums.items()} for unit, sums in squares.items()}

    def _pass_back(
        self, block: nn.Module, index: int, window: int, modules: Mapping[str, nn.Module], gradients: list[torch.Tensor]
    ) -> list[Call]:
        """Return the layers' calls with their gradients.

        Moves the gradient of ``window`` through the block, in place.
        """
        state = self._in_front_of(index, window).clone().requires_grad_()
        with _calls_noted(modules) as calls, torch.enable_grad():
            output = self._hidden.run_on(state, block, index, window)
            tensors = [state, *(call.outputs for call in calls)]
            gradients[window], *at_outputs = torch.autograd.grad(
                output, tensors, gradients[window], materialize_grads=True
            )
        for call, gradient in zip(calls, at_outputs, strict=True):
            call.gradient = gradient
        return [call for call in calls if call.inputs.numel()]  # without experts that got no tokens

    def _in_scheme(self, block: nn.Module, index: int, config: Config, plan: Plan) -> dict[str, Changed]:
        """Return the changes that ``config`` makes to the layers of the block, which is left unchanged."""
        streamed, layers = self._model.streamed, plan.layers_of(index)
        modules = {layer: streamed.find_module(layer.name) for layer in layers}
        before = {layer: module.get_parameter("weight").data for layer, module in modules.items()}
        at = self.at(block, index, plan)
        algorithms = BlockAlgorithms(config, streamed.dtype)
        prepared = algorithms.prepare(at, modules)
        changed: dict[str, Changed] = {}
        for solved in algorithms.solve(at, modules, prepared):
            layer = solved.layer
            delta_OI = (solved.restored_OI - solved.weight_OI.float()).to(streamed.dtype)
            changed[layer.name] = Changed(layer, delta_OI, prepared.activations.get(layer, Activations()))
            modules[layer].get_parameter("weight").data = before[layer]
        return changed


@contextmanager
def _calls_noted(modules: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """Record the calls of the modules inside the block, in their order."""
    calls: list[Call] = []

    def noting(name: str) -> Callable[..., None]:
        return lambda _, inputs, output: calls.append(Call(name, inputs[0], output))

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(module.register_forward_hook(noting(name)))
        yield calls


def units_of(calls: Sequence[Call], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the unit of each layer: all experts of a mixture, or the layers that read one tensor."""
    inputs = {call.name: id(call.inputs) for call in reversed(calls)}
    members: dict[object, list[str]] = {}
    for name in dict.fromkeys(
        [*(call.name for call in calls), *names]
    ):  # in running order, then those that did not run
        expert = EXPERT.match(name)
        members.setdefault(expert["moe"] if expert else inputs.get(name, name), []).append(name)
    return {name: tuple(unit) for unit in members.values() for name in unit}


def _in_all(schemes: Sequence[Mapping[str, Changed]], model: StreamedModel) -> dict[str, nn.Module]:
    """Return the modules of the layers that every scheme quantizes."""
    first, *others = schemes
    return {name: model.find_module(name) for name in first if all(name in other for other in others)}


def _log_p_of_drawn(logits_TV: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the sum over the tokens of log p(y), y drawn from p; part of the graph."""
    drawn = []
    for rows in rows_at_a_time(len(logits_TV)):
        log_p = functional.log_softmax(logits_TV[rows].float(), -1)
        y = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator).to(log_p.device)
        drawn.append(log_p.gather(-1, y).sum())
    return torch.stack(drawn).sum()


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.dot(a.flatten(), b.flatten()).item()
