"""A stored tensor without its values: its dtype and shape, and where its bytes are."""

from __future__ import annotations

import math
from dataclasses import dataclass

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a checkpoint: its safetensors dtype (``BF16``), shape, file name and byte range in the file.

    With ``transposed`` the bytes are those of its transpose.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    transposed: bool = False

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class TensorLayout:
    """A tensor that will be written. ``dtype`` in safetensors' spelling (``BF16``)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes
