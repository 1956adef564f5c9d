"""GGUF's blocks of ternary numbers: 256 codes of a row, which stand for -1, 0 and 1, and their float16 scale.

Layouts as in ggml (``ggml-common.h``), little-endian. TQ2_0: the codes in two bits each, four groups of 32 in the same
bytes, as in Q2_K; the scale. TQ1_0: the codes as digits of base 3, five in a byte for the first 160 codes (byte i those
of code i of all groups of 32) and the next 80 (of groups of 16), four in a byte for the last 16 (of groups of 4); the
scale. Such a byte is the number of its digits as a share of 243 in units of 1/256, rounded up, so that multiplying by 3
shifts the digits out one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantcore.config.quantization import QuantizationSpec
from quantcore.config.spec import SUPER_BLOCK
from quantcore.errors import ModelError
from quantcore.export.gguf.low_bit_blocks import pack_two_bits, unpack_two_bits

if TYPE_CHECKING:
    import torch

    from quantcore.tensors.affine import QParams
    from quantcore.tensors.qtensor import QTensor

_DIGITS = ((32, 5), (16, 5), (4, 4))  # bytes of TQ1_0, with the digits in each
_POWERS = (1, 3, 9, 27, 81)
_ALL = 243  # numbers of five digits
_LARGEST = 2  # digit


@dataclass(frozen=True)
class TQ1:
    """TQ1_0: five codes in a byte."""

    num_bytes: int = sum(count for count, _ in _DIGITS) + 2

    def encode(self, weight: QTensor) -> torch.Tensor:
        """Return rows of blocks as bytes, uint8 [O, B * num_bytes], for codes [O, I] with scales [O, B]."""
        import torch

        codes = weight.codes.reshape(len(weight.codes), -1, SUPER_BLOCK).int()
        parts, start = [], 0
        for count, num_digits in _DIGITS:
            digits = codes[..., start : start + count * num_digits].reshape(*codes.shape[:2], num_digits, count)
            powers = torch.tensor(_POWERS[: -num_digits - 1 : -1], dtype=torch.int32, device=codes.device)
            number = (digits * powers.unsqueeze(-1)).sum(-2)
            parts.append(((number * 256 + _ALL - 1) // _ALL).to(torch.uint8))
            start += count * num_digits
        return torch.cat([*parts, _stored_scale(weight)], dim=-1).flatten(-2)

    def decode(self, rows: torch.Tensor, spec: QuantizationSpec) -> QTensor:
        """Return the inverse of ``encode``."""
        import torch

        from quantcore.tensors.qtensor import QTensor

        blocks = rows.reshape(len(rows), -1, self.num_bytes)
        *packed, scale = torch.split(blocks, [*(count for count, _ in _DIGITS), 2], dim=-1)
        codes = []
        for part, (_, num_digits) in zip(packed, _DIGITS, strict=True):
            powers = torch.tensor(_POWERS[:num_digits], dtype=torch.int32, device=rows.device)
            shifted = part.int().unsqueeze(-2) * powers.unsqueeze(-1) & 0xFF
            codes.append((shifted * 3 >> 8).to(torch.uint8).flatten(-2))
        return QTensor(torch.cat(codes, dim=-1).flatten(1), _params(scale), spec)


@dataclass(frozen=True)
class TQ2:
    """TQ2_0: four codes in a byte."""

    num_bytes: int = SUPER_BLOCK // 4 + 2

    def encode(self, weight: QTensor) -> torch.Tensor:
        """Return rows of blocks as bytes, uint8 [O, B * num_bytes], for codes [O, I] with scales [O, B]."""
        import torch

        return torch.cat([pack_two_bits(weight.codes), _stored_scale(weight)], dim=-1).flatten(-2)

    def decode(self, rows: torch.Tensor, spec: QuantizationSpec) -> QTensor:
        """Return the inverse of ``encode``. Raises ModelError for a code that is no ternary number."""
        import torch

        from quantcore.tensors.qtensor import QTensor

        blocks = rows.reshape(len(rows), -1, self.num_bytes)
        packed, scale = torch.split(blocks, [SUPER_BLOCK // 4, 2], dim=-1)
        codes = unpack_two_bits(packed)
        if (codes > _LARGEST).any():
            raise ModelError(
                "A tensor of type TQ2_0 holds the code 3, but its codes are 0, 1 and 2.",
                code="invalid_gguf",
                hint="The file is damaged, or was made by a program that stores something else in this type.",
            )
        return QTensor(codes, _params(scale), spec)


TERNARY_TYPES: dict[str, TQ1 | TQ2] = {"TQ1_0": TQ1(), "TQ2_0": TQ2()}


def _stored_scale(weight: QTensor) -> torch.Tensor:
    """Return the scale of each block as bytes [O, B, 2]."""
    import torch

    return weight.params.scale.half().unsqueeze(-1).view(torch.uint8)


def _params(scale: torch.Tensor) -> QParams:
    """Return the inverse of ``_stored_scale``."""
    import torch

    from quantcore.tensors.affine import QParams

    return QParams(scale.contiguous().view(torch.float16).float().flatten(1))
