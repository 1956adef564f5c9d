"""Headers of stored tensors: dtype, shape and byte range, without the values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

GGUF_BLOCKS = {
    "IQ1_S": (256, 50), "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82), "IQ3_XXS": (256, 98), "IQ3_S": (256, 110),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "IQ4_XS": (256, 136), "IQ4_NL": (32, 18),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "TQ1_0": (256, 54), "TQ2_0": (256, 66),
    "MXFP4": (32, 17), "NVFP4": (64, 36),
}  # fmt: skip
"""GGUF's types of quantized blocks, with the values and the bytes of a block.

As dtypes of a stored tensor they stand for bytes: the last axis holds the blocks of a row.
"""

DTYPE_BYTES = {
    **dict.fromkeys(GGUF_BLOCKS, 1),
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "U32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Stack:
    """A stored tensor that is presented as several: its name and shape, and its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class TensorHeader:
    """A tensor of a checkpoint: its safetensors dtype (``BF16``), shape, file name and byte range in the file.

    With ``transposed`` the bytes are those of its transpose; if there are ``rows``, the tensor is only these rows of
    what is stored, from the first to before the second. ``stack`` is the stored tensor that it is a part of, if any. In
    GGUF files the rows of the two halves of each of ``num_heads`` heads may alternate, or those that are stored may be
    in another ``order``, which names the stored row of each; ``offset`` may have been added, and the bytes may be
    ``blocks`` of a GGUF type, which are read as floats.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    transposed: bool = False
    rows: tuple[int, int] | None = None
    stack: Stack | None = None
    num_heads: int = 0
    offset: float = 0.0
    blocks: str | None = None
    order: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        is_stored = self.rows is None and self.blocks is None and not self.order
        return self.end - self.begin if is_stored else math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorLayout:
    """A tensor that will be written. ``dtype`` is spelled as in safetensors (``BF16``).

    ``is_text``: the bytes of a text, whose length may differ between writers.
    """

    dtype: str
    shape: tuple[int, ...]
    is_text: bool = False

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes


def own_layout(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorLayout]:
    """Return the tensors of a checkpoint as its files store them, with a stack as one tensor."""
    layout: dict[str, TensorLayout] = {}
    for name, tensor in tensors.items():
        name, shape = (name, tensor.shape) if tensor.stack is None else (tensor.stack.name, tensor.stack.shape)
        layout[name] = TensorLayout(tensor.dtype, shape)
    return layout
