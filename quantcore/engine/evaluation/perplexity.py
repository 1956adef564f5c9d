"""Perplexity on windows of tokens: per token, word and byte, each with its standard error."""

from __future__ import annotations

import math

import torch

from quantcore.engine.evaluation.text import EvaluationText
from quantcore.errors import NumericsError
from quantcore.report import paired
from quantcore.report.quality import LARGEST_EXPONENT, Measure, Perplexities, Perplexity


def mean_and_stderr(
    values_NT: torch.Tensor, counts_NT: torch.Tensor, strata_N: torch.Tensor | None = None
) -> tuple[float, float | None]:
    """Return the mean of the values that count, and its standard error: see ``ratio_and_stderr``."""
    return ratio_and_stderr(sums_of_windows(values_NT, counts_NT), counts_NT.sum(1).double(), strata_N)


def sums_of_windows(values_NT: torch.Tensor, counts_NT: torch.Tensor) -> torch.Tensor:
    """Return the sum over each window of the values that count: [N], float64."""
    return torch.where(counts_NT, values_NT.double(), 0.0).sum(1)


def ratio_and_stderr(
    sums_N: torch.Tensor, bases_N: torch.Tensor, strata_N: torch.Tensor | None = None
) -> tuple[float, float | None]:
    """Return the ratio of two sums over windows, and its standard error: see ``paired.ratio_and_stderr``."""
    return paired.ratio_and_stderr(sums_N.tolist(), bases_N.tolist(), None if strata_N is None else strata_N.tolist())


def perplexities(losses_NT: torch.Tensor, text: EvaluationText) -> Perplexities:
    """Compute the perplexities from the losses of all predicted tokens [N, P].

    Per word and per byte it is the same log-likelihood divided by another count, as in lm-evaluation-harness. A value
    is None if it is too large for a float. Raises NumericsError if the losses are not finite.
    """
    scored = text.scored_NP
    mean, stderr = mean_and_stderr(losses_NT, scored, text.strata_N)
    if not math.isfinite(mean) or mean > LARGEST_EXPONENT:
        raise NumericsError(
            "The model's logits are not finite on the held-out text.",
            code="nonfinite_logits",
            hint="The float model overflows or the quantized one is broken. See the layer errors in the report.",
        )
    per_word = int(scored.sum()) / max(1, text.num_words)
    per_byte = int(scored.sum()) / max(1, text.num_bytes)
    return Perplexities(
        token_perplexity=_perplexity(mean, stderr),
        word_perplexity=_perplexity(mean * per_word, None if stderr is None else stderr * per_word),
        byte_perplexity=_perplexity(mean * per_byte, None if stderr is None else stderr * per_byte),
        bits_per_byte=mean * per_byte / math.log(2),
    )


def _perplexity(mean: float, stderr: float | None) -> Perplexity:
    return Perplexity(**exponential(mean, stderr).to_dict())


def exponential(mean: float, stderr: float | None) -> Measure:
    """Compute exp of a mean, with its error to first order."""
    if mean > LARGEST_EXPONENT:
        return Measure(value=None, stderr=None)
    value = math.exp(mean)
    return Measure(value=value, stderr=None if stderr is None else value * stderr)
