"""Hidden states on their way through the decoder blocks."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from quantcore.runtime.products import products_on
from quantcore.runtime.states import States
from quantcore.slices import idling


@dataclass
class Arguments:
    """What one block is called with after the hidden states."""

    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


@dataclass
class Hidden:
    """Hidden states of some windows: N tensors [1, T, H], all of the same T.

    ``arguments[i]`` is what the model gives to block i beside them (masks, RoPE tables): the same for every window,
    because windows have one length and no padding. ``returns_tuple``: whether the last block run gave one. Where ranks
    share the blocks, ``num_idle`` is how many more windows another rank has; ``idle_state`` [1, T, H] stands for one.
    """

    states: MutableSequence[torch.Tensor]
    arguments: list[Arguments]
    returns_tuple: bool = False
    num_idle: int = 0
    idle_state: torch.Tensor | None = None

    def copy(self) -> Self:
        """The same states, which then go their own way."""
        states = self.states.copy() if isinstance(self.states, States) else [state.clone() for state in self.states]
        return replace(self, states=states)

    def arguments_of(self, index: int, window: int) -> Arguments:
        """What block ``index`` is called with beside the states of ``window``."""
        return self.arguments[index]

    def run(self, block: nn.Module, index: int, window: int) -> torch.Tensor:
        """The output of ``block``, which is number ``index``, for one window; the states stay as they are."""
        return self._call(block, self.arguments_of(index, window), self.states[window])

    def idle(self, block: nn.Module, index: int) -> None:
        """Run ``block`` as often as others do that have more windows: its layers are brought together by all ranks."""
        for _ in range(self.num_idle):
            assert self.idle_state is not None
            with idling():
                self._call(block, self.arguments[index], self.idle_state)

    def advance(self, block: nn.Module, index: int) -> None:
        """Take every window one block further, in place."""
        with torch.no_grad():
            for window in range(len(self.states)):
                self.states[window] = self.run(block, index, window)
            self.idle(block, index)

    def _call(self, block: nn.Module, beside: Arguments, state: torch.Tensor) -> torch.Tensor:
        with products_on(state.device):
            output = block(state, *beside.positional, **beside.named)
        self.returns_tuple = isinstance(output, tuple)
        result: torch.Tensor = output[0] if self.returns_tuple else output
        return result
