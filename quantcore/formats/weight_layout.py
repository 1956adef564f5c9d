"""Converts weights from any module's layout to [out, in, *kernel] and back, as views where possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TRANSPOSED = ("Conv1D", "ConvTranspose2d")
"""Classes that store [in, out, *kernel]: Transformers' linear layer of GPT-2, and the transposed convolution."""


def canonical(weight: torch.Tensor, kind: str, groups: int = 1) -> torch.Tensor:
    """Return the stored weight of a module of class ``kind`` as [out, in / groups, *kernel]."""
    if kind not in TRANSPOSED:
        return weight
    by_group = weight.reshape(groups, -1, *weight.shape[1:])  # [groups, in / groups, out / groups, *kernel]
    return by_group.transpose(1, 2).flatten(0, 1)


def stored(weight: torch.Tensor, kind: str, groups: int = 1) -> torch.Tensor:
    """Return the inverse of ``canonical``."""
    return canonical(weight, kind, groups).contiguous() if kind in TRANSPOSED else weight


def stored_shape(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Return the shape in which a module of class ``kind`` without groups stores a weight [out, in, *kernel]."""
    return (shape[1], shape[0], *shape[2:]) if kind in TRANSPOSED else shape
