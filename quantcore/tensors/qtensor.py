"""The result of quantizing: codes with the parameters to decode them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantcore.config.grouping import weight_grouping
from quantcore.config.spec import QuantizationSpec
from quantcore.errors import NumericsError
from quantcore.tensors.affine import QParams, dequantize, quantize


@dataclass(frozen=True)
class QTensor:
    """A quantized weight: ``codes`` [out, in, *kernel] in the format's storage dtype, ``params`` for its groups."""

    codes: torch.Tensor
    params: QParams
    spec: QuantizationSpec

    @classmethod
    def concat(cls, parts: Sequence[QTensor]) -> QTensor:
        """Return weights concatenated along the rows; they share no parameters but the global scale."""
        zeros = [part.params.zero_point for part in parts if part.params.zero_point is not None]
        scale = torch.cat([part.params.scale for part in parts])
        params = QParams(scale, torch.cat(zeros) if zeros else None, parts[0].params.global_scale)
        return cls(torch.cat([part.codes for part in parts]), params, parts[0].spec)

    def dequantize(self) -> torch.Tensor:
        """Return the dequantized weight, float32 in the shape of ``codes``.

        It is contiguous: products may round differently if it is not.
        """
        grouping = weight_grouping(self.spec)
        values_RGS = dequantize(grouping.split(self.codes), self.params, self.spec)
        return grouping.join(values_RGS, tuple(self.codes.shape)).contiguous()


@dataclass(frozen=True)
class QLayer:
    """A quantized layer for an exporter: its weight and the static parameters of its input and output."""

    weight: QTensor
    inputs: QParams | None = None
    outputs: QParams | None = None


def is_finite(weight: torch.Tensor) -> bool:
    """Return True if no value is NaN or infinite. NaN propagates to minimum and maximum; the weight is not copied."""
    return weight.numel() == 0 or bool(torch.stack(torch.aminmax(weight)).isfinite().all())


def check_finite(weight: torch.Tensor, name: str) -> None:
    """Raise NumericsError for a weight of the layer ``name`` that holds NaN or infinity."""
    if not is_finite(weight):
        num_bad = int((~torch.isfinite(weight)).sum())
        raise NumericsError(
            f"The weight of {name} has {num_bad} value(s) that are NaN or infinite.",
            code="nonfinite_weights",
            hint="The checkpoint is damaged, or was saved from a diverged run.",
        )


def quantize_weight(weight: torch.Tensor, params: QParams, spec: QuantizationSpec) -> QTensor:
    """Return ``weight`` [out, in, *kernel] quantized with the given parameters."""
    grouping = weight_grouping(spec)
    codes_RGS = quantize(grouping.split(weight), params, spec)
    return QTensor(grouping.join(codes_RGS, tuple(weight.shape)), params, spec)
