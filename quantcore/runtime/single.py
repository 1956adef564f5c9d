"""A model of which one decoder block is in memory at a time.

The skeleton runs as Transformers wrote it. Two tricks make its blocks ours: while the part before the blocks runs,
each block's ``forward`` is replaced by one that records what the model hands to it; while the part after the blocks
runs, the first block returns the hidden states that we computed. So embedding scales, per-layer masks, RoPE tables,
final norms and logit soft-caps are the model's own, whatever the architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quantcore.blocks.skeleton import build_skeleton, find_block_list, set_parameter
from quantcore.runtime.devices import release_freed_memory

ReadTensor = Callable[[str], torch.Tensor]


@dataclass
class Arguments:
    """What one block is called with after the hidden states."""

    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


@dataclass
class Hidden:
    """Hidden states of some windows on their way through the blocks: N tensors [1, T, H], all of the same T.

    ``arguments[i]`` is what the model gives to block i beside them (masks, RoPE tables): the same for every window,
    because windows have one length and no padding.
    """

    states: list[torch.Tensor]
    arguments: list[Arguments]


class StreamedModel:
    """Runs a causal language model block by block. ``read`` gives a float tensor by its checkpoint name (CPU)."""

    def __init__(
        self, raw_config: dict[str, Any], read: ReadTensor, names: set[str], prefix: str, num_blocks: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self._read = read
        self._names = names
        self._prefix = prefix
        self.device = device
        self.dtype = dtype
        self.model = build_skeleton(raw_config, dtype)
        self.blocks = find_block_list(self.model, prefix, num_blocks)
        for name, buffer in list(self.model.named_buffers()):
            set_parameter(self.model, name, buffer.to(device))

    def embed(self, windows_NT: torch.Tensor) -> Hidden:
        """Token ids [N, T] to the input of block 0."""
        hidden = Hidden([], [Arguments() for _ in self.blocks])
        with self._outside_loaded(head=False), self._blocks_replaced(hidden.arguments) as first:
            for window_T in windows_NT:
                self.model.base_model(input_ids=window_T[None].to(self.device), use_cache=False)
                hidden.states.append(first.seen)
        return hidden

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """Block ``index`` with its weights in memory; they are dropped at the end."""
        block = self.blocks[index]
        names = [name for name, _ in block.named_parameters()]
        try:
            for name in names:
                self._load(block, name, f"{self._prefix}{index}.{name}")
            yield block
        finally:
            self._drop(block, names)
            release_freed_memory()

    def run_block(self, block: nn.Module, index: int, hidden: Hidden | None) -> None:
        """Take every window one block further, in place; None is no window at all."""
        if hidden is None:
            return
        arguments = hidden.arguments[index]
        with torch.inference_mode():
            for i, state in enumerate(hidden.states):
                output = block(state, *arguments.positional, **arguments.named)
                hidden.states[i] = output[0] if isinstance(output, tuple) else output

    @contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """A function from the last block's output [1, T, H] to logits [1, T, V]; the head's weights live inside."""
        with self._outside_loaded(head=True), self._blocks_replaced([Arguments() for _ in self.blocks]) as first:

            def logits(state: torch.Tensor) -> torch.Tensor:
                first.give = state
                ids = torch.zeros(state.shape[:2], dtype=torch.long, device=self.device)
                result: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
                return result

            yield logits

    @contextmanager
    def _outside_loaded(self, *, head: bool) -> Iterator[None]:
        """The weights outside the blocks; the output projection only if ``head``."""
        names = [name for name, _ in self.model.named_parameters() if not name.startswith(self._prefix)]
        if not head and "lm_head.weight" in self._names:
            names = [name for name in names if not name.startswith("lm_head.")]
        stored = [name for name in names if name in self._names]
        try:
            for name in stored:
                self._load(self.model, name, name)
            self.model.tie_weights()
            for name in names:
                if self.model.get_parameter(name).is_meta:  # neither stored nor tied to what is: let read say so
                    self._load(self.model, name, name)
            yield
        finally:
            self._drop(self.model, names)

    @contextmanager
    def _blocks_replaced(self, arguments: list[Arguments]) -> Iterator[_FirstBlock]:
        first = _FirstBlock()
        for index, block in enumerate(self.blocks):
            block.forward = _recorder(arguments[index], first if index == 0 else None)
        try:
            yield first
        finally:
            for block in self.blocks:
                del block.forward  # the class's own forward again

    def _load(self, module: nn.Module, name: str, stored_name: str) -> None:
        set_parameter(module, name, self._read(stored_name).to(self.device, self.dtype))

    def _drop(self, module: nn.Module, names: list[str]) -> None:
        for name in names:
            parameter = module.get_parameter(name)
            set_parameter(module, name, torch.empty_like(parameter, device="meta"))


class _FirstBlock:
    """What the first block saw, and what it shall return instead of its input (None: the input)."""

    seen: torch.Tensor
    give: torch.Tensor | None = None


def _recorder(arguments: Arguments, first: _FirstBlock | None) -> Callable[..., torch.Tensor]:
    """A stand-in for a block's forward: remembers what comes beside the hidden states and passes these through."""

    def forward(hidden_states: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
        arguments.positional, arguments.named = positional, named
        if first is None:
            return hidden_states
        first.seen = hidden_states
        return hidden_states if first.give is None else first.give

    return forward
