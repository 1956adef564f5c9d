"""Float formats: (exponent bits, mantissa bits, bias, max) says it all. A new one is one line in ``FLOATS``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FloatFormat:
    """A small binary float with subnormals; values beyond ``max`` saturate (OCP 8-bit float spec, section 5.2)."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    storage: str  # the torch dtype that holds the codes

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min(self) -> float:
        return -self.max

    @property
    def signed(self) -> bool:
        return True

    def encode(self, x: torch.Tensor, round_method: str) -> torch.Tensor:
        """Scaled values (any shape, float) to codes in the storage dtype: saturating, nearest, ties to even.

        torch's own cast rounds so; ``round_method`` is for integers. NaN stays NaN.
        """
        import torch

        return x.clamp(-self.max, self.max).to(getattr(torch, self.storage))

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes to scaled values in float32."""
        return codes.float()


FLOATS = (FloatFormat("fp8_e4m3", 4, 3, bias=7, max=448.0, storage="float8_e4m3fn"),)
