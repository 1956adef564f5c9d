"""Records tensors with the width of the residual stream, in a decoder block or around the blocks.

Legend: H width of the stream, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn

from quantcore.engine.model.experts import SplitExperts, is_fused
from quantcore.engine.runtime.shards import is_sharded
from quantcore.engine.transforms.mappings.record import Forward, as_float32, recorded

Run = Callable[[torch.Tensor], torch.Tensor]
Replace = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StreamNorm:
    """A norm of the stream and the ``readers`` of its output. With ``plus_one`` it multiplies with 1 + weight."""

    name: str
    readers: tuple[str, ...]
    plus_one: bool = False

    def factor(self, module: nn.Module) -> torch.Tensor | None:
        """Return the factors of the norm's channels, float32 [H]; None if it has no weight."""
        weight = getattr(module.get_submodule(self.name), "weight", None)
        return None if weight is None else weight.detach().float() + (1.0 if self.plus_one else 0.0)


@dataclass(frozen=True)
class Residual:
    """Names of modules around the stream. ``readers`` are all of them, also those that read it without a norm.

    Experts that are still fused count as one reader and writer, split ones by their linear layers. ``change`` is the
    difference of the block's update under a rotation, relative to its length; it comes from rounding.
    """

    norms: tuple[StreamNorm, ...] = ()
    readers: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    change: float = 0.0


@dataclass
class StreamRecord:
    """The first inputs and outputs of modules that have the width of the stream, and the ``output`` of the run."""

    output: torch.Tensor
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


def record_stream(
    module: nn.Module, run: Callable[[], torch.Tensor], width: int, replaced: Mapping[str, Replace] | None = None
) -> StreamRecord:
    """Run once, and return the record. Outputs of the modules in ``replaced`` pass through these functions."""
    record = StreamRecord(torch.empty(0))

    def is_stream(value: Any) -> TypeGuard[torch.Tensor]:
        return isinstance(value, torch.Tensor) and value.shape[-1:] == (width,) and value.is_floating_point()

    def wrap(name: str, forward: Forward) -> Forward:
        def noting(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            if is_stream(first):
                record.inputs.setdefault(name, first)
            if is_stream(output):
                output = replaced[name](output) if replaced and name in replaced else output
                record.outputs.setdefault(name, output)
            return output

        return noting

    with recorded(dict(parts_of(module)), wrap):
        record.output = run()
    return record


def parts_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules inside; the experts of a mixture count as one."""
    experts: tuple[str, ...] = ()
    for name, part in module.named_modules():
        if not name or (experts and name.startswith(experts)):
            continue
        if is_experts(part):
            experts = (*experts, f"{name}.")
        yield name, part


@contextmanager
def widened_as_used(block: nn.Module) -> Iterator[None]:
    """Let the block compute in float32 inside the ``with``: weights are widened one by one as they are used."""

    def before(part: nn.Module, args: Any, kwargs: Any) -> Any:
        narrow = {name: p for name, p in part._parameters.items() if p is not None and _is_narrow(p)}
        waiting.setdefault(part, []).append(narrow)
        for name, parameter in narrow.items():
            part._parameters[name] = nn.Parameter(parameter.detach().float(), requires_grad=False)
        return (as_float32(args), as_float32(kwargs)) if part is block else None

    def after(part: nn.Module, *_: Any) -> None:
        part._parameters.update(waiting[part].pop())

    waiting: dict[nn.Module, list[dict[str, Any]]] = {}
    with ExitStack() as undo:
        for part in block.modules():
            # Shards are gathered before the first hook and released after the second.
            is_whole = not any(map(is_sharded, part.parameters(recurse=False)))
            undo.callback(part.register_forward_pre_hook(before, with_kwargs=True, prepend=is_whole).remove)
            undo.callback(part.register_forward_hook(after, always_call=True, prepend=not is_whole).remove)
        yield


def _is_narrow(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype.itemsize < 4


def is_experts(part: nn.Module) -> bool:
    return isinstance(part, SplitExperts) or is_fused(part)


def has_matrix(part: nn.Module) -> bool:
    weight = part._parameters.get("weight")
    return weight is not None and weight.ndim == 2


def norm_like(module: nn.Module, record: StreamRecord) -> list[str]:
    """Return modules that could be norms.

    They have no children or matrices, and outputs that differ from their inputs.
    """
    return [
        name
        for name, x in record.inputs.items()
        if name in record.outputs and _is_simple(module.get_submodule(name)) and not same(x, record.outputs[name])
    ]


def _is_simple(part: nn.Module) -> bool:
    return not any(True for _ in part.children()) and all(parameter.ndim == 1 for parameter in part.parameters())


def random_like(like: torch.Tensor, *, seed: int) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    return x.float().reshape(-1, x.shape[-1])


def errors_of(before: torch.Tensor, after: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Return for each token the change of the output, relative to the root mean square of ``update`` over tokens.

    Relative to its own update, a token that a gate stops would consist of rounding only.
    """
    moved: torch.Tensor = rows_of(after.float() - before.float()).norm(dim=-1)
    size: torch.Tensor = rows_of(update).norm(dim=-1).square().mean().sqrt()
    return moved / size


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.numel() == y.numel() and torch.equal(rows_of(x), rows_of(y))


def close(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool((x.float() - y.float()).norm() <= rounding(x.dtype) * y.float().norm())


def parallel(x: torch.Tensor, y: torch.Tensor, part_of: torch.Tensor | None = None) -> bool:
    """Return True if each row of x is a multiple of that of y.

    x may be the difference of ``part_of`` and another tensor.
    """
    if x.numel() != y.numel():
        return False
    rows, others = rows_of(x), rows_of(y)
    shadow = (rows * others).sum(-1, keepdim=True) / others.square().sum(-1, keepdim=True) * others
    allowed = rounding(x.dtype) * rows.norm(dim=-1)
    if part_of is not None:
        allowed += 4 * torch.finfo(x.dtype).eps * rows_of(part_of).norm(dim=-1)
    return bool(rows.any()) and bool(((rows - shadow).norm(dim=-1) <= allowed).all())


def rounding(dtype: torch.dtype) -> float:
    return 1e-4 if torch.finfo(dtype).bits >= 32 else 2e-2
