"""Groups of values that share one scale: a tensor is cut into [R, G, S] and put together again.

Legend, here and wherever shapes are named: O out, I in, T tokens, R rows, G groups of a row, S values of one scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING

from quantcore.config.spec import QSchemeType, QuantizationSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Grouping:
    """The groups of a tensor: ``size`` values along ``axis`` (None: all), or blocks of ``block`` rows and columns.

    With ``across`` all other axes share the scale too: one scale per channel instead of one per group.
    """

    axis: int | None = None
    size: int | None = None
    across: bool = False
    block: tuple[int, int] | None = None

    def num_scales(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers (R, G) of rows and groups for a tensor of ``shape``."""
        if self.block is not None:
            return ceil(shape[0] / self.block[0]), ceil(shape[1] / self.block[1])
        if self.axis is None:
            return 1, 1
        length = shape[self.axis]
        if self.across:
            return length, 1
        return prod(shape) // length, length // self._size(length)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of any shape as [R, G, S]; a view if possible. Incomplete blocks are padded with zeros."""
        rows, groups = self.num_scales(tuple(x.shape))
        if self.block is not None:
            return self._split_blocks(x, rows, groups)
        if self.axis is not None:
            x = x.movedim(self.axis, 0 if self.across else -1)
        return x.reshape(rows, groups, -1)

    def join(self, x_RGS: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Undo ``split`` for a tensor of ``shape``."""
        if self.block is not None:
            height, width = self.block
            rows, groups, _ = x_RGS.shape
            blocks = x_RGS.reshape(rows, groups, height, width).transpose(1, 2)
            return blocks.reshape(rows * height, groups * width)[: shape[0], : shape[1]]
        if self.axis is None:
            return x_RGS.reshape(shape)
        lengths = list(shape)
        length = lengths.pop(self.axis)
        moved = (length, *lengths) if self.across else (*lengths, length)
        return x_RGS.reshape(moved).movedim(0 if self.across else -1, self.axis)

    def _size(self, length: int) -> int:
        return length if self.size is None else self.size

    def _split_blocks(self, x: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
        import torch

        assert self.block is not None
        height, width = self.block
        missing = (rows * height - x.shape[0], groups * width - x.shape[1])
        if any(missing):
            x = torch.nn.functional.pad(x, (0, missing[1], 0, missing[0]))
        return x.reshape(rows, height, groups, width).transpose(1, 2).reshape(rows, groups, height * width)


PER_TENSOR = Grouping()
PER_TOKEN = Grouping(axis=-1)


def weight_grouping(spec: QuantizationSpec) -> Grouping:
    """Return the grouping for a weight or a bias in the layout [out, in, *kernel]."""
    if spec.qscheme is QSchemeType.per_tensor:
        return PER_TENSOR
    if spec.qscheme is QSchemeType.per_block:
        return Grouping(block=spec.block_size)
    if spec.qscheme is QSchemeType.per_channel:
        return Grouping(axis=spec.ch_axis or 0, across=True)
    return Grouping(axis=1 if spec.ch_axis in (None, -1) else spec.ch_axis, size=_group_size(spec))


def activation_grouping(spec: QuantizationSpec) -> Grouping:
    """Return the grouping for an activation [..., tokens, features]."""
    if spec.qscheme is QSchemeType.per_tensor:
        return PER_TENSOR
    if spec.qscheme is QSchemeType.per_group:
        return Grouping(axis=-1, size=_group_size(spec))
    return PER_TOKEN if spec.is_dynamic else Grouping(axis=spec.ch_axis, across=True)


def _group_size(spec: QuantizationSpec) -> int | None:
    return None if spec.group_size == -1 else spec.group_size
