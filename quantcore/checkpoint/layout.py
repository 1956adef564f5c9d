"""The dtype and shape of a stored tensor, without its values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantcore.checkpoint.headers import DTYPE_BYTES


@dataclass(frozen=True)
class TensorLayout:
    """``dtype`` in safetensors' spelling (``BF16``)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes
