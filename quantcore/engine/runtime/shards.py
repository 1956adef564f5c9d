"""Parameters of which every rank has a shard of rows (``DTensor``, FSDP2; see ``engine.runtime.sharded``).

The functions also accept parameters that are not sharded: code that reads or changes weights through them works on
both. A layer runs after all ranks have gathered its shards together; a rank that has nothing to run then is *idle*: it
runs the layer, but the result is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch

_IDLE: ContextVar[bool] = ContextVar("idle", default=False)


def is_sharded(tensor: torch.Tensor) -> TypeGuard[Any]:
    """Return True for a ``DTensor``, of which each rank has some rows, without importing that class."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all rows. For a sharded parameter all ranks call it together, and get a copy."""
    if not is_sharded(tensor):
        return tensor.data
    result: torch.Tensor = tensor.full_tensor()
    return result


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of this rank, to be changed in place; a sharded parameter may have none here."""
    if not is_sharded(tensor):
        return tensor.data
    result: torch.Tensor = tensor.to_local()
    return result


def rows_of(tensor: torch.Tensor) -> range:
    """Return the range of the rows that ``local_rows`` returns."""
    if not is_sharded(tensor):
        return range(len(tensor))
    size, rank = tensor.device_mesh.size(), tensor.device_mesh.get_local_rank()
    step = -(-len(tensor) // size)  # as torch.chunk does
    return range(min(rank * step, len(tensor)), min((rank + 1) * step, len(tensor)))


def put(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Give ``parameter`` the values of a whole tensor of its shape, which all ranks have."""
    if not is_sharded(parameter):
        parameter.data = value
        return
    rows = rows_of(parameter)
    with torch.no_grad():
        local_rows(parameter).copy_(value[rows.start : rows.stop])


@contextmanager
def changing(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield all rows, to be changed in place. For a sharded parameter all ranks call it; each keeps its own rows."""
    value = whole(parameter)
    yield value
    if is_sharded(parameter):
        put(parameter, value)


@contextmanager
def idling() -> Iterator[None]:
    """Let all observers ignore runs of layers inside the block."""
    before = _IDLE.set(True)
    try:
        yield
    finally:
        _IDLE.reset(before)


def counts(x: torch.Tensor) -> bool:
    """Return False for passes that no observer may count, and for an ``x`` without values."""
    return x.numel() > 0 and not _IDLE.get()
