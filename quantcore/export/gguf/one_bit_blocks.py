"""GGUF's super-blocks of IQ1: 256 codes of a row as indexes into a book of ternary vectors, moved to one side.

Layouts as in ggml (``ggml-common.h``), little-endian; the 2048 vectors have eight values of -1, 0 and 1 each, to which
an eighth is added or from which it is taken. Scales of 3 bits stand for an odd number of units. IQ1_S: the float16
unit; the low bytes of the indexes; 16 bits for each group of 32: four times the high three bits, the scale, and the
side. IQ1_M: the low bytes; half a byte for each vector: the high three bits and its side; four times 16 bits: the
scales of four groups of 16, and four bits of the float16 unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantcore.config.quantization import QuantizationSpec
from quantcore.config.spec import SUPER_BLOCK
from quantcore.export.gguf.vector_blocks import as_bytes, as_numbers, book_of, index_of, levels_of_book, odd_scales
from quantcore.formats import IntFormat
from quantcore.formats.tables import kept
from quantcore.formats.vectors import VectorBook

if TYPE_CHECKING:
    import torch

    from quantcore.tensors.qtensor import QTensor

_VECTOR = 8  # values
_NUM_VECTORS = SUPER_BLOCK // _VECTOR
_GROUP = 32  # values of a side in IQ1_S
_FOUR_BITS = IntFormat("four_bits", 4, signed=False)


@dataclass(frozen=True)
class OneBit:
    """IQ1_S or IQ1_M, with the number of groups that have a scale, and the bytes of a super-block."""

    name: str
    num_groups: int
    num_bytes: int

    @property
    def _book(self) -> VectorBook:
        return book_of(self.name)

    def encode(self, weight: QTensor) -> torch.Tensor:
        """Return rows of super-blocks as bytes, uint8 [O, B * num_bytes], for codes [O, I] with scales [O, G]."""
        import torch

        from quantcore.tensors.packing import pack

        unit, stored = odd_scales(weight, self.num_groups)
        codes = weight.codes.reshape(len(weight.codes), -1, _NUM_VECTORS, _VECTOR).int()
        is_below = (codes[..., 0] & 1 ^ 1).long()  # the lower of two levels around each number is the even one
        index = index_of(self._book, codes >> 1)
        low, high = (index & 0xFF).to(torch.uint8), (index >> 8).long()
        half = unit.half().unsqueeze(-1).view(torch.uint8)
        if self.name == "IQ1_S":
            words = (
                _joined(high.reshape(*stored.shape, 4), 3) | stored << 12 | is_below[..., :: _GROUP // _VECTOR] << 15
            )
            return torch.cat([half, low, as_bytes(words, 2)], dim=-1).flatten(-2)
        bits = as_numbers(half, 2) >> torch.tensor([0, 4, 8, 12], device=half.device) & 0xF
        words = _joined(stored.reshape(*stored.shape[:2], 4, 4), 3) | bits << 12
        nibbles = pack((high | is_below << 3).to(torch.uint8), 4, dtype=torch.uint8)
        return torch.cat([low, nibbles, as_bytes(words, 2)], dim=-1).flatten(-2)

    def decode(self, rows: torch.Tensor, spec: QuantizationSpec) -> QTensor:
        """Return the inverse of ``encode``."""
        import torch

        from quantcore.tensors.affine import QParams
        from quantcore.tensors.packing import unpack
        from quantcore.tensors.qtensor import QTensor

        blocks = rows.reshape(len(rows), -1, self.num_bytes)
        if self.name == "IQ1_S":
            half, low, words = torch.split(blocks, [2, _NUM_VECTORS, SUPER_BLOCK // _GROUP * 2], dim=-1)
            numbers = as_numbers(words, 2)
            high, stored = _divided(numbers, 3), numbers >> 12 & 7
            is_below = (numbers >> 15).repeat_interleave(_GROUP // _VECTOR, dim=-1)
        else:
            low, nibbles, words = torch.split(blocks, [_NUM_VECTORS, _NUM_VECTORS // 2, 8], dim=-1)
            numbers, both = as_numbers(words, 2), unpack(nibbles.contiguous(), _FOUR_BITS).long()
            high, is_below, stored = both & 7, both >> 3, _divided(numbers, 3)
            half = as_bytes(_joined(numbers.unsqueeze(-2) >> 12, 4), 2)
        unit = half.contiguous().view(torch.float16).float()
        level = kept(levels_of_book, self._book, rows.device)[low.long() | high << 8]
        codes = (2 * level + 1 - is_below.unsqueeze(-1)).to(torch.uint8)
        return QTensor(codes.flatten(1), QParams((unit * (2 * stored + 1)).flatten(1)), spec)


ONE_BIT_TYPES: dict[str, OneBit] = {"IQ1_S": OneBit("IQ1_S", 8, 50), "IQ1_M": OneBit("IQ1_M", 16, 56)}


def _joined(parts: torch.Tensor, bits: int) -> torch.Tensor:
    """Return small numbers [..., N] as the bits of one number each, the first one lowest."""
    return sum((parts[..., place] << bits * place for place in range(1, parts.shape[-1])), parts[..., 0])


def _divided(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the inverse of ``_joined`` for four small numbers each: [..., W] to [..., 4 * W]."""
    import torch

    mask = (1 << bits) - 1
    return torch.stack([numbers >> bits * place & mask for place in range(4)], dim=-1).flatten(-2)
