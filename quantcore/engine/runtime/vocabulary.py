"""Logits for some tokens of a vocabulary at a time, so that a large head is never in memory as a whole.

The model's own code computes them, with some rows of the head's weight in the place of all. Scales and soft caps act on
each logit alone, so the parts are those of the whole; a few tokens show it before. A model whose code does something
else with its logits (Chameleon hides tokens of images by their number) is computed undivided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from quantcore.engine.runtime.block_capture import NonBlockParts
from quantcore.errors import ModelError
from quantcore.plan.workload import part_size
from quantcore.tensors.source import Rows

TRIED_TOKENS = 64
MAX_DIFFERENCE = 1e-5
"""Upper bound on ||difference|| / ||logits|| between parts, which may be computed in another order.

It is the distance between two numbers near 1 for dtypes with fewer digits.
"""


@dataclass(frozen=True)
class Vocabulary:
    """The logits of a model for ``parts`` of its vocabulary; without parts it is undivided.

    ``rows`` returns rows of the head's weight [V, H]; None if that is in place.
    """

    outside: NonBlockParts
    parts: tuple[range, ...] = ()
    rows: Rows | None = None

    @contextmanager
    def part(self, tokens: range | None) -> Iterator[NonBlockParts]:
        """Yield the model around its blocks, which computes the logits [1, T, v] of ``tokens``: all if None."""
        head = head_of(self.outside)
        if head is None or (tokens is None and self.rows is None):
            yield self.outside
            return
        weight, bias = head.weight, head.bias
        own = slice(None) if tokens is None else slice(tokens.start, tokens.stop)
        rows = range(len(weight)) if tokens is None else tokens
        part = weight[own] if self.rows is None else self.rows(rows).to(weight.device, weight.dtype)
        try:
            head.weight = nn.Parameter(part, requires_grad=False)
            if bias is not None:
                head.bias = nn.Parameter(bias[own], requires_grad=False)
            yield self.outside
        finally:
            head.weight, head.bias = weight, bias


def in_parts(outside: NonBlockParts, like: torch.Tensor, rows: Rows | None = None) -> Vocabulary:
    """Return the vocabulary of a model in parts, or undivided if its code does not allow that.

    ``like``: hidden states [1, T, H] behind the last block, of which two tokens are tried. ``rows``: see
    ``Vocabulary``.
    """
    head = head_of(outside)
    if head is None or not outside.kind.predicts_tokens:
        return Vocabulary(outside, rows=rows)
    size, width = head.weight.shape
    step = part_size(width, on_host=outside.device.type == "cpu")
    parts = tuple(range(start, min(start + step, size)) for start in range(0, size, step))
    whole = Vocabulary(outside, parts, rows)
    return whole if _are_parts(whole, like[:, :2], size) else Vocabulary(outside, rows=rows)


def common_parts(*vocabularies: Vocabulary) -> Sequence[range | None]:
    """Return the parts in which several models are computed side by side: None for all tokens at once."""
    [parts, *others] = [vocabulary.parts for vocabulary in vocabularies]
    return parts if parts and all(other == parts for other in others) else (None,)


def head_of(outside: NonBlockParts) -> nn.Linear | None:
    """Return the layer that computes the logits, None if the model has none that is a plain matrix."""
    head = outside.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head if isinstance(head, nn.Linear) else None


def _are_parts(vocabulary: Vocabulary, state: torch.Tensor, size: int) -> bool:
    """Return True if the logits of two parts of the vocabulary are those of both together."""
    num = min(TRIED_TOKENS, size // 2)

    def logits(tokens: range) -> torch.Tensor:
        with vocabulary.part(tokens) as compute:
            return compute(state)

    try:
        with torch.inference_mode():
            both = logits(range(2 * num))
            apart = torch.cat([logits(range(num)), logits(range(num, 2 * num))], -1)
    except torch.OutOfMemoryError:
        raise
    except (ModelError, RuntimeError):  # of the model's own code
        return False
    if apart.shape != both.shape or both.shape[-1] != 2 * num:
        return False
    allowed = max(MAX_DIFFERENCE, torch.finfo(both.dtype).eps)
    return bool((apart.float() - both.float()).norm() <= allowed * both.float().norm())
