"""Proves edges: with random scales folded through all of them, the block must still compute the same.

Scales are powers of two, so that folding is exact in any float type: true edges change next to nothing, and undoing the
fold restores every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from quantcore.engine.runtime.shards import local_rows
from quantcore.engine.transforms.mappings.record import BlockRecord, Run, float_tensors, record_block, widened
from quantcore.engine.transforms.mappings.scale_pair import ScalePair, shape_of, weight_of

MAX_FOLD_CHANGE = 1e-3
MAX_FOLD_CHANGE_FLOAT16 = 1e-2
"""Largest relative change by true edges.

Measured on 30 tiny architectures: at most 6e-7 in float32 and 0 in bfloat16; in float16, whose small numbers lose bits
when they are halved, 2e-5, and 1.3e-4 with trained weights. Edges with a wrong activation, reader, order or kind of
norm cause 0.19 and more, two wrong channels of 128 still 0.008.
"""
_LARGEST_FACTOR = 16  # a weight that is both consumer and producer is scaled by 4 twice


def prove(block: nn.Module, run: Run, edges: Sequence[ScalePair]) -> float:
    """Return the relative change of the block by random scales folded through all ``edges`` at once.

    It is the largest over the block's update, the output of every layer (the update would hide small ones), the
    routers' choices and everything else that leaves the block. 0 without edges. Weights are restored bit for bit.
    """
    if not edges:
        return 0.0
    with exact_norms(block, edges):
        return folding_changes(block, run, edges, record_block(block, run))


def hold(block: nn.Module, change: float) -> bool:
    """Return whether this change is small enough for true edges of ``block``."""
    is_float16 = any(parameter.dtype == torch.float16 for parameter in block.parameters())
    return change <= (MAX_FOLD_CHANGE_FLOAT16 if is_float16 else MAX_FOLD_CHANGE)


@contextmanager
def exact_norms(block: nn.Module, edges: Sequence[ScalePair]) -> Iterator[None]:
    """Let norms that multiply with 1 + weight compute in float32; their own dtype would round the folded factor."""
    with ExitStack() as stack:
        for name in {edge.producer for edge in edges if edge.plus_one}:
            stack.enter_context(_in_input_dtype(block.get_submodule(name)))
            stack.enter_context(widened(block.get_submodule(name), ()))
        yield


def folding_changes(block: nn.Module, run: Run, edges: Sequence[ScalePair], before: BlockRecord) -> float:
    """Do the same as ``prove`` with a recorded run without folds; both runs are within ``exact_norms``."""
    with folded(block, edges) as divisors:
        after = record_block(block, run)
    changes = [relative_change(before.update, after.update)]
    changes += [relative_change(old, new) for old, new in _paired(before.beside, after.beside)]
    changes += [_typical_change(old, new) for old, new in zip(before.routing, after.routing, strict=True)]
    for name, outputs in before.outputs.items():
        for old, new in _paired(outputs, after.outputs.get(name, [])):
            restored = new.float() * divisors[name].to(new.device) if name in divisors else new
            changes.append(relative_change(old, restored))
    return max(changes)


def _paired(before: Any, after: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(float_tensors(before), float_tensors(after), strict=True))


def relative_change(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return |after - before| / |before|; equal infinities count as 0. Infinite for NaN, or if 0 becomes nonzero."""
    old, new = before.float(), after.float()
    norms = torch.where(old == new, 0, new - old).norm(), torch.where(old.isfinite(), old, 0).norm()
    moved, size = torch.stack(norms).tolist()
    return 0.0 if moved == 0 else moved / size if size > 0 and moved == moved else float("inf")


@contextmanager
def folded(block: nn.Module, edges: Sequence[ScalePair]) -> Iterator[dict[str, torch.Tensor]]:
    """Fold random powers of two through all edges while this lasts; yield the divisors [O] of producers' outputs."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), ExitStack() as undo:
        for name in {name for edge in edges for name in (edge.producer, *edge.consumers)}:
            undo.callback(_keep_fragile(weight_of(block.get_submodule(name))))
        divisors: dict[str, torch.Tensor] = {}
        for edge in edges:
            scale_F = random_scales(edge.num_scales, generator)
            ones = torch.ones(shape_of(block.get_submodule(edge.producer))[0])
            divisors.setdefault(edge.producer, ones)[edge.rows] *= scale_F
            undo.enter_context(divided(block, edge, scale_F))
            edge.multiply(block, scale_F)
            undo.callback(edge.multiply, block, 1 / scale_F)
        yield divisors


def random_scales(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return random scales out of 1/4, 1/2, 2 and 4, [count]."""
    return torch.tensor([0.25, 0.5, 2.0, 4.0])[torch.randint(4, (count,), generator=generator)]


@contextmanager
def divided(block: nn.Module, edge: ScalePair, scale_F: torch.Tensor) -> Iterator[None]:
    """Keep the producer divided, as in a fold, while the context lasts."""
    producer = block.get_submodule(edge.producer)
    weight, bias = producer.get_parameter("weight"), getattr(producer, "bias", None)
    with ExitStack() as undo:
        if bias is not None:
            undo.callback(local_rows(bias).copy_, local_rows(bias).clone())
        if weight.ndim == 1:
            undo.callback(weight.data.copy_, weight.data.clone())
        else:
            undo.callback(edge.divide, block, 1 / scale_F)
        edge.divide(block, scale_F)
        yield


@contextmanager
def _in_input_dtype(module: nn.Module) -> Iterator[None]:
    """Let ``module`` return the dtype of its input while this lasts, whatever later hooks do to that."""
    dtypes: list[torch.dtype] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        dtypes.append(float_tensors(args)[0].dtype)

    def cast(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output.to(dtypes.pop())

    with module.register_forward_pre_hook(note), module.register_forward_hook(cast):
        yield


def _keep_fragile(weight: torch.Tensor) -> Callable[[], None]:
    """Return a function that restores values so small or so large that scaling by powers of two is not exact."""
    limits, size = torch.finfo(weight.dtype), weight.abs()
    fragile = (size < limits.tiny * _LARGEST_FACTOR) & (size > 0) | (size > limits.max / _LARGEST_FACTOR)
    where = fragile.nonzero(as_tuple=True)
    kept = weight[where]

    def put_back() -> None:
        weight[where] = kept

    return put_back


def _typical_change(before_TE: torch.Tensor, after_TE: torch.Tensor) -> float:
    """Return the median change over tokens: rounding may flip a router's choice between two equally good experts."""
    moved, size = (after_TE - before_TE).norm(dim=-1), before_TE.norm(dim=-1)
    change = torch.where(moved == 0, 0, moved / size).nan_to_num(nan=float("inf"))
    return change.median().item()
