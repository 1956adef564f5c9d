"""The divergence that each layer's scheme causes, measured one layer at a time without quantizing the model.

One pass backward gives the gradient g of log p at every layer's output (see ``engine.blockwise.backward``). A scheme
that changes that output by d changes log p by <g, d>, and half of its expected square is the divergence. So one pass
suffices for all layers and schemes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from quantcore.checkpoint.fused import group_of
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.blockwise.algorithms import BlockAlgorithms
from quantcore.engine.blockwise.backward import BackwardPass, Call, Gradients
from quantcore.engine.blockwise.running_block import CalibrationStreams, RunningBlock
from quantcore.engine.calibration.ranges import Activations
from quantcore.engine.evaluation.model import EvaluatedModel
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.events import Emit, Eta, Progress
from quantcore.formats.weight_layout import canonical
from quantcore.plan.planner import Plan
from quantcore.tensors.affine import QParams, fake_quantize_activation

NUM_PIECES, PIECE_LEN = 64, 128
"""Windows that suffice for a choice between schemes, and tokens of each: see ``in_pieces``."""
WINDOWS_AT_ONCE = 4
"""Windows whose gradients by a layer's weight are held together: one product compares them with all schemes."""
Losses = dict[tuple[str, ...], dict[str, float]]
"""Divergence in nats a token, by unit (the names of its layers) and scheme."""


class _InScheme(NamedTuple):
    """A layer in one scheme: the change of its weight [O, I], its plan, and the parameters of its activations."""

    delta_OI: torch.Tensor
    layer: LayerPlan
    static: Activations


@dataclass(frozen=True)
class Changed:
    """A layer in each of S schemes: the changes of its weight [S, O x I], its plans, its activations' parameters."""

    deltas_SP: torch.Tensor
    schemes: list[tuple[LayerPlan, Activations]]

    @property
    def kind(self) -> str:
        return self.schemes[0][0].kind

    def changes_of_log_p(self, calls: Sequence[Call], weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the change of log p(y) through each call in each scheme [C, S], to first order in each change."""
        gradients = [Gradients(call, weight_OI) for call in calls]
        of_weight_CP = torch.stack([own.of_weight.flatten() for own in gradients])
        changes_CS = (of_weight_CP @ self.deltas_SP.T).float()
        for call, own, change_S in zip(calls, gradients, changes_CS, strict=True):
            for change, (layer, static) in zip(change_S, self.schemes, strict=True):
                config = layer.config
                if config.input_tensors is not None:
                    change += _dot(own.of_inputs, _change(call.inputs, config.input_tensors, static.inputs))
                if config.output_tensors is not None and not layer.is_cached:  # all schemes have the same cache
                    change += _dot(call.gradient, _change(call.outputs, config.output_tensors, static.outputs))
        return changes_CS


class Sensitivity:
    """The float ``model``, its hidden states, and the config and the plan of the model in each scheme (``plans``)."""

    def __init__(
        self,
        model: EvaluatedModel,
        windows_NT: torch.Tensor,
        plans: Mapping[str, tuple[Config, Plan]],
        folder: Path,
        emit: Emit,
    ) -> None:
        self._model = model
        self._plans = plans
        self._num_tokens = windows_NT.numel()
        eta = Eta(2 * model.streamed.num_blocks)

        def tell(done: int, total: int) -> None:
            emit(Progress("sensitivity", done, total, "block", eta.after(done)))

        self._pass = BackwardPass(model.streamed, model.streamed.embed(windows_NT), folder, tell)
        model.has_run = True

    def losses(self, seed: int) -> Losses:
        """Measure every unit in every scheme; ``seed`` draws the tokens y from the original's predictions."""
        losses: Losses = {}
        for index, block, gradients in self._pass.blocks(seed):
            losses = self._losses_of_block(block, index, gradients) | losses
        return losses

    def at(self, block: nn.Module, index: int, plan: Plan) -> RunningBlock:
        """Return the loaded block, with the windows before it if ``plan`` calibrates on them."""
        return RunningBlock(block, index, self._streams(index, plan))

    def behind(self, plan: Plan) -> CalibrationStreams:
        """Return the streams after the last block."""
        return self._streams(self._pass.num_blocks, plan)

    def _streams(self, index: int, plan: Plan) -> CalibrationStreams:
        if not plan.needs_calibration:
            return CalibrationStreams(None)
        return CalibrationStreams(replace(self._pass.hidden, states=self._pass.states_before(index)))

    def _losses_of_block(self, block: nn.Module, index: int, gradients: list[torch.Tensor]) -> Losses:
        """Measure the losses of a block's units.

        Moves ``gradients`` from the block's outputs to its inputs, in place.
        """
        changed = _of_layers([self._in_scheme(block, index, *planned) for planned in self._plans.values()])
        modules = {name: self._model.streamed.find_module(name) for name in changed}
        units: dict[str, tuple[str, ...]] = {}
        squares_S: dict[tuple[str, ...], torch.Tensor] = {}
        for first in range(0, self._pass.num_windows, WINDOWS_AT_ONCE):
            windows = range(first, min(first + WINDOWS_AT_ONCE, self._pass.num_windows))
            calls: dict[str, list[tuple[int, Call]]] = {}
            for window in windows:
                found = self._pass.through(block, index, window, modules, gradients)
                units = units or units_of(found, list(modules))
                for call in found:
                    calls.setdefault(call.name, []).append((window - first, call))
            nothing_WS = torch.zeros(len(windows), len(self._plans), device=gradients[first].device)
            changes_WS = {unit: nothing_WS.clone() for unit in units.values()}
            for name, called in calls.items():
                weight_OI = canonical(modules[name].get_parameter("weight").data, changed[name].kind)
                with matmul_precision(weight_OI.device):
                    changes_CS = changed[name].changes_of_log_p([call for _, call in called], weight_OI)
                for (row, _), change_S in zip(called, changes_CS, strict=True):
                    changes_WS[units[name]][row] += change_S
            for unit, change_WS in changes_WS.items():
                square_S = change_WS.square().sum(0)
                squares_S[unit] = squares_S[unit] + square_S if unit in squares_S else square_S
        losses_S = {unit: (square_S / (2 * self._num_tokens)).tolist() for unit, square_S in squares_S.items()}
        return {unit: dict(zip(self._plans, loss_S, strict=True)) for unit, loss_S in losses_S.items()}

    def _in_scheme(self, block: nn.Module, index: int, config: Config, plan: Plan) -> dict[str, _InScheme]:
        """Return what ``config`` makes of the layers of the block, which is left unchanged."""
        streamed, layers = self._model.streamed, plan.layers_of(index)
        modules = {layer: streamed.find_module(layer.name) for layer in layers}
        before = {layer: module.get_parameter("weight").data for layer, module in modules.items()}
        at = self.at(block, index, plan)
        algorithms = BlockAlgorithms(config, streamed.dtype)
        prepared = algorithms.prepare(at, modules)
        in_scheme: dict[str, _InScheme] = {}
        for solved in algorithms.solve(at, modules, prepared):
            layer = solved.layer
            delta_OI = (solved.restored_OI - solved.weight_OI.float()).to(streamed.dtype)
            in_scheme[layer.name] = _InScheme(delta_OI, layer, prepared.activations.get(layer, Activations()))
            modules[layer].get_parameter("weight").data = before[layer]
        return in_scheme


def in_pieces(windows_NT: torch.Tensor) -> torch.Tensor:
    """Return at most ``NUM_PIECES`` pieces of ``PIECE_LEN`` tokens, the beginnings of all windows first.

    A window of any length is one draw of the change of log p, so that many short ones estimate its square better than
    few long ones: 64 pieces of 128 tokens are less noisy than 32 windows of 512, twice the tokens (docs/benchmarks.md).
    """
    length = min(PIECE_LEN, windows_NT.shape[1])
    pieces = torch.split(windows_NT, length, dim=1)
    return torch.cat([piece_NT for piece_NT in pieces if piece_NT.shape[1] == length])[:NUM_PIECES]


def units_of(calls: Sequence[Call], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the unit of each layer: the layers that runtimes fuse, or others that read one tensor."""
    inputs = {call.name: id(call.inputs) for call in reversed(calls)}
    members: dict[object, list[str]] = {}
    for name in dict.fromkeys(
        [*(call.name for call in calls), *names]
    ):  # in running order, then those that did not run
        members.setdefault(group_of(name) or inputs.get(name, name), []).append(name)
    return {name: tuple(unit) for unit in members.values() for name in unit}


def _of_layers(schemes: Sequence[dict[str, _InScheme]]) -> dict[str, Changed]:
    """Return the layers that every scheme quantizes, by name. ``schemes`` is used up, so that nothing is held twice."""
    first, *others = schemes
    changed: dict[str, Changed] = {}
    for name in [name for name in first if all(name in other for other in others)]:
        found = [scheme.pop(name) for scheme in schemes]
        deltas_SP = torch.stack([one.delta_OI.flatten() for one in found])
        changed[name] = Changed(deltas_SP, [(one.layer, one.static) for one in found])
    return changed


def _change(x: torch.Tensor, spec: QuantizationSpec, static: QParams | None) -> torch.Tensor:
    """Return what rounding changes of an activation, float32."""
    x = x.detach().float()
    return fake_quantize_activation(x, spec, static) - x


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.dot(a.flatten().float(), b.flatten().float())
