"""Compares two models by their distances from one original on the same tokens.

Either side may be several results of one recipe, which differ by their seed: then the intervals are those of the
recipes. See ``quantcore.report.paired``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import variance
from typing import Any

import torch

from quantcore.engine.evaluation.divergence import Measured, window_sums
from quantcore.engine.evaluation.perplexity import sums_of_windows
from quantcore.errors import ConfigError
from quantcore.report.paired import CONFIDENCE, MIN_WINDOWS, compare_windows, strata, student_quantile

ValueOf = Callable[[Measured, torch.Tensor], float]
"""A value of one result, from what was measured and which tokens [N, P] count."""
MIN_SPREAD_DEGREES = 4
"""Fewest degrees of freedom of the spread between results of one recipe: three results a side, or one and five."""


def compare_measured(
    new: Sequence[Measured],
    old: Sequence[Measured],
    scored_NP: torch.Tensor,
    tolerance: float = 0.0,
    strata_N: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return the verdict, the changes and their intervals, as fields of PairedQuality.

    ``new`` and ``old`` are one result each, or several that differ by their seed, whose means are compared: see
    ``compare_windows``; ``_Error`` adds the spread of several results. Raises ConfigError for fewer than MIN_WINDOWS
    windows, for several but too few results, and for a result whose divergence is 0, to which no change is relative.
    """
    _check(new, old, scored_NP)
    texts = None if strata_N is None else strata_N.tolist()
    error_of = _Error(new, old, scored_NP, len(scored_NP) - len(strata(texts, len(scored_NP))))
    of_new, of_old = (window_sums(mean_of(side), scored_NP, strata_N) for side in (new, old))
    spread = error_of.spread(_log_kl)
    return {
        **dict(compare_windows(of_new, of_old, tolerance, lambda error, name: error_of(error, VALUES[name]))),
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
    total = sums_of_windows(_distances_of(result)[..., 0], scored_NP).sum().item()
    return math.log(total) if total else -math.inf


def _top1(result: Measured, scored_NP: torch.Tensor) -> float:
    return _distances_of(result)[..., 1][scored_NP].mean().item()


def _mean_loss(result: Measured, scored_NP: torch.Tensor) -> float:
    return result.losses_NP[scored_NP].mean().item()


VALUES: dict[str, ValueOf] = {"kl": _log_kl, "loss": _mean_loss, "top1": _top1}
"""The value of one result whose spread counts, by the measure."""
