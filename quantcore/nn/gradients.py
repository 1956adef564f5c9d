"""The gradients of a model's predictions at its decoder blocks, for a model in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from quantcore.engine.blockwise.backward import StateGradients, log_p_of_drawn
from quantcore.nn.calibration import run
from quantcore.nn.log import log

SEED = 0  # draws tokens from the model's predictions


def state_gradients(model: nn.Module, blocks: Sequence[nn.Module], batches: Sequence[Any]) -> StateGradients | None:
    """Run the float ``model`` on each batch, forward and backward; return the gradients of log p(y) behind its blocks.

    None for a model without logits, which is logged.
    """
    num = len(batches)
    states: list[torch.Tensor] = [torch.empty(0)] * (num * len(blocks))
    for window, batch in enumerate(batches):
        outputs: dict[int, torch.Tensor] = {}
        handles = [block.register_forward_hook(_keeping(outputs, index)) for index, block in enumerate(blocks)]
        try:
            with torch.enable_grad():
                logits = getattr(run(model, batch), "logits", None)
                if not isinstance(logits, torch.Tensor):
                    log.warning("This model has no logits and therefore no gradients: gptaq is used instead of yaqa.")
                    return None
                log_p = log_p_of_drawn(logits.flatten(0, -2), torch.Generator().manual_seed(SEED + window))
                gradients = torch.autograd.grad(log_p, list(outputs.values()))
        finally:
            for handle in handles:
                handle.remove()
        for index, gradient in zip(outputs, gradients, strict=True):
            states[index * num + window] = gradient
    return StateGradients(states, num)


def _keeping(outputs: dict[int, torch.Tensor], index: int) -> Callable[..., None]:
    """Return a hook that keeps the states that a block returns, as a part of the graph."""

    def keep(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        outputs[index] = output[0] if isinstance(output, (tuple, list)) else output

    return keep
