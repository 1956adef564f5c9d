"""The result of quantizing: codes with what is needed to read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantcore.affine import dequantize
from quantcore.formats import Format


@dataclass(frozen=True)
class QParams:
    """Scale and zero point. ``scale`` is float32 whose values are exact in the stored dtype; both have one shape.

    ``zero_point`` is in codes (int32), None for symmetric quantization.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor | None = None


@dataclass(frozen=True)
class QTensor:
    """A quantized weight. ``codes_OI`` [out, in] in the format's storage dtype; ``params`` of shape [rows, groups].

    rows is 1 (per tensor) or out; groups is 1 or in / group_size. Dequantized value = (code - zero_point) * scale.
    """

    codes_OI: torch.Tensor
    params: QParams
    format: Format

    def dequantize(self) -> torch.Tensor:
        """The weight that the codes stand for, float32 [out, in]."""
        return dequantize(self.codes_OI, self.params.scale, self.params.zero_point, self.format)
