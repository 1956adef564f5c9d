"""Integer codes as unsigned words of 32 bits: what compressed-tensors, GPTQ and AWQ store.

The smallest code of the format becomes 0, so that codes and zero points of int4 and uint4 look the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantcore.formats import Format, IntFormat

if TYPE_CHECKING:
    import torch

WORD_BITS = 32

Order = tuple[int, ...] | None


def pack_from_zero(codes: torch.Tensor, fmt: Format, order: Order = None) -> torch.Tensor:
    """Integer codes or zero points [..., N] of ``fmt`` to int32 words [..., N * bits / 32], in ``order``."""
    import torch

    from quantcore.tensors.packing import pack

    return pack(codes.to(torch.int32) - int(fmt.min), fmt.bits, order)


def unpack_from_zero(words: torch.Tensor, fmt: Format, order: Order = None) -> torch.Tensor:
    """Return the inverse of ``pack_from_zero``, as int32."""
    import torch

    return codes_of(words, fmt, order).to(torch.int32)


def codes_of(words: torch.Tensor, fmt: Format, order: Order = None) -> torch.Tensor:
    """Codes in the format's storage dtype, of a byte, from what ``pack_from_zero`` made of them."""
    import torch

    from quantcore.tensors.packing import unpack

    from_zero = unpack(words, IntFormat("word", fmt.bits, signed=False), order)
    return (from_zero + int(fmt.min) % 256).view(getattr(torch, fmt.storage))  # modulo 256, as two's complement is
