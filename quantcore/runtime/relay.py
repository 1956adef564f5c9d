"""A model run without its decoder blocks: what it hands to them, and what it makes of what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quantcore.errors import ModelError
from quantcore.runtime.hidden import Arguments
from quantcore.runtime.products import products_on


class Reached(Exception):
    """The first block was called; what it was given is in the relay."""


@dataclass
class Relay:
    """What goes through the replaced blocks: ``seen`` by the first, which returns ``give`` instead of it if it is set.

    ``passed`` is what the last block that was called returned; ``as_tuple`` whether blocks return a tuple. With
    ``stops`` the first block raises ``Reached``, and nothing behind it runs.
    """

    as_tuple: bool
    give: torch.Tensor | None = None
    stops: bool = False
    seen: torch.Tensor = field(init=False)
    passed: torch.Tensor = field(init=False)

    def run(self, model: Callable[[], object]) -> None:
        """Call ``model``. Blocks of some models return a tuple: known once the next one gets a part of it."""
        try:
            model()
        except ModelError:
            if self.as_tuple:
                raise
            self.as_tuple = True
            model()


@contextmanager
def blocks_replaced(blocks: Iterable[nn.Module], arguments: list[Arguments], *, as_tuple: bool) -> Iterator[Relay]:
    """While this lasts, the blocks record in ``arguments`` what they are called with, and pass the states through."""
    relay = Relay(as_tuple)
    before = [block.__dict__.get("forward") for block in blocks]
    for index, block in enumerate(blocks):
        block.forward = _recorder(arguments[index], relay, is_first=index == 0)
    try:
        yield relay
    finally:
        for block, forward in zip(blocks, before, strict=True):
            if forward is None:
                del block.forward  # the class's own forward again
            else:
                block.forward = forward


def _recorder(arguments: Arguments, relay: Relay, *, is_first: bool) -> Callable[..., Any]:
    """A stand-in for a block's forward: remembers what comes beside the hidden states and passes these through.

    The model must hand to each block just what the one before returned: what it did in between would be missed.
    """

    def forward(hidden_states: torch.Tensor, *positional: Any, **named: Any) -> Any:
        arguments.positional, arguments.named = positional, named
        if is_first:
            relay.seen = hidden_states
            if relay.stops:
                raise Reached
            hidden_states = hidden_states if relay.give is None else relay.give
        elif hidden_states is not relay.passed:
            raise ModelError(
                "This model computes something between its decoder blocks, outside of them.",
                code="unsupported_architecture",
                hint="Bitfoundry quantizes models that are a plain chain of decoder blocks.",
            )
        relay.passed = hidden_states
        return (hidden_states,) if relay.as_tuple else hidden_states

    return forward


@dataclass(frozen=True)
class Outside:
    """What lies around the blocks of ``model``, its weights in memory: call it for logits."""

    model: PreTrainedModel
    relay: Relay
    device: torch.device

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        """From the last block's output [1, T, H] to logits [1, T, V]."""
        return self._run(torch.zeros(state.shape[:2], dtype=torch.long), state)

    def embed(self, ids_NT: torch.Tensor) -> torch.Tensor:
        """The input of the first block for token ids [1, T]."""
        self.relay.stops = True
        with suppress(Reached):
            self._run(ids_NT, None)
        self.relay.stops = False
        return self.relay.seen

    def _run(self, ids_NT: torch.Tensor, give: torch.Tensor | None) -> torch.Tensor:
        self.relay.give = give
        with products_on(self.device):
            result: torch.Tensor = self.model(input_ids=ids_NT.to(self.device), use_cache=False).logits
        return result
