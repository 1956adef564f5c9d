"""GGUF's quantized blocks: the bytes of 32 codes of a row, with their scale and minimum.

Layouts as in ggml (``ggml-common.h``), little-endian: the float16 scale; the float16 minimum, if there is one; the
fifth bits of all codes as a mask; the low four bits, code i beside code 16 + i. 8-bit codes are stored unchanged. The
codes of IQ4_NL are indexes into its values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantcore.config.quantization import QuantizationSpec
from quantcore.formats import IntFormat

if TYPE_CHECKING:
    import torch

    from quantcore.tensors.qtensor import QTensor

BLOCK = 32  # codes


@dataclass(frozen=True)
class BlockType:
    """A ggml type of blocks: the bits of its codes, and if they count from a minimum or around zero."""

    bits: int
    has_minimum: bool = False

    @property
    def num_bytes(self) -> int:
        """The number of bytes of one block: codes, scale, minimum."""
        return BLOCK * self.bits // 8 + 2 + 2 * self.has_minimum

    def encode(self, weight: QTensor) -> torch.Tensor:
        """Return rows of blocks as bytes, uint8 [O, G * num_bytes], for codes [O, I] with scales [O, G]."""
        import torch

        from quantcore.tensors.affine import minimum_of
        from quantcore.tensors.packing import pack, pack_halves

        params = weight.params
        codes_OGS = weight.codes.reshape(len(weight.codes), -1, BLOCK)
        numbers = [params.scale]
        if params.zero_point is not None:
            numbers.append(minimum_of(params.zero_point, params.scale, weight.spec))
        parts = [torch.stack(numbers, dim=-1).half().view(torch.uint8)]
        if self.bits == 8:
            parts.append(codes_OGS.view(torch.uint8))
        else:
            codes_OGS = (codes_OGS.to(torch.int16) - _smallest_code(weight.spec)).to(torch.uint8)
            parts += [pack(codes_OGS >> 4, 1, dtype=torch.uint8)] if self.bits == 5 else []
            parts.append(pack_halves(codes_OGS))
        return torch.cat(parts, dim=-1).flatten(-2)

    def decode(self, rows: torch.Tensor, spec: QuantizationSpec) -> QTensor:
        """Return the inverse of ``encode``."""
        import torch

        from quantcore.tensors.affine import QParams, params_of_minimum
        from quantcore.tensors.packing import unpack, unpack_halves
        from quantcore.tensors.qtensor import QTensor

        blocks = rows.reshape(len(rows), -1, self.num_bytes)
        num_numbers = 1 + self.has_minimum
        numbers = blocks[..., : 2 * num_numbers].contiguous().view(torch.float16).float()
        rest = blocks[..., 2 * num_numbers :].contiguous()
        if self.bits == 8:
            codes = rest.view(torch.int8)
        else:
            codes = unpack_halves(rest[..., -BLOCK // 2 :])
            if self.bits == 5:
                codes |= unpack(rest[..., : BLOCK // 8].contiguous(), IntFormat("bit", 1, signed=False)) << 4
            codes = (codes.to(torch.int16) + _smallest_code(spec)).to(getattr(torch, spec.format.storage))
        scale = numbers[..., 0].contiguous()
        params = params_of_minimum(scale, numbers[..., 1].contiguous(), spec) if self.has_minimum else QParams(scale)
        return QTensor(codes.flatten(-2), params, spec)


def _smallest_code(spec: QuantizationSpec) -> int:
    return int(spec.format.min) if isinstance(spec.format, IntFormat) else 0


BLOCK_TYPES = {
    "IQ4_NL": BlockType(4),
    "Q4_0": BlockType(4),
    "Q4_1": BlockType(4, has_minimum=True),
    "Q5_0": BlockType(5),
    "Q5_1": BlockType(5, has_minimum=True),
    "Q8_0": BlockType(8),
}
