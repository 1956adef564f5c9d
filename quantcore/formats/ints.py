"""Integer formats: (bits, signed) says it all. A new one is one line in ``INTS``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class IntFormat:
    """Two's-complement (signed) or plain binary (unsigned) integers of ``bits`` bits.

    ``round_method`` is ``half_even``, ``round`` (half away from zero) or ``floor``. Values beyond the range take the
    nearest end. There is no code for NaN: ``encode`` gives 0, ``round`` keeps NaN so that a simulation shows it.
    """

    name: str
    bits: int
    signed: bool
    min: int = field(init=False, repr=False, compare=False)
    max: int = field(init=False, repr=False, compare=False)
    scaled: ClassVar[bool] = True
    zero_point_ok: ClassVar[bool] = True
    vectors: ClassVar[None] = None

    def __post_init__(self) -> None:  # not properties: torch.compile can't shift by a number that it keeps open
        object.__setattr__(self, "min", -(1 << (self.bits - 1)) if self.signed else 0)
        object.__setattr__(self, "max", (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1)

    @property
    def storage(self) -> str:
        """The torch dtype of the codes."""
        return ("int" if self.signed else "uint") + ("8" if self.bits <= 8 else "16")

    @property
    def emax(self) -> int:
        """Exponent of the largest power of two that is a value: 6 for int8."""
        return self.max.bit_length() - 1

    @property
    def mantissa_bits(self) -> int:
        """Bits below the leading one of the largest values, as the OCP MX document counts them: 6 for int8."""
        return self.emax

    def grid(self) -> list[float]:
        """All values, ascending."""
        return [float(value) for value in range(self.min, self.max + 1)]

    def encode(self, x: torch.Tensor, round_method: str = "half_even") -> torch.Tensor:
        """Scaled values (any shape, float32) to codes in the storage dtype."""
        import torch

        whole = self.round(x, round_method).nan_to_num_(nan=0.0)
        if self.storage == "uint8":
            whole = whole.to(torch.int16)  # torch's cast from float to uint8 is four times slower than this detour
        return whole.to(getattr(torch, self.storage))

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes to scaled values in float32."""
        return codes.float()

    def round(self, x: torch.Tensor, round_method: str = "half_even") -> torch.Tensor:
        """decode(encode(x)) in float32, without the way through codes."""
        import torch

        return self.round_(x.to(torch.float32, copy=True), round_method)

    def round_(self, x: torch.Tensor, round_method: str = "half_even") -> torch.Tensor:
        """``round`` in place on a float32 tensor."""
        if round_method == "half_even":
            x.round_()
        elif round_method == "floor":
            x.floor_()
        elif round_method == "round":
            # The largest float32 below 1/2: adding 1/2 itself would carry 0.49999997 up to 1.
            x.add_(x.sign(), alpha=0.5 - 2.0**-25).trunc_()
        else:
            raise ValueError(f"round_method is half_even, round or floor, not {round_method!r}")
        return x.clamp_(self.min, self.max)


INTS = (
    IntFormat("int2", 2, signed=True),
    IntFormat("int3", 3, signed=True),
    IntFormat("int4", 4, signed=True),
    IntFormat("int5", 5, signed=True),
    IntFormat("int6", 6, signed=True),
    IntFormat("int8", 8, signed=True),
    IntFormat("int16", 16, signed=True),
    IntFormat("uint2", 2, signed=False),
    IntFormat("uint4", 4, signed=False),
    IntFormat("uint5", 5, signed=False),
    IntFormat("uint8", 8, signed=False),
    IntFormat("uint16", 16, signed=False),
)
