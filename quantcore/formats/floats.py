"""Float formats: (exponent bits, mantissa bits, bias, max) says it all. A new one is one line in ``FLOATS``.

Sources: OCP 8-bit Floating Point Specification 1.0 (e4m3, e5m2), OCP Microscaling Formats 1.0 (fp6, fp4, e8m0),
Noune et al. 2022, "8-bit numerical formats for deep neural networks" (e4m3fnuz), IEEE 754 (float16).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quantcore.formats.tables import kept

if TYPE_CHECKING:
    import torch

FLOAT32_MANTISSA_BITS = 23
FLOAT32_BIAS = 127
FLOAT32_EXPONENT = 0x7F800000  # the exponent's bits in a float32


@dataclass(frozen=True)
class FloatFormat:
    """A small binary float with subnormals.

    Values beyond ``max``, infinity included, saturate. Ties go to even whatever ``round_method`` says, which is for
    integers. NaN stays NaN where there is a code for it (8 and 16 bits); fp6 and fp4 have none: ``encode`` gives 0,
    ``round`` keeps NaN so that a simulation shows it. Codes of fp6 and fp4 are uint8 with sign, exponent and mantissa
    in the low bits; the others are torch's own dtypes.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    storage: str  # the torch dtype of the codes
    scaled: bool = True  # False: a plain cast, its scale is always 1
    signed: ClassVar[bool] = True
    zero_point_ok: ClassVar[bool] = False
    vectors: ClassVar[None] = None

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min(self) -> float:
        return -self.max

    @property
    def emax(self) -> int:
        """Exponent of the largest power of two that is a value: 2 for fp4 (whose max is 6)."""
        return math.frexp(self.max)[1] - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value; the step of the subnormals is 2^(emin - mantissa_bits)."""
        return 1 - self.bias

    def values(self) -> tuple[float, ...]:
        """The value of every code, for formats of at most 8 bits. NaN and infinity where a code has no finite value."""
        if self.bits > 8:
            raise ValueError(f"{self.name} has too many codes to list; decode() them instead")
        half = tuple(self._magnitude(code) for code in range(1 << (self.bits - 1)))
        negative = tuple(-value for value in half)
        if self.storage.endswith("fnuz"):  # "unsigned zero": the code of -0 is the only NaN
            negative = (math.nan, *negative[1:])
        return half + negative

    def _magnitude(self, code: int) -> float:
        exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
        fraction = mantissa / (1 << self.mantissa_bits) + (exponent > 0)
        value = math.ldexp(fraction, max(exponent, 1) - self.bias)
        if value <= self.max:
            return value
        return math.inf if mantissa == 0 else math.nan

    def grid(self) -> list[float]:
        """All finite values, ascending."""
        return sorted({value for value in self.values() if math.isfinite(value)})

    def encode(self, x: torch.Tensor, round_method: str = "half_even") -> torch.Tensor:
        """Scaled values (any shape, float32) to codes in the storage dtype."""
        import torch

        if self.storage != "uint8":
            return x.float().clamp(-self.max, self.max).to(getattr(torch, self.storage))
        x = x.float().nan_to_num(nan=0.0)
        magnitude = x.abs().clamp_(max=self.max)
        binade = self._binade(magnitude)
        # The sum's low bits count steps of x's binade; with the binade's number added above them they are the code
        # (the sum's own exponent lies above the byte that is kept).
        code = magnitude.add_(binade, alpha=self._magic).view(torch.int32).sub_(binade.view(torch.int32))
        shift = FLOAT32_MANTISSA_BITS - self.mantissa_bits
        code.add_(binade.view(torch.int32).bitwise_right_shift_(shift)).sub_(self.lowest_binade >> shift)
        code.sub_(x.view(torch.int32).bitwise_right_shift_(31), alpha=1 << (self.bits - 1))
        return code.to(torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes to scaled values in float32."""
        import torch

        if self.bits > 8:
            return codes.float()
        # Faster than torch's own cast from fp8, and the same for all small formats.
        table = kept(_value_table, self, codes.device)
        return table.index_select(0, codes.view(torch.uint8).int().flatten()).view(codes.shape)

    def round(self, x: torch.Tensor, round_method: str = "half_even") -> torch.Tensor:
        """decode(encode(x)) in float32, without the way through codes; the sign of a zero may differ."""
        import torch

        return self.round_(x.to(torch.float32, copy=True), round_method)

    def round_(self, x: torch.Tensor, round_method: str = "half_even") -> torch.Tensor:
        """``round`` in place on a float32 tensor.

        A large power of two, added and subtracted again, leaves what float32 arithmetic rounds to the step of x's own
        binade; below ``emin`` the step stays that of the subnormals.
        """
        import torch

        x.clamp_(-self.max, self.max)
        if self.bias == FLOAT32_BIAS:
            # bfloat16, whose magic number would overflow, is the upper half of a float32. A cast there and back would
            # do, but torch.compile takes it for nothing and leaves it out.
            upper = x.to(getattr(torch, self.storage)).view(torch.int16)
            x.view(torch.int32).copy_(upper).bitwise_left_shift_(16)
            return x
        binade = self._binade(x)
        return x.add_(binade, alpha=self.half_magic).sub_(binade, alpha=self.half_magic)

    @property
    def _magic(self) -> float:
        """Times x's binade and added to x, it leaves no bits below the format's step."""
        return 2.0 ** (FLOAT32_MANTISSA_BITS - self.mantissa_bits)

    @property
    def half_magic(self) -> float:
        """One and a half times ``_magic``, so that a negative x does not leave the sum's binade."""
        return 1.5 * self._magic

    @property
    def lowest_binade(self) -> int:
        """The smallest normal value, as the bits of a float32."""
        return (self.emin + FLOAT32_BIAS) << FLOAT32_MANTISSA_BITS

    def _binade(self, x: torch.Tensor) -> torch.Tensor:
        """The largest power of two that is at most abs(x), but at least the smallest normal value; infinity for NaN."""
        import torch

        bits = x.view(torch.int32).bitwise_and(FLOAT32_EXPONENT).clamp_(min=self.lowest_binade)
        return bits.view(torch.float32)


def _value_table(fmt: FloatFormat, device: torch.device) -> torch.Tensor:
    import torch

    return torch.tensor(fmt.values(), dtype=torch.float32, device=device)


FLOATS = (
    FloatFormat("float16", 5, 10, bias=15, max=65504.0, storage="float16", scaled=False),
    FloatFormat("bfloat16", 8, 7, bias=127, max=(2 - 2**-7) * 2.0**127, storage="bfloat16", scaled=False),
    FloatFormat("fp8_e4m3", 4, 3, bias=7, max=448.0, storage="float8_e4m3fn"),
    FloatFormat("fp8_e4m3fnuz", 4, 3, bias=8, max=240.0, storage="float8_e4m3fnuz"),
    FloatFormat("fp8_e5m2", 5, 2, bias=15, max=57344.0, storage="float8_e5m2"),
    FloatFormat("fp6_e3m2", 3, 2, bias=3, max=28.0, storage="uint8"),
    FloatFormat("fp6_e2m3", 2, 3, bias=1, max=7.5, storage="uint8"),
    FloatFormat("fp4", 2, 1, bias=1, max=6.0, storage="uint8"),
)


def encode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Powers of two (any shape, float32, 2^-127 to 2^127) to their bytes: exponent + 127; NaN is 255."""
    import torch

    return scale.to(torch.float8_e8m0fnu).view(torch.uint8)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Bytes to powers of two in float32: 2^(byte - 127), NaN for 255."""
    import torch

    return codes.view(torch.float8_e8m0fnu).float()
