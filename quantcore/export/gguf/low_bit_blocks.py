"""GGUF's super-blocks of low bits: 256 codes of a row, the scales of their groups, and the float16 units of the scales.

Layouts as in ggml (``ggml-common.h``), little-endian. Q2_K: 16 bytes with a scale and a minimum of 4 bits each; the
codes, four groups of 32 in the same bytes; the units of scales and minimums. Q3_K: the highest bits, byte i those of
code i of all groups of 32; the other two as in Q2_K; 16 scales of 6 bits, the low four in halves of 8 bytes, the high
two of four scales in a byte each; their unit. IQ4_XS: the unit; the high two bits of 8 scales, then the low four; the
codes of groups of 32 in halves, as in IQ4_NL. Scales of 6 bits are stored 32 higher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantcore.config.quantization import QuantizationSpec
from quantcore.config.spec import SUPER_BLOCK
from quantcore.formats import IntFormat

if TYPE_CHECKING:
    import torch

    from quantcore.tensors.affine import QParams
    from quantcore.tensors.qtensor import QTensor

_GROUP = 32  # codes whose bits lie together
_OFFSET = 32  # of stored scales
_BIT, _TWO_BITS = IntFormat("bit", 1, signed=False), IntFormat("two_bits", 2, signed=False)
_FOUR_BITS = IntFormat("four_bits", 4, signed=False)


@dataclass(frozen=True)
class Q2K:
    """Q2_K: codes from a minimum, in 16 groups of 16."""

    num_bytes: int = 16 + SUPER_BLOCK // 4 + 4

    def encode(self, weight: QTensor) -> torch.Tensor:
        """Return rows of super-blocks as bytes, uint8 [O, B * num_bytes], for codes [O, I] with scales [O, G]."""
        import torch

        from quantcore.tensors.affine import minimum_of
        from quantcore.tensors.super_blocks import LARGEST, two_levels

        params, largest = weight.params, LARGEST[weight.spec.scale_type]
        assert params.zero_point is not None
        low = -minimum_of(params.zero_point, params.scale, weight.spec)
        (unit, scales), (low_unit, lows) = (
            two_levels(part.reshape(len(part), -1, 16), largest) for part in (params.scale, low)
        )
        parts = [
            scales.to(torch.uint8) | (lows.to(torch.uint8) << 4),
            pack_two_bits(weight.codes),
            torch.stack([unit, low_unit], dim=-1).half().view(torch.uint8),
        ]
        return torch.cat(parts, dim=-1).flatten(-2)

    def decode(self, rows: torch.Tensor, spec: QuantizationSpec) -> QTensor:
        """Return the inverse of ``encode``."""
        import torch

        from quantcore.tensors.affine import params_of_minimum
        from quantcore.tensors.qtensor import QTensor

        blocks = rows.reshape(len(rows), -1, self.num_bytes)
        both, packed, units = torch.split(blocks, [16, SUPER_BLOCK // 4, 4], dim=-1)
        units = units.contiguous().view(torch.float16).float()
        scale = (units[..., :1] * (both & 0xF).float()).flatten(1)
        low = (units[..., 1:] * (both >> 4).float()).flatten(1)
        codes = unpack_two_bits(packed)
        return QTensor(codes, params_of_minimum(scale, -low, spec), spec)


@dataclass(frozen=True)
class Q3K:
    """Q3_K: codes around zero, in 16 groups of 16."""

    num_bytes: int = SUPER_BLOCK // 8 + SUPER_BLOCK // 4 + 12 + 2

    def encode(self, weight: QTensor) -> torch.Tensor:
        """Return rows of super-blocks as bytes, uint8 [O, B * num_bytes], for codes [O, I] with scales [O, G]."""
        import torch

        from quantcore.tensors.packing import pack, pack_halves

        unit, scales = _stored_scales(weight, 16)
        codes = (weight.codes + 4).to(torch.uint8)
        high = (codes >> 2).reshape(len(codes), -1, SUPER_BLOCK // _GROUP, _GROUP).transpose(-1, -2)
        high_scales = (scales >> 4).reshape(*scales.shape[:2], 4, 4).transpose(-1, -2)
        parts = [
            pack(high, 1, dtype=torch.uint8).flatten(-2),
            pack_two_bits(codes),
            pack_halves(scales & 0xF),
            pack(high_scales, 2, dtype=torch.uint8).flatten(-2),
            unit,
        ]
        return torch.cat(parts, dim=-1).flatten(-2)

    def decode(self, rows: torch.Tensor, spec: QuantizationSpec) -> QTensor:
        """Return the inverse of ``encode``."""
        import torch

        from quantcore.tensors.packing import unpack, unpack_halves
        from quantcore.tensors.qtensor import QTensor

        blocks = rows.reshape(len(rows), -1, self.num_bytes)
        sizes = [SUPER_BLOCK // 8, SUPER_BLOCK // 4, 8, 4, 2]
        high, packed, low_scales, high_scales, unit = torch.split(blocks, sizes, dim=-1)
        bits = unpack(high.unsqueeze(-1).contiguous(), _BIT).transpose(-1, -2).flatten(1)
        codes = (unpack_two_bits(packed) | bits << 2).to(torch.int8) - 4
        upper = unpack(high_scales.unsqueeze(-1).contiguous(), _TWO_BITS).transpose(-1, -2).flatten(-2)
        return QTensor(codes, _params(unit, unpack_halves(low_scales) | upper << 4), spec)


@dataclass(frozen=True)
class IQ4XS:
    """IQ4_XS: indexes into the values of IQ4_NL, in 8 groups of 32."""

    num_bytes: int = 2 + 2 + 4 + SUPER_BLOCK // 2

    def encode(self, weight: QTensor) -> torch.Tensor:
        """Return rows of super-blocks as bytes, uint8 [O, B * num_bytes], for codes [O, I] with scales [O, G]."""
        import torch

        from quantcore.tensors.packing import pack, pack_halves

        unit, scales = _stored_scales(weight, 8)
        parts = [
            unit,
            pack(scales >> 4, 2, dtype=torch.uint8),
            pack(scales & 0xF, 4, dtype=torch.uint8),
            pack_halves(weight.codes.reshape(len(weight.codes), -1, 8, _GROUP)).flatten(-2),
        ]
        return torch.cat(parts, dim=-1).flatten(-2)

    def decode(self, rows: torch.Tensor, spec: QuantizationSpec) -> QTensor:
        """Return the inverse of ``encode``."""
        import torch

        from quantcore.tensors.packing import unpack, unpack_halves
        from quantcore.tensors.qtensor import QTensor

        blocks = rows.reshape(len(rows), -1, self.num_bytes)
        unit, high, low, packed = torch.split(blocks, [2, 2, 4, SUPER_BLOCK // 2], dim=-1)
        scales = unpack(low.contiguous(), _FOUR_BITS) | unpack(high.contiguous(), _TWO_BITS) << 4
        codes = unpack_halves(packed.reshape(*blocks.shape[:2], 8, _GROUP // 2)).flatten(1)
        return QTensor(codes, _params(unit, scales), spec)


LOW_BIT_TYPES: dict[str, Q2K | Q3K | IQ4XS] = {"Q2_K": Q2K(), "Q3_K": Q3K(), "IQ4_XS": IQ4XS()}


def _stored_scales(weight: QTensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unit of each super-block as bytes [O, B, 2], and the stored scales [O, B, G], uint8."""
    import torch

    from quantcore.tensors.super_blocks import LARGEST, two_levels

    scale = weight.params.scale
    unit, whole = two_levels(scale.reshape(len(scale), -1, num_groups), LARGEST[weight.spec.scale_type])
    return unit.half().unsqueeze(-1).view(torch.uint8), (whole + _OFFSET).to(torch.uint8)


def _params(unit: torch.Tensor, scales: torch.Tensor) -> QParams:
    """Return the inverse of ``_stored_scales``."""
    import torch

    from quantcore.tensors.affine import QParams

    whole = scales.float() - _OFFSET
    return QParams((unit.contiguous().view(torch.float16).float() * whole).flatten(1))


def pack_two_bits(codes: torch.Tensor) -> torch.Tensor:
    """Pack the low two bits of codes [O, I]: byte i of 32 holds code i of four groups of 32."""
    import torch

    from quantcore.tensors.packing import pack

    groups = codes.to(torch.uint8).reshape(len(codes), -1, 2, 4, _GROUP).transpose(-1, -2)
    return pack(groups, 2, dtype=torch.uint8).flatten(-3)


def unpack_two_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the inverse of ``pack_two_bits``, for bytes [O, B, 64]."""
    from quantcore.tensors.packing import unpack

    bits = unpack(packed.reshape(*packed.shape[:2], 2, _GROUP, 1).contiguous(), _TWO_BITS)
    return bits.transpose(-1, -2).flatten(1)
