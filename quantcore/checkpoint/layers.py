"""What the matrices of a checkpoint are, as far as names and shapes tell: headers do not know the modules' classes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quantcore.checkpoint.layout import TensorHeader

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_EMBEDDING = re.compile(r"(^|[._])(wte|wpe|emb(ed(dings?)?)?(_tokens|_positions|_in)?)\.weight$")


def is_head(name: str) -> bool:
    """Whether this is the output projection, which has a weight of its own unless it shares the embedding's."""
    return _HEAD.search(name) is not None


def is_linear(name: str, tensor: TensorHeader) -> bool:
    """Two-dimensional weights that no embedding is called like; norms have one dimension."""
    return name.endswith(".weight") and len(tensor.shape) == 2 and _EMBEDDING.search(name) is None


def find_conv1d(tensors: Mapping[str, TensorHeader], prefix: str) -> set[str]:
    """The block weights stored [in, out], as GPT-2's ``Conv1D`` stores them.

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
    found = any(shape[1:] == bias != shape[:1] for shape, bias in biased.values())
    return set(biased) if found else set()
