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

    @property
    def half_range(self) -> float:
        """What |x|max is divided by for a symmetric scale."""
        return self.max

    def encode(self, x: torch.Tensor, round_method: str) -> torch.Tensor:
        """Scaled values (any shape, float) to codes in the storage dtype. The grid decides the rounding: half to even."""
        import torch

        return self.round_to_grid(x).to(getattr(torch, self.storage))

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes to scaled values in float32."""
        return codes.float()

    def round_to_grid(self, x: torch.Tensor) -> torch.Tensor:
        """Nearest representable value in float32, ties to even; NaN stays NaN.

        The exponent of |x| gives the step 2^(e - mantissa_bits); below the smallest normal the step stays constant.
        """
        import torch

        x = x.float().clamp(-self.max, self.max)
        _, exponent = torch.frexp(x)  # |x| = m * 2^exponent with m in [0.5, 1)
        step = torch.exp2((exponent - 1).clamp(min=1 - self.bias).float() - self.mantissa_bits)
        return torch.round(x / step) * step


FLOATS = (FloatFormat("fp8_e4m3", 4, 3, bias=7, max=448.0, storage="float8_e4m3fn"),)
