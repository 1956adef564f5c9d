"""What the matrices of a checkpoint are, as far as names and shapes tell: headers do not know the modules' classes."""

from __future__ import annotations

from collections.abc import Mapping

from quantcore.checkpoint.headers import TensorHeader

HEADS = ("lm_head.weight", "embed_out.weight")  # the output projection, if it does not share the embedding's weight


def is_linear(name: str, tensor: TensorHeader, prefix: str) -> bool:
    """Two-dimensional weights inside the blocks, and the head. Embeddings lie outside; norms have one dimension."""
    inside = name.startswith(prefix) or name in HEADS
    return inside and name.endswith(".weight") and len(tensor.shape) == 2


def find_conv1d(tensors: Mapping[str, TensorHeader], prefix: str) -> set[str]:
    """The block weights stored [in, out], as GPT-2's ``Conv1D`` stores them.

    A bias is as long as the output. One that fits the second axis of its weight and not the first settles it for the
    model: all its block weights with a bias are of that class, the square ones too.
    """
    biased = {
        name: (tensor.shape, tensors[bias].shape)
        for name, tensor in tensors.items()
        if is_linear(name, tensor, prefix) and (bias := f"{name.removesuffix('weight')}bias") in tensors
    }
    found = any(shape[1:] == bias != shape[:1] for shape, bias in biased.values())
    return set(biased) if found else set()
