"""Records the arguments and outputs of modules, and may give their outputs instead of computing them.

``recorded`` is for edges and rotation; ``record_block`` records one run of a decoder block, for edges.

A *layer* here is a module that holds parameters and has no child that does: linear layers, norms, routers. While a
block is recorded every expert of a mixture gets every token, so that the results for one hold for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from quantcore.engine.model.experts import SplitExperts

Run = Callable[[], torch.Tensor]
Answer = Callable[[str, int], Any]
"""Function from the name of a layer and the number of its call, from 0, to its output."""
Forward = Callable[..., Any]
Wrap = Callable[[str, Forward], Forward]
"""Function from the name and the forward of a module to the forward that replaces it while the module is recorded."""


@contextmanager
def recorded(modules: Mapping[str, nn.Module], wrap: Wrap) -> Iterator[None]:
    """Replace the forward of each module by the one that ``wrap`` makes of it while this lasts."""
    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(_forward_replaced(module, wrap(name, module.forward)))
        yield


@dataclass
class BlockRecord:
    """The record of one run of a block.

    ``arguments`` (positional, named) and ``outputs`` of every layer have one entry per call, in the order in which the
    layers first ran; ``weightless`` are the outputs of modules without parameters. ``beside``: tensors that left the
    block beside its update [1, T, H], such as keys and values for later blocks. ``routing`` [T, E]: the weight that
    each router gave to each expert.
    """

    arguments: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    weightless: dict[str, list[Any]] = field(default_factory=dict)
    beside: list[torch.Tensor] = field(default_factory=list)
    routing: list[torch.Tensor] = field(default_factory=list)
    update: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def inputs(self, name: str) -> list[torch.Tensor]:
        """Return the float tensors that a layer was called with, over all calls."""
        return float_tensors(self.arguments.get(name, []))


def float_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def as_float32(tree: Any) -> Any:
    """Return a copy with float tensors in float32, also in keys and values that blocks share; all else is unchanged."""

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, MutableMapping):
            leaf = copy(leaf)
            leaf.update({key: as_float32(value) for key, value in leaf.items()})
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(torch.float32, copy=True) if is_float else leaf

    return tree_map(widen, tree)


def find_layers(block: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in _leaves(block).items() if _has_parameters(module)}


def record_block(block: nn.Module, run: Run, answer: Answer | None = None) -> BlockRecord:
    """Run the block once and record it. With ``answer`` layers return its values and compute nothing."""
    record = BlockRecord()
    parts = _leaves(block)

    def wrap(name: str, forward: Forward) -> Forward:
        if not _has_parameters(parts[name]):
            return _noting_output(forward, name, record)
        return _noting_calls(forward, name, record, answer)

    with torch.no_grad(), recorded(parts, wrap), ExitStack() as stack:
        for module in block.modules():
            if isinstance(module, SplitExperts):
                stack.enter_context(
                    module.register_forward_pre_hook(lambda *call: _to_every_expert(record, *call), with_kwargs=True)
                )
            elif isinstance(module, nn.ModuleDict):
                stack.enter_context(module.register_forward_pre_hook(lambda *call: _all_selected(record, *call)))
        stack.enter_context(
            block.register_forward_hook(lambda *call: record.beside.extend(_beside(*call)), with_kwargs=True)
        )
        record.update = run()
    return record


@contextmanager
def widened(block: nn.Module, layers: Collection[str]) -> Iterator[None]:
    """Let all but ``layers`` compute in float32 while this lasts. With given outputs the dtype then has no effect."""
    with ExitStack() as stack:
        stack.enter_context(
            block.register_forward_pre_hook(lambda _, args, kwargs: as_float32((args, kwargs)), with_kwargs=True)
        )
        for name, module in block.named_modules():
            for key, parameter in module._parameters.items():
                if name not in layers and parameter is not None and parameter.is_floating_point():
                    stack.callback(module._parameters.__setitem__, key, parameter)
                    module._parameters[key] = nn.Parameter(parameter.data.float(), requires_grad=False)
        yield


def _leaves(block: nn.Module) -> dict[str, nn.Module]:
    """Return the layers, and the modules without parameters such as activations."""
    return {
        name: module
        for name, module in block.named_modules()
        if name and not any(_has_parameters(child) for child in module.children())
    }


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _noting_calls(forward: Forward, name: str, record: BlockRecord, answer: Answer | None) -> Forward:
    def noting(*args: Any, **kwargs: Any) -> Any:
        calls = record.arguments.setdefault(name, [])
        calls.append((args, kwargs))
        output = forward(*args, **kwargs) if answer is None else answer(name, len(calls) - 1)
        record.outputs.setdefault(name, []).append(output)
        return output

    return noting


def _noting_output(forward: Forward, name: str, record: BlockRecord) -> Forward:
    def noting(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        record.weightless.setdefault(name, []).append(output)
        return output

    return noting


@contextmanager
def _forward_replaced(module: nn.Module, forward: Forward) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward  # the class's again
        else:
            module.forward = own


def _to_every_expert(
    record: BlockRecord, experts: SplitExperts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Record the routing of the tokens, then send each token to all experts with fixed weights."""
    call = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)) | kwargs
    if "top_k_index" not in call:  # it calls itself with the routing
        return args, kwargs
    index_TK, weights_TK = call["top_k_index"], call["top_k_weights"]
    num_tokens, num_experts = len(index_TK), experts.num_experts
    routing_TE = torch.zeros(num_tokens, num_experts, device=weights_TK.device)
    record.routing.append(routing_TE.scatter_add(1, index_TK.clamp(max=num_experts - 1), weights_TK.float()))
    every_E = torch.arange(num_experts, device=index_TK.device)
    weights_E = torch.linspace(0.5, 1.5, num_experts, device=weights_TK.device, dtype=weights_TK.dtype)
    everywhere = {"top_k_index": every_E.expand(num_tokens, -1), "top_k_weights": weights_E.expand(num_tokens, -1)}
    return (), call | everywhere


def _all_selected(record: BlockRecord, experts: nn.ModuleDict, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Record which experts were selected for the tokens, by a mask [T, K, E] among ``args``, and select all of them.

    The experts of Switch Transformers are modules of their own in the model, too, and get such a mask.
    """

    def selected(value: Any) -> Any:
        is_mask = isinstance(value, torch.Tensor) and value.ndim == 3 and not value.is_floating_point()
        if not is_mask or value.shape[-1] != len(experts):
            return value
        record.routing.append(value.sum(dim=1).float())
        return torch.ones_like(value)

    return tuple(map(selected, args))


def _beside(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[torch.Tensor]:
    """Return the float tensors after the hidden states in a block's output, and those in mappings it was passed."""
    shared = [dict(value) for value in (*args, *kwargs.values()) if isinstance(value, MutableMapping)]
    return float_tensors([output[1:] if isinstance(output, tuple) else (), shared])
