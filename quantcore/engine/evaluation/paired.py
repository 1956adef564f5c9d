"""Compares two models by their distances from one original on the same tokens.

The errors of two similar models rise and fall together from token to token, so the ratio of their sums is known far
better than either of them. Tokens of one window depend on each other, so the sampled units are windows. Either side may
be several results of one recipe, which differ by their seed: then the intervals are those of the recipes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import NormalDist, variance
from typing import Any

import torch

from quantcore.engine.evaluation.divergence import Measured
from quantcore.engine.evaluation.perplexity import LARGEST_EXPONENT, mean_and_stderr, ratio_and_stderr, strata, sums_of
from quantcore.errors import ConfigError
from quantcore.report.quality import Change, Interval

ValueOf = Callable[[Measured, torch.Tensor], float]
"""A value of one result, from what was measured and which tokens [N, P] count."""
MIN_WINDOWS = 8
"""Fewest windows of a comparison: the spread of fewer is itself hardly known."""
MIN_SPREAD_DEGREES = 4
"""Fewest degrees of freedom of the spread between results of one recipe: three results a side, or one and five."""
CONFIDENCE = 0.95
POWER = 0.95
"""Probability with which ``smallest_kl_change`` is found."""


def compare_measured(
    new: Sequence[Measured],
    old: Sequence[Measured],
    scored_NP: torch.Tensor,
    tolerance: float = 0.0,
    strata_N: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return the verdict, the changes and their intervals, as fields of PairedQuality.

    ``new`` and ``old`` are one result each, or several that differ by their seed, whose means are compared. The error
    of the KL ratio is that of its logarithm. Over the windows it is that of a ratio of sums by the delta method, with
    the windows less the strata as degrees of freedom (see ``perplexity.ratio_and_stderr``); ``_Error`` adds the spread
    of several results. Raises ConfigError for fewer than MIN_WINDOWS windows, for several but too few results, and for
    a result whose divergence is 0, to which no change is relative.
    """
    _check(new, old, scored_NP)
    num_degrees = len(scored_NP) - len(strata(strata_N, len(scored_NP)))
    error_of = _Error(new, old, scored_NP, num_degrees)
    mean_new, mean_old = mean_of(new), mean_of(old)
    (kl_NP, agrees_NP, *_), (old_kl_NP, old_agrees_NP, *_) = (
        _distances_of(side).unbind(-1) for side in (mean_new, mean_old)
    )
    ratio, stderr = ratio_and_stderr(sums_of(kl_NP, scored_NP), sums_of(old_kl_NP, scored_NP), strata_N)
    error, deviations = error_of(stderr / ratio if stderr and ratio else 0.0, _log_kl)
    kl_change = _interval(math.log(ratio) if ratio else -math.inf, deviations * error, math.expm1)
    loss, loss_error = mean_and_stderr(mean_new.losses_NP - mean_old.losses_NP, scored_NP, strata_N)
    top1, top1_error = mean_and_stderr(agrees_NP - old_agrees_NP, scored_NP, strata_N)
    spread = error_of.spread(_log_kl)
    return {
        "verdict": judge(kl_change, tolerance),
        "tolerance": tolerance,
        "kl_change": kl_change,
        "smallest_kl_change": (1 + tolerance) * math.exp((deviations + NormalDist().inv_cdf(POWER)) * error) - 1,
        "perplexity_ratio": _interval(loss, math.prod(error_of(loss_error or 0.0, _mean_loss)), _exp),
        "top1_difference": _interval(top1, math.prod(error_of(top1_error or 0.0, _top1)), float),
        "num_results": (len(new), len(old)),
        "seed_deviation": None if spread is None else math.sqrt(spread),
    }


@dataclass(frozen=True)
class _Error:
    """The errors of differences between the means of two groups of results: of the windows, and of the results.

    The results of either side are taken to spread alike. The degrees of freedom of both errors together are those of
    Welch and Satterthwaite.
    """

    new: Sequence[Measured]
    old: Sequence[Measured]
    scored_NP: torch.Tensor
    num_degrees: int

    def __call__(self, of_windows: float, value_of: ValueOf) -> tuple[float, float]:
        """Return the standard error, and by how many of it the confidence interval extends to either side."""
        spread = self.spread(value_of)
        if not spread:
            return of_windows, student_quantile((1 + CONFIDENCE) / 2, self.num_degrees)
        of_results = spread * (1 / len(self.new) + 1 / len(self.old))
        variance = of_windows**2 + of_results
        num_degrees = variance**2 / (of_windows**4 / self.num_degrees + of_results**2 / self._spread_degrees)
        return math.sqrt(variance), student_quantile((1 + CONFIDENCE) / 2, num_degrees)

    def spread(self, value_of: ValueOf) -> float | None:
        """Return the variance of a value between results of one recipe; None if there is one result on each side."""
        if not self._spread_degrees:
            return None
        groups = [[value_of(result, self.scored_NP) for result in side] for side in (self.new, self.old)]
        squares = ((len(values) - 1) * variance(values) for values in groups if len(values) > 1)
        return math.fsum(squares) / self._spread_degrees

    @property
    def _spread_degrees(self) -> int:
        return len(self.new) + len(self.old) - 2


def mean_of(results: Sequence[Measured]) -> Measured:
    """Return the means of what was measured of ``results`` of one original, token by token."""
    losses_NP = torch.stack([result.losses_NP for result in results]).mean(0)
    distances_NP4 = torch.stack([_distances_of(result) for result in results]).mean(0)
    return Measured(losses_NP, results[0].original_losses_NP, distances_NP4)


def judge(kl_change: Interval, tolerance: float) -> Change:
    """Return ``worse`` or ``better`` if the whole interval is beyond the tolerance on that side."""
    if kl_change.low > tolerance:
        return "worse"
    return "better" if kl_change.high < -tolerance else "no difference found"


def student_quantile(share: float, num_degrees: float) -> float:
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


def _check(new: Sequence[Measured], old: Sequence[Measured], scored_NP: torch.Tensor) -> None:
    if len(scored_NP) < MIN_WINDOWS:
        raise ConfigError(
            f"The text has {len(scored_NP)} windows; a comparison needs at least {MIN_WINDOWS}.",
            code="too_few_windows",
            hint="Use a longer text (--eval_dataset) or shorter windows (--eval_seq_len).",
        )
    num_degrees = len(new) + len(old) - 2
    if 0 < num_degrees < MIN_SPREAD_DEGREES:
        raise ConfigError(
            f"{len(new)} new and {len(old)} old results are too few to estimate how much results of one recipe vary.",
            code="too_few_results",
            hint="Use one result on each side, or at least six in total: the same recipes with other seeds (--seed).",
        )
    several = chain(old, new) if num_degrees else old
    if any(math.isinf(_log_kl(result, scored_NP)) for result in several):
        raise ConfigError(
            "A result predicts exactly what the original does: a change relative to a divergence of 0 is undefined.",
            code="not_comparable",
            hint="Measure only the other one: bitfoundry evaluate NEW --against ORIGINAL.",
        )


def _distances_of(result: Measured) -> torch.Tensor:
    assert result.distances_NP4 is not None
    return result.distances_NP4


def _log_kl(result: Measured, scored_NP: torch.Tensor) -> float:
    total = sums_of(_distances_of(result)[..., 0], scored_NP).sum().item()
    return math.log(total) if total else -math.inf


def _top1(result: Measured, scored_NP: torch.Tensor) -> float:
    return _distances_of(result)[..., 1][scored_NP].mean().item()


def _mean_loss(result: Measured, scored_NP: torch.Tensor) -> float:
    return result.losses_NP[scored_NP].mean().item()


def _interval(value: float, margin: float, scale: Callable[[float], float]) -> Interval:
    return Interval(value=scale(value), low=scale(value - margin), high=scale(value + margin))


def _exp(value: float) -> float:
    return math.exp(min(value, LARGEST_EXPONENT))
