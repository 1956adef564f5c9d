"""Look-up tables of formats, made once for each device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Fmt = TypeVar("Fmt", bound=Hashable)
Table = TypeVar("Table")

_TABLES: dict[tuple[object, Hashable, torch.device], Any] = {}


def kept(make: Callable[[Fmt, torch.device], Table], fmt: Fmt, device: torch.device) -> Table:
    """``make(fmt, device)``, kept: making a table takes longer than a small look-up, and on a GPU waits for the GPU.

    Not while torch.compile or torch.export trace: their tensors are not real and must not stay here; what is made then
    becomes a constant of the graph.
    """
    import torch

    if torch.compiler.is_compiling():
        return make(fmt, device)
    if (make, fmt, device) not in _TABLES:
        _TABLES[make, fmt, device] = make(fmt, device)
    table: Table = _TABLES[make, fmt, device]
    return table
