"""Classifies the matrices of a checkpoint by name and shape: headers do not know the modules' classes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from quantcore.checkpoint.layout import TensorHeader

_HEAD = re.compile(
    r"(^|\.)(lm_head|lm_head\.decoder|lm_heads\.\d+|embed_out|unembed)\.weight$|^(head|output|cls\.predictions\.decoder)\.weight$"
)
_EMBEDDING = re.compile(
    r"(^|[._])(wte|wpe|emb(ed(dings?)?)?(_tokens|_positions|_in)?"
    r"|(relative_(attention|position)|rel_pos|position)_bias(_table)?|(rel_)?pos(ition)?_emb(ed(dings?)?)?)\.weight$"
)
_NORM = re.compile(r"(norms?(_?\d+)?|(^|\.)ln(_\w+)?)\.weight$")


def is_head(name: str) -> bool:
    """Return True for the output projection, which has its own weight unless it shares the embedding's."""
    return _HEAD.search(name) is not None


def is_embedding(name: str) -> bool:
    """Return True for the weight of an embedding, of tokens or of positions."""
    return _EMBEDDING.search(name) is not None


def is_linear(name: str, tensor: TensorHeader) -> bool:
    """Return True for a weight of two axes without the name of an embedding or norm; most norms have one axis."""
    called_otherwise = _EMBEDDING.search(name) or _NORM.search(name)
    return name.endswith(".weight") and len(tensor.shape) == 2 and called_otherwise is None


def is_matrix(tensor: TensorHeader) -> bool:
    """Return True for floats in 2 or 3 axes, two of them longer than 1, which may be taken for a layer's weight."""
    sides = sum(side > 1 for side in tensor.shape)
    return "F" in tensor.dtype and len(tensor.shape) <= 3 and sides >= 2


def is_convolution(name: str, shape: Sequence[int]) -> bool:
    """Return True for kernels of 1-D convolutions, [out, in / groups, taps]; most are depthwise, [out, 1, taps]."""
    return len(shape) == 3 and (shape[1] == 1 or "conv" in name)


def why_not_linear(name: str, tensor: TensorHeader) -> str:
    """Describe the matrix ``name``, which is not the weight of a linear layer."""
    if is_embedding(name):
        return "embedding"
    if _NORM.search(name):
        return "norm"
    if is_convolution(name, tensor.shape):
        return "convolution kernel"
    return (
        "weight with three axes" if len(tensor.shape) == 3 else ("parameter whose name is not that of a layer's weight")
    )


def find_conv1d(tensors: Mapping[str, TensorHeader], prefix: str) -> set[str]:
    """Return the block weights stored [in, out], as GPT-2's ``Conv1D`` stores them.

    A bias is as long as the output. One that fits the second axis of its weight and not the first settles it for the
    model: all its block weights with a bias are of that class, the square ones too.
    """
    biased = {
        name: (tensor.shape, tensors[bias].shape)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
        and is_linear(name, tensor)
        and (bias := f"{name.removesuffix('weight')}bias") in tensors
    }
    is_transposed = any(shape[1:] == bias != shape[:1] for shape, bias in biased.values())
    return set(biased) if is_transposed else set()
