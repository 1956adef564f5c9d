"""The answers of an original and a quantized model to one prompt, and where they part. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from quantcore.report.quality import Record

MAX_NEW_TOKENS = 200
"""Number of tokens after which an answer is cut off by default."""


class Answer(Record):
    """The answer of one model: greedy tokens as text. ``time_s`` includes reading the prompt."""

    text: str
    num_tokens: int
    time_s: float


class Turn(Record):
    """A prompt with both answers, whole or so far. One model that answers alone is ``quantized``, without an original.

    ``first_difference`` is the index of the first token that differs, None while all are equal. At
    ``first_different_char`` the text of that token begins in the quantized model's answer.
    """

    prompt: str
    original: Answer | None
    quantized: Answer
    first_difference: int | None
    first_different_char: int | None


def first_difference(original: Sequence[int], quantized: Sequence[int], *, are_whole: bool) -> int | None:
    """Return the index of the first token that differs; None if there is none.

    Of whole answers, one that ends earlier differs where it ends; of others, only the tokens that both have count.
    """
    pairs = zip_longest(original, quantized) if are_whole else zip(original, quantized, strict=False)
    return next((index for index, (before, after) in enumerate(pairs) if before != after), None)


def common_length(text: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((index for index, (one, two) in pairs if one != two), min(len(text), len(other)))
