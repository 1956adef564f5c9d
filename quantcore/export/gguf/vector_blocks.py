"""GGUF's super-blocks of vectors: 256 codes of a row as indexes into a book, their signs, and the scales of groups.

Layouts as in ggml (``ggml-common.h``), little-endian. All begin with the float16 unit, and have scales of 4 bits, each
of which stands for an odd number of units. IQ3_S: the low bytes of the indexes, their ninth bits, the signs, the
scales. IQ2_S: the low bytes, the signs, the high two bits, the scales. IQ2_XS: 16 bits a vector, an index of 9 bits and
the signs, then the scales. IQ2_XXS and IQ3_XXS: indexes of 8 bits, and for each group of 32 four times signs and a
scale in 32 bits; in IQ2_XXS those follow the indexes of their group, in IQ3_XXS those of the whole super-block. Where
the number of signs is even the eighth of them is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantcore.config.quantization import QuantizationSpec
from quantcore.config.spec import SUPER_BLOCK
from quantcore.formats import BUILT_IN, IntFormat
from quantcore.formats.tables import kept
from quantcore.formats.vectors import SIGNS, VectorBook

if TYPE_CHECKING:
    import torch

    from quantcore.tensors.qtensor import QTensor

_BIT, _TWO_BITS = IntFormat("bit", 1, signed=False), IntFormat("two_bits", 2, signed=False)
_FOUR_BITS, _SEVEN_BITS = IntFormat("four_bits", 4, signed=False), 0x7F


def book_of(name: str) -> VectorBook:
    """Return the book of a type of vectors, such as IQ2_XS."""
    book = BUILT_IN[name.lower()].vectors
    assert book is not None
    return book


def odd_scales(weight: QTensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the units [O, B], and the scales [O, B, num_groups] as stored, int64: s stands for 2 s + 1 units."""
    from quantcore.tensors.super_blocks import LARGEST, two_levels

    scale = weight.params.scale
    unit, whole = two_levels(scale.reshape(len(scale), -1, num_groups), LARGEST[weight.spec.scale_type])
    return unit, ((whole - 1) / 2).clamp(min=0).long()


@dataclass(frozen=True)
class Vectors:
    """A type of vectors, with the number of groups that have a scale, and the bytes of a super-block."""

    name: str
    num_groups: int
    num_bytes: int

    @property
    def _num_vectors(self) -> int:
        return SUPER_BLOCK // self._book.size

    @property
    def _book(self) -> VectorBook:
        return book_of(self.name)

    def encode(self, weight: QTensor) -> torch.Tensor:
        """Return rows of super-blocks as bytes, uint8 [O, B * num_bytes], for codes [O, I] with scales [O, G]."""
        import torch

        from quantcore.tensors.packing import pack

        unit, stored = odd_scales(weight, self.num_groups)
        num_levels = len(BUILT_IN[self.name.lower()].grid()) // 2
        codes = weight.codes.reshape(len(weight.codes), -1, SUPER_BLOCK).int()
        is_negative = codes < num_levels
        level = torch.where(is_negative, num_levels - 1 - codes, codes - num_levels)
        index = index_of(self._book, level.reshape(*codes.shape[:2], -1, self._book.size))
        signs = pack(is_negative.reshape(*codes.shape[:2], -1, SIGNS).to(torch.uint8), 1, dtype=torch.uint8).flatten(-2)
        parts = [unit.half().unsqueeze(-1).view(torch.uint8), *self._pack(index, signs, stored.to(torch.uint8))]
        return torch.cat(parts, dim=-1).flatten(-2)

    def decode(self, rows: torch.Tensor, spec: QuantizationSpec) -> QTensor:
        """Return the inverse of ``encode``."""
        import torch

        from quantcore.tensors.affine import QParams
        from quantcore.tensors.packing import unpack
        from quantcore.tensors.qtensor import QTensor

        blocks = rows.reshape(len(rows), -1, self.num_bytes)
        index, signs, stored = self._unpack(blocks[..., 2:].contiguous())
        unit = blocks[..., :2].contiguous().view(torch.float16).float()
        is_negative = unpack(signs.unsqueeze(-1).contiguous(), _BIT).flatten(-2).bool()
        levels = kept(levels_of_book, self._book, rows.device)
        level = levels[index.long()].flatten(-2)
        num_levels = len(BUILT_IN[self.name.lower()].grid()) // 2
        codes = torch.where(is_negative, num_levels - 1 - level, num_levels + level).to(torch.uint8)
        scale = unit * (2 * stored.float() + 1)
        return QTensor(codes.flatten(1), QParams(scale.flatten(1)), spec)

    def _pack(self, index: torch.Tensor, signs: torch.Tensor, stored: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes after the unit, in parts: of indexes [O, B, V], signs [O, B, 32] and scales [O, B, G]."""
        import torch

        from quantcore.tensors.packing import pack

        low = (index & 0xFF).to(torch.uint8)
        high = (index >> 8).to(torch.uint8)
        if self.name == "IQ3_S":
            return [low, pack(high, 1, dtype=torch.uint8), signs, pack(stored, 4, dtype=torch.uint8)]
        if self.name == "IQ2_S":
            return [low, signs, pack(high, 2, dtype=torch.uint8), pack(stored, 4, dtype=torch.uint8)]
        seven = (signs & _SEVEN_BITS).int()
        if not torch.equal(_with_eighth(seven), signs):
            raise RuntimeError(f"an odd number of signs, which {self.name} cannot store")
        if self.name == "IQ2_XS":
            return [as_bytes(index | seven << 9, 2), pack(stored, 4, dtype=torch.uint8)]
        of_groups = seven.reshape(*seven.shape[:2], -1, 4)
        words = sum((of_groups[..., place].long() << 7 * place for place in range(4)), stored.long() << 28)
        if self.name == "IQ3_XXS":
            return [low, as_bytes(words, 4)]
        both = [low.reshape(*low.shape[:2], -1, 4), as_bytes(words, 4).reshape(*low.shape[:2], -1, 4)]
        return [torch.cat(both, dim=-1).flatten(-2)]

    def _unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the inverse of ``_pack``, for its parts one after another."""
        import torch

        from quantcore.tensors.packing import unpack

        num_vectors = self._num_vectors
        if self.name in ("IQ3_S", "IQ2_S"):
            high_bits = _BIT if self.name == "IQ3_S" else _TWO_BITS
            num_high = num_vectors * high_bits.bits // 8
            sizes = [num_vectors, num_high, 32] if self.name == "IQ3_S" else [num_vectors, 32, num_high]
            low, second, third, scales = torch.split(packed, [*sizes, self.num_groups // 2], dim=-1)
            high, signs = (second, third) if self.name == "IQ3_S" else (third, second)
            index = low.int() | unpack(high.contiguous(), high_bits).int() << 8
            return index, signs, unpack(scales.contiguous(), _FOUR_BITS)
        if self.name == "IQ2_XS":
            words = as_numbers(packed[..., : 2 * num_vectors], 2)
            scales = unpack(packed[..., 2 * num_vectors :].contiguous(), _FOUR_BITS)
            return words & 0x1FF, _with_eighth(words >> 9), scales
        if self.name == "IQ3_XXS":
            low, words = packed[..., :num_vectors], as_numbers(packed[..., num_vectors:], 4)
        else:
            both = packed.reshape(*packed.shape[:2], -1, 8)
            low, words = both[..., :4].flatten(-2), as_numbers(both[..., 4:].flatten(-2), 4)
        seven = torch.stack([words >> 7 * place & _SEVEN_BITS for place in range(4)], dim=-1).flatten(-2)
        return low.int(), _with_eighth(seven), (words >> 28).to(torch.uint8)


VECTOR_TYPES: dict[str, Vectors] = {
    each.name: each
    for each in (
        Vectors("IQ2_XXS", 8, 66), Vectors("IQ2_XS", 16, 74), Vectors("IQ2_S", 16, 82), Vectors("IQ3_XXS", 8, 98),
        Vectors("IQ3_S", 8, 110),
    )
}  # fmt: skip


def levels_of_book(book: VectorBook, device: torch.device) -> torch.Tensor:
    """Return the vectors as numbers of their magnitudes from the smallest on, int32 [vectors, size]."""
    import torch

    magnitudes = book.magnitudes(device)
    distinct = torch.tensor(sorted(set(magnitudes.flatten().tolist())), device=device)
    return torch.searchsorted(distinct, magnitudes).int()


def _index_table(book: VectorBook, device: torch.device) -> torch.Tensor:
    """Return the index of each vector by the number that its levels are the digits of; -1 for no vector."""
    import torch

    levels = kept(levels_of_book, book, device).long()
    base = int(levels.max()) + 1
    table = torch.full((base**book.size,), -1, dtype=torch.int32, device=device)
    table[levels @ _powers(base, book.size, device)] = torch.arange(len(levels), dtype=torch.int32, device=device)
    return table


def _powers(base: int, size: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.tensor([base**place for place in range(size)], device=device)


def index_of(book: VectorBook, level: torch.Tensor) -> torch.Tensor:
    """Return the indexes [...] of vectors of levels [..., size]. Raises RuntimeError for one that the book lacks."""
    base = int(kept(levels_of_book, book, level.device).max()) + 1
    number = (level.long() * _powers(base, book.size, level.device)).sum(-1)
    index = kept(_index_table, book, level.device)[number]
    if (index < 0).any():
        raise RuntimeError(f"{int((index < 0).sum())} vector(s) are not in the book of {book.name}")
    return index


def _with_eighth(seven: torch.Tensor) -> torch.Tensor:
    """Return the signs of eight values as uint8, of which ``seven`` has all but the last: an even number is set."""
    import torch

    parity = seven
    for shift in (4, 2, 1):
        parity = parity ^ parity >> shift
    return (seven | (parity & 1) << 7).to(torch.uint8)


def as_bytes(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Return numbers [..., N] as ``size`` bytes each, uint8 [..., N * size]."""
    import torch

    parts = [(numbers.long() >> 8 * place & 0xFF).to(torch.uint8) for place in range(size)]
    return torch.stack(parts, dim=-1).flatten(-2)


def as_numbers(packed: torch.Tensor, size: int) -> torch.Tensor:
    """Return the inverse of ``as_bytes``, int64."""
    parts = packed.long().reshape(*packed.shape[:-1], -1, size)
    return sum((parts[..., place] << 8 * place for place in range(1, size)), parts[..., 0])
