"""Compares two models by their distances from one original on the same tokens.

The errors of two similar models rise and fall together from token to token, so the ratio of their sums is known far
better than either of them. Tokens of one window depend on each other, so the sampled units are windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch

from quantcore.errors import ConfigError
from quantcore.evaluation.divergence import Measured
from quantcore.evaluation.perplexity import LARGEST_EXPONENT, mean_and_stderr, ratio_and_stderr, strata, sums_of
from quantcore.evaluation.quality import Change, Interval

MIN_WINDOWS = 8
"""Fewest windows of a comparison: the spread of fewer is itself hardly known."""
CONFIDENCE = 0.95
POWER = 0.95
"""Probability with which ``smallest_kl_change`` is found."""


def compare_measured(
    new: Measured, old: Measured, scored_NP: torch.Tensor, tolerance: float = 0.0, strata_N: torch.Tensor | None = None
) -> dict[str, Any]:
    """Return the verdict, the changes and their intervals, as fields of PairedQuality.

    The interval of the KL ratio is that of its logarithm: the error of a ratio of sums over windows by the delta
    method, and Student's t of the windows less the strata (see ``perplexity.ratio_and_stderr``). Raises
    ConfigError for fewer than MIN_WINDOWS windows, and for an old model that does not differ from the original.
    """
    assert new.distances_NP4 is not None and old.distances_NP4 is not None
    if len(scored_NP) < MIN_WINDOWS:
        raise ConfigError(
            f"The text has {len(scored_NP)} windows; a comparison needs at least {MIN_WINDOWS}.",
            code="too_few_windows",
            hint="Give a longer text with --eval_dataset, or shorter windows with --eval_seq_len.",
        )
    (kl_NP, agrees_NP, *_), (old_kl_NP, old_agrees_NP, *_) = new.distances_NP4.unbind(-1), old.distances_NP4.unbind(-1)
    old_kl_N = sums_of(old_kl_NP, scored_NP)
    if old_kl_N.sum() == 0:
        raise ConfigError(
            "The old model predicts exactly what the original does: no change is relative to a divergence of 0.",
            code="not_comparable",
            hint="Measure the new one alone: bitfoundry evaluate NEW --against ORIGINAL.",
        )
    num_degrees = len(scored_NP) - len(strata(strata_N, len(scored_NP)))
    deviations = student_quantile((1 + CONFIDENCE) / 2, num_degrees)
    ratio, stderr = ratio_and_stderr(sums_of(kl_NP, scored_NP), old_kl_N, strata_N)
    error = stderr / ratio if stderr and ratio else 0.0
    kl_change = _interval(math.log(ratio) if ratio else -math.inf, deviations * error, math.expm1)
    loss, loss_error = mean_and_stderr(new.losses_NP - old.losses_NP, scored_NP, strata_N)
    top1, top1_error = mean_and_stderr(agrees_NP - old_agrees_NP, scored_NP, strata_N)
    return {
        "verdict": judge(kl_change, tolerance),
        "tolerance": tolerance,
        "kl_change": kl_change,
        "smallest_kl_change": (1 + tolerance) * math.exp((deviations + NormalDist().inv_cdf(POWER)) * error) - 1,
        "perplexity_ratio": _interval(loss, deviations * (loss_error or 0.0), _exp),
        "top1_difference": _interval(top1, deviations * (top1_error or 0.0), float),
    }


def judge(kl_change: Interval, tolerance: float) -> Change:
    """Return ``worse`` or ``better`` if the whole interval is beyond the tolerance on that side."""
    if kl_change.low > tolerance:
        return "worse"
    return "better" if kl_change.high < -tolerance else "no difference found"


def student_quantile(share: float, num_degrees: int) -> float:
    """Return the quantile of Student's t, within 0.05 % from 4 degrees of freedom on.

    It is the expansion 26.7.5 of Abramowitz and Stegun, Handbook of Mathematical Functions.
    """
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / num_degrees**power for power, term in enumerate(terms, 1))


def _interval(value: float, margin: float, scale: Callable[[float], float]) -> Interval:
    return Interval(value=scale(value), low=scale(value - margin), high=scale(value + margin))


def _exp(value: float) -> float:
    return math.exp(min(value, LARGEST_EXPONENT))
