"""Hidden states on their way through the decoder blocks."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import nn

from quantcore.engine.runtime.arguments import WindowArguments
from quantcore.engine.runtime.block_capture import model_code
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.engine.runtime.shards import idling
from quantcore.engine.runtime.states import Axes, States, packed, unpacked


@dataclass
class Hidden:
    """Hidden states of some windows: N tensors [1, T, H], with the same T if they come from files.

    ``axes`` are those of windows and tokens in what the blocks take: (1, 0) for XLNet's [T, 1, H], and (1, 2) for
    Gemma 3n's [4, 1, T, H], which is kept as [1, T, 4, H]. ``ids`` are the windows' token ids [1, T]; a model of an
    encoder and a decoder needs them once more in between.

    ``arguments`` are the blocks' arguments besides the states, window by window. ``num_returned``: the number of values
    that the last block run returned as a tuple, 0 for the states alone. If ranks share the blocks, ``num_idle`` is the
    number of additional windows on another rank; ``idle`` holds one window that stands in for each of them.
    """

    states: MutableSequence[torch.Tensor]
    arguments: WindowArguments = field(default_factory=WindowArguments)
    num_returned: int = 0
    num_idle: int = 0
    idle: Hidden | None = None
    ids: list[torch.Tensor] = field(default_factory=list)
    axes: Axes = (0, 1)

    def copy(self) -> Self:
        """Copy the states for an independent stream."""
        states = self.states.copy() if isinstance(self.states, States) else [state.clone() for state in self.states]
        return replace(self, states=states, arguments=self.arguments.copy())

    def run(self, block: nn.Module, index: int, window: int) -> torch.Tensor:
        """Return the output of ``block``, which is number ``index``, for one window; the states do not change."""
        return self.run_on(self.states[window], block, index, window)

    def run_on(self, state: torch.Tensor, block: nn.Module, index: int, window: int) -> torch.Tensor:
        """Return the output of ``block`` for other hidden states of ``window``.

        Raises ModelError where the model's own code fails.
        """
        beside = self.arguments.of(index, window)
        if beside.is_skipped:
            return state
        with model_code(f"block {index}"):
            with matmul_precision(state.device):
                taken = unpacked(state, self.axes)
                taken = taken if beside.added is None else taken + beside.added
                output = block(taken, *beside.positional, **beside.named)
            self.num_returned = len(output) if isinstance(output, (tuple, list)) else 0
            if self.num_returned:
                self.arguments.note_output(index, window, output)
        return packed(output[0] if self.num_returned else output, self.axes)

    def run_idle(self, block: nn.Module, index: int) -> None:
        """Run ``block`` as often as ranks with more windows do, because all ranks gather its layers together."""
        for _ in range(self.num_idle):
            assert self.idle is not None
            with idling():
                self.idle.run(block, index, 0)

    def advance(self, block: nn.Module, index: int) -> None:
        """Take every window one block further, in place."""
        with torch.no_grad():
            for window in range(len(self.states)):
                self.states[window] = self.run(block, index, window)
            self.run_idle(block, index)
