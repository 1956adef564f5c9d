"""Integer formats: (bits, signed) says it all. A new one is one line in ``INTS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class IntFormat:
    """Two's-complement (signed) or plain binary (unsigned) integers of ``bits`` bits."""

    name: str
    bits: int
    signed: bool

    @property
    def min(self) -> int:
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def max(self) -> int:
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1

    def encode(self, x: torch.Tensor, round_method: str) -> torch.Tensor:
        """Scaled values (any shape, float) to codes: int8 for signed formats, uint8 for unsigned ones."""
        import torch

        rounding: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "half_even": torch.round,
            "round": _round_half_away,
            "floor": torch.floor,
        }
        return rounding[round_method](x).clamp(self.min, self.max).to(torch.int8 if self.signed else torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes to scaled values in float32."""
        return codes.float()


def _round_half_away(x: torch.Tensor) -> torch.Tensor:
    """Round half away from zero, the schoolbook rule (``RoundType.round``)."""
    import torch

    return torch.sign(x) * torch.floor(torch.abs(x) + 0.5)


INTS = (
    IntFormat("int4", 4, signed=True),
    IntFormat("uint4", 4, signed=False),
    IntFormat("int8", 8, signed=True),
)
