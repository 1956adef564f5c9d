"""GGUF's K-types of 4 to 6 bits: 256 codes of a row, the whole-number scales of their groups, and their units.

Layouts as in ggml (``ggml-common.h``), little-endian. Q4_K, Q5_K: the unit of the scales and that of the minimums; 8
scales and 8 minimums of 6 bits in 12 bytes; the fifth bits, byte i those of code i of all groups; the low four bits,
two groups of 32 in a byte each. Q6_K: the low four bits in halves of 128, code i beside code 64 + i; the high two, four
groups of 32 in a byte each; 16 scales; their unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantcore.config.quantization import QuantizationSpec
from quantcore.config.spec import SUPER_BLOCK
from quantcore.formats import IntFormat

if TYPE_CHECKING:
    import torch

    from quantcore.tensors.qtensor import QTensor

_GROUP = 32  # codes whose high bits lie together
_BIT, _TWO_BITS = IntFormat("bit", 1, signed=False), IntFormat("two_bits", 2, signed=False)


@dataclass(frozen=True)
class MinimumK:
    """Q4_K and Q5_K: codes from a minimum, in 8 groups of 32."""

    bits: int

    @property
    def num_bytes(self) -> int:
        """The number of bytes of one super-block."""
        return 4 + 12 + SUPER_BLOCK * self.bits // 8

    def encode(self, weight: QTensor) -> torch.Tensor:
        """Return rows of super-blocks as bytes, uint8 [O, B * num_bytes], for codes [O, I] with scales [O, G]."""
        import torch

        from quantcore.tensors.affine import minimum_of
        from quantcore.tensors.packing import pack, pack_halves
        from quantcore.tensors.super_blocks import LARGEST, two_levels

        params, largest = weight.params, LARGEST[weight.spec.scale_type]
        assert params.zero_point is not None
        low = -minimum_of(params.zero_point, params.scale, weight.spec)
        levels = [two_levels(part.reshape(len(part), -1, 8), largest) for part in (params.scale, low)]
        parts = [torch.stack([unit for unit, _ in levels], dim=-1).half().view(torch.uint8)]
        parts.append(_pack_six_bits(*(whole.to(torch.uint8) for _, whole in levels)))
        codes = weight.codes.reshape(len(weight.codes), -1, 8, _GROUP)
        if self.bits == 5:
            parts.append(pack((codes >> 4).transpose(-1, -2), 1, dtype=torch.uint8).flatten(-2))
        parts.append(pack_halves(codes.reshape(*codes.shape[:2], 4, 2 * _GROUP)).flatten(-2))
        return torch.cat(parts, dim=-1).flatten(-2)

    def decode(self, rows: torch.Tensor, spec: QuantizationSpec) -> QTensor:
        """Return the inverse of ``encode``."""
        import torch

        from quantcore.tensors.affine import params_of_minimum
        from quantcore.tensors.packing import unpack, unpack_halves
        from quantcore.tensors.qtensor import QTensor

        blocks = rows.reshape(len(rows), -1, self.num_bytes)
        units = blocks[..., :4].contiguous().view(torch.float16).float()
        scale, low = (
            (units[..., [which]] * whole.float()).flatten(1)
            for which, whole in enumerate(_unpack_six_bits(blocks[..., 4:16]))
        )
        packed = blocks[..., -SUPER_BLOCK // 2 :].reshape(*blocks.shape[:2], 4, _GROUP)
        codes = unpack_halves(packed).reshape(*blocks.shape[:2], 8, _GROUP)
        if self.bits == 5:
            high = unpack(blocks[..., 16 : 16 + _GROUP].unsqueeze(-1).contiguous(), _BIT)
            codes = codes | high.transpose(-1, -2) << 4
        return QTensor(codes.flatten(1), params_of_minimum(scale, -low, spec), spec)


@dataclass(frozen=True)
class Q6K:
    """Q6_K: codes around zero, in 16 groups of 16."""

    num_bytes: int = SUPER_BLOCK * 6 // 8 + 16 + 2

    def encode(self, weight: QTensor) -> torch.Tensor:
        """Return rows of super-blocks as bytes, uint8 [O, B * num_bytes], for codes [O, I] with scales [O, G]."""
        import torch

        from quantcore.tensors.packing import pack, pack_halves
        from quantcore.tensors.super_blocks import LARGEST, two_levels

        scale = weight.params.scale
        unit, whole = two_levels(scale.reshape(len(scale), -1, 16), LARGEST[weight.spec.scale_type])
        codes = (weight.codes + 32).to(torch.uint8).reshape(len(weight.codes), -1, 2, SUPER_BLOCK // 2)
        high = (codes >> 4).reshape(*codes.shape[:3], 4, _GROUP).transpose(-1, -2)
        parts = [
            pack_halves(codes).flatten(-2),
            pack(high, 2, dtype=torch.uint8).flatten(-3),
            whole.to(torch.int8).view(torch.uint8),
            unit.half().unsqueeze(-1).view(torch.uint8),
        ]
        return torch.cat(parts, dim=-1).flatten(-2)

    def decode(self, rows: torch.Tensor, spec: QuantizationSpec) -> QTensor:
        """Return the inverse of ``encode``."""
        import torch

        from quantcore.tensors.affine import QParams
        from quantcore.tensors.packing import unpack, unpack_halves
        from quantcore.tensors.qtensor import QTensor

        blocks = rows.reshape(len(rows), -1, self.num_bytes)
        low, high, whole, unit = torch.split(blocks, [SUPER_BLOCK // 2, SUPER_BLOCK // 4, 16, 2], dim=-1)
        codes = unpack_halves(low.reshape(*blocks.shape[:2], 2, -1))
        bits = unpack(high.reshape(*blocks.shape[:2], 2, _GROUP, 1), _TWO_BITS).transpose(-1, -2)
        codes = codes | bits.reshape(codes.shape) << 4
        scale = whole.contiguous().view(torch.int8) * unit.contiguous().view(torch.float16).float()
        return QTensor((codes.to(torch.int8) - 32).flatten(1), QParams(scale.flatten(1)), spec)


K_TYPES: dict[str, MinimumK | Q6K] = {"Q4_K": MinimumK(4), "Q5_K": MinimumK(5), "Q6_K": Q6K()}


def _pack_six_bits(scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Pack 8 scales and 8 minimums [..., 8] below 64 into 12 bytes.

    The bytes hold four scales, four minimums, then the low bits of the other scales and minimums in halves of bytes.
    The high bits of those are in the first eight bytes.
    """
    import torch

    first = [part[..., :4] | (part[..., 4:] >> 4 << 6) for part in (scale, low)]
    return torch.cat([*first, (scale[..., 4:] & 0xF) | (low[..., 4:] << 4)], dim=-1)


def _unpack_six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inverse of ``_pack_six_bits``."""
    import torch

    scale, low, rest = packed.chunk(3, dim=-1)
    return (
        torch.cat([scale & 63, (rest & 0xF) | (scale >> 6 << 4)], dim=-1),
        torch.cat([low & 63, (rest >> 4) | (low >> 6 << 4)], dim=-1),
    )
