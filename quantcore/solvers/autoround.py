"""AutoRound (Cheng et al. 2023, "Optimize Weight Rounding via Signed Gradient Descent"): tunes the rounding of a block.

Every weight may move by half a step of its grid before it is rounded, every scale may grow or shrink a little. Both are
found by signed gradient descent on the squared difference between the outputs of the float block and of the quantized
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from quantcore.calibration.stats import Needs
from quantcore.config.algorithms import AutoRoundConfig
from quantcore.config.grouping import weight_grouping
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import ScaleType
from quantcore.numerics.affine import as_stored, with_stored_minimum
from quantcore.numerics.qtensor import QTensor, quantize_weight
from quantcore.numerics.weight_layout import canonical, stored
from quantcore.solvers import TUNERS

SCALE_RANGE = (0.5, 1.5)  # of the scale at the start


@TUNERS.add("autoround")
class AutoRound:
    """Tunes all weights of a block together."""

    needs = Needs(gram=True)  # for the ranges at the start

    def __init__(self, config: AutoRoundConfig) -> None:
        self._config = config

    def tune(
        self, modules: Mapping[LayerPlan, nn.Module], start: Mapping[LayerPlan, QTensor],
        run: Callable[[int], torch.Tensor], targets: Sequence[torch.Tensor],
    ) -> dict[LayerPlan, QTensor]:  # fmt: skip
        """Return the best codes seen, or those of ``start`` if no step was better on all windows."""
        weights = [_TunedWeight(layer, modules[layer], first) for layer, first in start.items()]
        with torch.enable_grad(), _weights_replaced(weights):
            _put(weights)
            at_start = _loss(run, targets)
            self._descend(weights, run, targets)
            _put(weights)
            tuned = {weight.layer: weight.codes() for weight in weights}
            return tuned if _loss(run, targets) < at_start else dict(start)

    def _descend(
        self, weights: list[_TunedWeight], run: Callable[[int], torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> None:
        """Run the descent, and leave the parameters of the best step in ``weights``."""
        config = self._config
        lr, scale_lr = config.lr or 1 / config.iters, config.minmax_lr or config.lr or 1 / config.iters
        generator = torch.Generator().manual_seed(config.seed)
        best = float("inf")
        for step in range(config.iters):
            chosen = torch.randperm(len(targets), generator=generator)[: config.batch_size].tolist()
            leaves = _put(weights)
            errors: list[torch.Tensor] = []
            for window in chosen:
                error = (run(window).float() - targets[window].float()).square().mean()
                error.backward()
                errors.append(error.detach())
            for weight, leaf in zip(weights, leaves, strict=True):
                weight.backward(leaf)
            if (loss := _sum(errors)) < best:
                best = loss
                for weight in weights:
                    weight.keep()
            left = 1 - step / config.iters
            for weight in weights:
                weight.step(lr * left, scale_lr * left)
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
        self._weight_RGS = self._grouping.split(weight.float())
        self._spacing_RGS = _spacing(self._scaled(start.params.step), start)
        self._offset = torch.zeros_like(self._weight_RGS, requires_grad=True)
        self._factor = torch.ones_like(start.params.scale, requires_grad=True)
        kind = start.spec.scale_type
        self._fixed = kind in (ScaleType.e8m0, ScaleType.pof2, ScaleType.e4m3) or kind.in_two_levels
        self._value: torch.Tensor | None = None
        self.keep()

    def value(self) -> torch.Tensor:
        """Return the dequantized weight of the current codes, as the module stores it: a leaf (see ``backward``)."""
        params, spec = self._start.params, self._start.spec
        step = params.step * self._factor
        x = self._scaled(step) + self._offset * self._spacing_RGS
        with torch.no_grad():
            rounded = spec.format.round(x, spec.round_method.value)
            inside = (x >= spec.format.min) & (x <= spec.format.max)
        x = torch.where(inside, x + (rounded - x).detach(), rounded)
        if params.zero_point is not None:
            x = x - params.zero_point.unsqueeze(-1)
        whole = self._grouping.join(x * step.unsqueeze(-1), self._shape)
        self._value = stored(whole.to(self.parameter.dtype), self.layer.kind)
        return self._value.detach().requires_grad_()

    def backward(self, leaf: torch.Tensor) -> None:
        """Propagate the gradient of the weight to the parameters."""
        if leaf.grad is not None and self._value is not None:
            self._value.backward(leaf.grad)  # type: ignore[no-untyped-call]

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
        """Restore the best parameters, with scales rounded to their stored type."""
        params, spec = self._start.params, self._start.spec
        with torch.no_grad():
            self._offset.copy_(self._best[0])
            scale = params.scale if self._fixed else as_stored(params.scale * self._best[1], spec, self.parameter.dtype)
            self._factor.copy_(scale / params.scale)
            zero_point = params.zero_point
            if zero_point is not None:
                zero_point = with_stored_minimum(zero_point, scale, spec, self.parameter.dtype)
        self._final = replace(params, scale=scale, zero_point=zero_point)

    def codes(self) -> QTensor:
        """Return the codes of the restored parameters."""
        with torch.no_grad():
            step = self._final.step.unsqueeze(-1)
            moved = self._weight_RGS + self._offset * self._spacing_RGS * step
            return quantize_weight(self._grouping.join(moved, self._shape), self._final, self._start.spec)

    def _scaled(self, step: torch.Tensor) -> torch.Tensor:
        x = self._weight_RGS / step.unsqueeze(-1)
        zero_point = self._start.params.zero_point
        return x if zero_point is None else x + zero_point.unsqueeze(-1)


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


def _loss(run: Callable[[int], torch.Tensor], targets: Sequence[torch.Tensor]) -> float:
    """Return the loss over all windows."""
    with torch.no_grad():
        return _sum([(run(window).float() - target.float()).square().mean() for window, target in enumerate(targets)])


def _sum(errors: list[torch.Tensor]) -> float:
    """Return the sum in float64; an accelerator is waited for once."""
    return float(sum(torch.stack(errors).tolist()))
