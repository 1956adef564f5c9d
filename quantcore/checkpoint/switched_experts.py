"""Experts in the stacks that mlx-lm saves: one tensor for each projection of a layer, with the experts in order.

``X.switch_mlp.up_proj.weight`` [E, ...] holds the bytes of ``X.experts.0.up_proj.weight``, those of expert 1, and so
on; ``scales`` and ``biases`` alike. Mixtral calls its projections w1, w2 and w3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quantcore.checkpoint.experts import EXPERT, is_in_stack
from quantcore.checkpoint.layout import Stack, TensorHeader, TensorLayout

SWITCH = ".switch_mlp."
_W = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_WITH_W = ("mixtral", "phimoe")
"""The values of ``model_type`` of models with such names."""


def stack_of(name: str) -> str:
    """Return the name of the stack that holds an expert's layer or tensor; other names are returned as they are."""
    match = EXPERT.match(name)
    if match is None or not is_in_stack(name):
        return name
    projection, dot, part = match["projection"].partition(".")
    return f"{match['moe']}{SWITCH}{_W.get(projection, projection)}{dot}{part}"


def stack_experts(layouts: Mapping[str, TensorLayout]) -> tuple[dict[str, TensorLayout], dict[str, TensorHeader]]:
    """Return the layouts with the experts in stacks, and the experts' tensors as parts of them (see ``Sink``).

    The experts of a stack must have one layout.
    """
    sizes: dict[str, int] = {}
    for name in layouts:
        if (match := EXPERT.match(name)) and stack_of(name) != name:
            sizes[stack_of(name)] = max(sizes.get(stack_of(name), 0), int(match["index"]) + 1)
    stored: dict[str, TensorLayout] = {}
    parts: dict[str, TensorHeader] = {}
    for name, layout in layouts.items():
        stack, match = stack_of(name), EXPERT.match(name)
        if stack not in sizes or match is None:
            stored[name] = layout
            continue
        whole, begin = (sizes[stack], *layout.shape), int(match["index"]) * layout.num_bytes
        stored[stack] = replace(layout, shape=whole)
        place = Stack(stack, whole, 0)
        parts[name] = TensorHeader(layout.dtype, layout.shape, "", begin, begin + layout.num_bytes, stack=place)
    return stored, parts


def unstack_switched(tensors: Mapping[str, TensorHeader], model_type: str) -> dict[str, TensorHeader]:
    """Present every stack as one tensor per expert, over the same bytes; other tensors stay as they are."""
    own = {new: old for old, new in _W.items()} if model_type in _WITH_W else {}
    unstacked: dict[str, TensorHeader] = {}
    for name, header in tensors.items():
        moe, switch, rest = name.partition(SWITCH)
        if not switch or len(header.shape) != 3 or header.num_bytes == 0:
            unstacked[name] = header
            continue
        projection, dot, part = rest.partition(".")
        size = header.num_bytes // header.shape[0]
        for index in range(header.shape[0]):
            begin = header.begin + index * size
            one = replace(header, shape=header.shape[1:], begin=begin, end=begin + size)
            unstacked[f"{moe}.experts.{index}.{own.get(projection, projection)}{dot}{part}"] = one
    return unstacked
