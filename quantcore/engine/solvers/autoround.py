"""AutoRound (Cheng et al. 2023, "Optimize Weight Rounding via Signed Gradient Descent"): tunes the rounding of a block.

Every weight may move by half a step of its grid before it is rounded, every scale may grow or shrink. Both are found by
signed gradient descent on the squared difference between the outputs of the float block and of the quantized one. The
start is the result of YAQA, from which it gets further than from that of GPTAQ (docs/benchmarks.md). The best
parameters by windows that the descent does not see are taken, and only if they beat the start there.

Ranks share the windows, and each has all weights. The gradients of a step's windows are added as the sums over windows
are everywhere (``engine.calibration.reduction``), so the result has the same bits on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch
from torch import nn

from quantcore.config.algorithms import AutoRoundConfig
from quantcore.config.grouping import weight_grouping
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import ScaleType
from quantcore.engine.calibration.reduction import Node, Span, Tree, root_at
from quantcore.engine.runtime.ranks import Ranks
from quantcore.engine.solvers import TUNERS
from quantcore.errors import CalibrationError
from quantcore.formats.vectors import snap_
from quantcore.formats.weight_layout import canonical, stored
from quantcore.tensors.affine import QParams, as_stored, with_stored_minimum
from quantcore.tensors.qtensor import QTensor, quantize_weight

SCALE_RANGE = (0.5, 1.5)  # of the scale at the start
HELD_BACK_SHARE = 1 / 8
"""Share of the calibration windows that decide which step was best, and whether tuning gained."""
SCALE_LR = 0.2
"""Default learning rate of the scales, in units of that of the rounding."""
NUM_CHECKS = 10
"""How often the held-back windows are run during the descent."""
START_REACH = 0.25
"""Distance from the code at the start, in steps of the grid, of weights that YAQA moved by more than half a step.

With all of those at the border of their code the first steps undid its work, and nothing was gained.
"""

SUM = "gradients"

Run = Callable[[int], torch.Tensor]


@TUNERS.add("autoround")
class AutoRound:
    """Tunes all weights of a block together."""

    def __init__(self, config: AutoRoundConfig) -> None:
        self._config = config
        self.notes: list[str] = []

    def tune(
        self,
        modules: Mapping[LayerPlan, nn.Module],
        start: Mapping[LayerPlan, QTensor],
        run: Run,
        targets: Sequence[torch.Tensor],
        span: Span,
    ) -> dict[LayerPlan, QTensor]:
        """Return the codes that are best on the held-back windows, which are those of ``start`` if nothing gained.

        Raises CalibrationError if there is only one window.
        """
        if not start:
            return {}
        held_back = _held_back(span.num_windows)
        first = span.windows.start

        def error(window: int) -> torch.Tensor:
            return _error(run(window - first), targets[window - first])

        weights = [_TunedWeight(layer, modules[layer], first) for layer, first in start.items()]
        with torch.enable_grad(), _weights_replaced(weights):

            def loss() -> float:
                with torch.no_grad():
                    return _sum([error(window) for window in held_back if window in span.windows], span.ranks)

            _put(weights)
            at_start = loss()
            self._descend(weights, error, held_back.start, loss, span)
            _put(weights)
            at_end = loss()
        if at_end < at_start:
            return {weight.layer: weight.codes() for weight in weights}
        self.notes.append(
            f"autoround did not improve block {weights[0].layer.block} on {len(held_back)} held-back windows: its "
            "layers keep their codes from before tuning."
        )
        return dict(start)

    def _descend(
        self, weights: list[_TunedWeight], error: Run, num_learning: int, loss: Callable[[], float], span: Span
    ) -> None:
        """Descend on the first ``num_learning`` windows, and leave the parameters with the least ``loss``."""
        config = self._config
        lr = config.lr or 1 / config.iters
        scale_lr = config.minmax_lr or SCALE_LR * lr
        generator = torch.Generator().manual_seed(config.seed)
        best, interval = float("inf"), math.ceil(config.iters / NUM_CHECKS)
        for step in range(config.iters):
            chosen = _spread(num_learning, config.batch_size, generator)
            left = 1 - step / config.iters
            for weight, gradient in zip(weights, _gradients(weights, error, chosen, span), strict=True):
                weight.backward(gradient)
                weight.step(lr * left, scale_lr * left)
            if (step + 1) % interval == 0 or step + 1 == config.iters:
                _put(weights)
                if (found := loss()) < best:
                    best = found
                    for weight in weights:
                        weight.keep()
        for weight in weights:
            weight.restore()


class _TunedWeight:
    """A weight with its two parameters: ``offset`` in steps of the grid, [R, G, S], and ``factor`` of the scale."""

    def __init__(self, layer: LayerPlan, module: nn.Module, start: QTensor) -> None:
        self.layer, self.module, self._start = layer, module, start
        self.parameter = module.get_parameter("weight")
        self._grouping = weight_grouping(start.spec)
        weight = canonical(self.parameter.data, layer.kind)
        self._shape = tuple(weight.shape)
        near_RGS = _near_start(self._grouping.split(weight.float()), self._grouping.split(start.dequantize()), start)
        self._weight_RGS = (near_RGS - _zero(start.params)) * start.params.step.unsqueeze(-1)
        self._spacing_RGS = _spacing(near_RGS, start)
        self._offset = torch.zeros_like(self._weight_RGS, requires_grad=True)
        self._factor = torch.ones_like(start.params.scale, requires_grad=True)
        kind = start.spec.scale_type
        self._fixed = kind is ScaleType.pof2 or kind.in_one_byte or kind.in_two_levels
        self._value: torch.Tensor | None = None
        self.keep()

    def value(self) -> torch.Tensor:
        """Return the dequantized weight of the current codes, as the module stores it: a leaf (see ``backward``)."""
        spec, start, params = self._start.spec, self._start.params, self._stored_params()
        factor = self._factor + (params.scale / start.scale - self._factor).detach()
        step, zero = (start.step * factor).unsqueeze(-1), _zero(params)
        x = self._weight_RGS / step + zero + self._offset * self._spacing_RGS
        with torch.no_grad():
            rounded = spec.format.round_(snap_(spec.format, x.clone(), -1), spec.round_method.value)
            inside = (x >= spec.format.min) & (x <= spec.format.max)
        x = torch.where(inside, x + (rounded - x).detach(), rounded)
        whole = self._grouping.join((x - zero) * step, self._shape)
        self._value = stored(whole.to(self.parameter.dtype), self.layer.kind)
        return self._value.detach().requires_grad_()

    def backward(self, gradient: torch.Tensor | None) -> None:
        """Propagate the gradient of the weight to the parameters; None if no window needed the weight."""
        if gradient is not None and self._value is not None:
            self._value.backward(gradient)  # type: ignore[no-untyped-call]

    def step(self, lr: float, scale_lr: float) -> None:
        """Take one step of signed gradient descent."""
        with torch.no_grad():
            if self._offset.grad is not None:
                self._offset.sub_(self._offset.grad.sign(), alpha=lr).clamp_(-0.5, 0.5)
            if self._factor.grad is not None and not self._fixed:
                self._factor.sub_(self._factor.grad.sign(), alpha=scale_lr).clamp_(*SCALE_RANGE)
        self._offset.grad = self._factor.grad = None

    def keep(self) -> None:
        """Store the parameters as the best so far."""
        self._best = self._offset.detach().clone(), self._factor.detach().clone()

    def restore(self) -> None:
        """Restore the best parameters."""
        with torch.no_grad():
            self._offset.copy_(self._best[0])
            self._factor.copy_(self._best[1])

    def codes(self) -> QTensor:
        """Return the codes of the current parameters."""
        params = self._stored_params()
        with torch.no_grad():
            moved = self._weight_RGS + self._offset * self._spacing_RGS * params.step.unsqueeze(-1)
            return quantize_weight(self._grouping.join(moved, self._shape), params, self._start.spec)

    def _stored_params(self) -> QParams:
        """Return the parameters with scales of the current factors, rounded to their stored type."""
        params, spec, dtype = self._start.params, self._start.spec, self.parameter.dtype
        if self._fixed:
            return params
        scale = as_stored(params.scale * self._factor.detach(), spec, dtype)
        zero_point = params.zero_point
        if zero_point is not None:
            zero_point = with_stored_minimum(zero_point, scale, spec, dtype)
        return replace(params, scale=scale, zero_point=zero_point)


@dataclass
class _Gradients:
    """The sums of the gradients of all weights over some windows; None where there is none."""

    of_weights: list[torch.Tensor | None]

    def merge(self, later: _Gradients) -> None:
        """Take in the sums over later windows."""
        pairs = zip(self.of_weights, later.of_weights, strict=True)
        self.of_weights = [own if other is None else other if own is None else own.add_(other) for own, other in pairs]


def _gradients(
    weights: list[_TunedWeight], error: Run, chosen: Sequence[int], span: Span
) -> Sequence[torch.Tensor | None]:
    """Return the gradients of the sum of the windows' errors by the values of all weights, on every rank."""
    leaves, tree = _put(weights), Tree[_Gradients]()
    for chunk in span.chunks:
        for window in chosen:
            if span.chunk_of(window) == chunk:
                error(window).backward()  # type: ignore[no-untyped-call]
        tree.add(Node(0, chunk, {SUM: _Gradients([leaf.grad for leaf in leaves])}))
        for leaf in leaves:
            leaf.grad = None
    root = root_at(0, tree.nodes, span)
    return span.ranks.share(root and root.sums[SUM].of_weights) or []


def _spread(num_windows: int, count: int, generator: torch.Generator) -> list[int]:
    """Draw a window from each of ``count`` equal parts of the text, which ranks share evenly."""
    count = min(count, num_windows)
    borders = [part * num_windows // count for part in range(count + 1)]
    places = torch.rand(count, generator=generator).tolist()
    return [first + int(place * (end - first)) for place, (first, end) in zip(places, pairwise(borders), strict=True)]


def _held_back(num_windows: int) -> range:
    """Return the windows that decide: the last eighth, at least one."""
    if num_windows < 2:
        raise CalibrationError(
            "autoround trains on some calibration windows and validates on others, but there is only one.",
            code="not_enough_calibration_data",
            hint="Calibrate with at least two windows, or use gptaq.",
        )
    return range(num_windows - max(1, int(HELD_BACK_SHARE * num_windows)), num_windows)


def _zero(params: QParams) -> torch.Tensor | float:
    return 0.0 if params.zero_point is None else params.zero_point.unsqueeze(-1)


def _near_start(weight_RGS: torch.Tensor, start_RGS: torch.Tensor, start: QTensor) -> torch.Tensor:
    """Return the weights in units of the grid, those that round to another code than at the start moved towards it.

    ``start_RGS`` are the values of these codes. A moved weight has the distance ``START_REACH`` from its code.
    """
    spec, step, zero = start.spec, start.params.step.unsqueeze(-1), _zero(start.params)
    x_RGS = weight_RGS / step + zero
    at_start = spec.format.round(start_RGS / step + zero, spec.round_method.value)
    moved_RGS = at_start + START_REACH * _spacing(torch.nextafter(at_start, x_RGS), start) * (x_RGS - at_start).sign()
    return torch.where(spec.format.round(x_RGS, spec.round_method.value) == at_start, x_RGS, moved_RGS)


def _spacing(x_RGS: torch.Tensor, start: QTensor) -> torch.Tensor:
    """Return the distance of the two values of the format's grid around each x; 0 beyond its ends."""
    grid = torch.tensor(sorted(set(start.spec.format.grid())), device=x_RGS.device)
    above = torch.searchsorted(grid, x_RGS.contiguous()).clamp_(0, len(grid) - 1)
    below = torch.where(grid[above] > x_RGS, above - 1, above).clamp_(0, len(grid) - 2)
    spacing: torch.Tensor = grid[below + 1] - grid[below]
    return spacing


def _put(weights: list[_TunedWeight]) -> list[torch.Tensor]:
    """Let every module compute with the current codes; returns the leaves that collect the gradients."""
    leaves = [weight.value() for weight in weights]
    for weight, leaf in zip(weights, leaves, strict=True):
        weight.module.weight = leaf
    return leaves


@contextmanager
def _weights_replaced(weights: list[_TunedWeight]) -> Iterator[None]:
    """Allow tensors that are no parameters in the place of the weights, inside the block."""
    for weight in weights:
        del weight.module._parameters["weight"]
    try:
        yield
    finally:
        for weight in weights:
            weight.module.__dict__.pop("weight", None)
            weight.module._parameters["weight"] = weight.parameter


def _error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of a window's output."""
    return (output.float() - target.float()).square().mean()


def _sum(errors: list[torch.Tensor], ranks: Ranks) -> float:
    """Return the sum of the errors of all ranks in float64; an accelerator is waited for once."""
    return float(sum(chain(*ranks.gather(torch.stack(errors).tolist() if errors else []))))
