"""GGUF's blocks of 4-bit floats: MXFP4 and NVFP4.

Layouts as in ggml (``ggml-common.h``). MXFP4: the e8m0 scale of 32 codes, then the codes, code i beside code 16 + i.
NVFP4: the e4m3 scales of four groups of 16, without signs, then the codes of each, code i beside code 8 + i. ggml keeps
twice the values of the codes and half the scales, which is the same. Its NVFP4 has no scale for the whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantcore.config.quantization import QuantizationSpec
from quantcore.formats import FORMATS
from quantcore.formats.floats import decode_e8m0, encode_e8m0

if TYPE_CHECKING:
    import torch

    from quantcore.tensors.qtensor import QTensor

_NOT_A_NUMBER = 0x7F  # of e4m3; ggml reads it as 0


@dataclass(frozen=True)
class FloatBlocks:
    """A block of ``num_groups`` groups of ``group_size`` codes, each with a scale of one byte."""

    group_size: int
    num_groups: int

    @property
    def num_bytes(self) -> int:
        """The number of bytes of one block: scales, codes."""
        return self.num_groups * (1 + self.group_size // 2)

    def encode(self, weight: QTensor) -> torch.Tensor:
        """Return rows of blocks as bytes, uint8 [O, B * num_bytes], for codes [O, I] with scales [O, G]."""
        import torch

        from quantcore.tensors.packing import pack_halves

        scale = weight.params.scale
        encoded = encode_e8m0(scale) if self._has_powers else FORMATS["fp8_e4m3"].encode(scale).view(torch.uint8)
        codes = pack_halves(weight.codes.reshape(len(weight.codes), -1, self.num_groups, self.group_size))
        parts = [encoded.reshape(len(scale), -1, self.num_groups), codes.flatten(-2)]
        return torch.cat(parts, dim=-1).flatten(-2)

    def decode(self, rows: torch.Tensor, spec: QuantizationSpec) -> QTensor:
        """Return the inverse of ``encode``."""
        from quantcore.tensors.affine import QParams
        from quantcore.tensors.packing import unpack_halves
        from quantcore.tensors.qtensor import QTensor

        blocks = rows.reshape(len(rows), -1, self.num_bytes)
        scales = blocks[..., : self.num_groups].contiguous()
        packed = blocks[..., self.num_groups :].reshape(*blocks.shape[:2], self.num_groups, -1)
        scale = decode_e8m0(scales) if self._has_powers else _without_sign(scales)
        return QTensor(unpack_halves(packed).flatten(1), QParams(scale.flatten(1)), spec)

    @property
    def _has_powers(self) -> bool:
        return self.num_groups == 1


FLOAT_TYPES: dict[str, FloatBlocks] = {"MXFP4": FloatBlocks(32, 1), "NVFP4": FloatBlocks(16, 4)}


def _without_sign(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of e4m3 codes (uint8, any shape) whose signs do not count; that of no number is 0."""
    import torch

    exponent, mantissa = (codes >> 3 & 0xF).int(), (codes & 7).int()
    value = torch.ldexp((mantissa + 8 * (exponent > 0)).float(), exponent.clamp(min=1) - 10)
    return torch.where(codes == _NOT_A_NUMBER, 0.0, value)
