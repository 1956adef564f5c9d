"""The observer of the range that leaves out the rarest values."""

from __future__ import annotations

from typing import ClassVar

import torch

from quantcore.engine.observers.distribution import DistributionObserver, Seen
from quantcore.engine.observers.observer import OBSERVERS


@OBSERVERS.add("percentile")
class PercentileObserver(DistributionObserver):
    """Chooses the range that holds ``percentile`` per cent of the values.

    Symmetric specs use the percentile of the magnitudes; asymmetric ones leave out half of the rest at each end. A
    percentile between two values is interpolated linearly, as in ``numpy.percentile``. If it is 0 although not all
    values are (rare features), the exact range is used, because an empty range has no scale.
    """

    percentile: ClassVar[float] = 99.99
    """Share of the values in the range; H. Wu et al. 2020 (arXiv:2004.09602) find that 99.9 clips too much."""

    def _choose(self, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        share = self.percentile / 100
        if self.spec.symmetric:
            magnitudes, order = seen.values_NK.abs().sort(dim=-1)
            high = quantile(magnitudes, seen.counts_NK.gather(1, order), share)
            low = -high
        else:
            low = quantile(seen.values_NK, seen.counts_NK, (1 - share) / 2)
            high = quantile(seen.values_NK, seen.counts_NK, (1 + share) / 2)
        nothing = (low == 0) & (high == 0)
        return (
            torch.where(nothing, seen.minimum_N, low.clamp(seen.minimum_N, seen.maximum_N)),
            torch.where(nothing, seen.maximum_N, high.clamp(seen.minimum_N, seen.maximum_N)),
        )


def quantile(values_NK: torch.Tensor, counts_NK: torch.Tensor, share: float) -> torch.Tensor:
    """Return the ``share`` quantile of ascending values with these counts, float32 [N]; linear between two values."""
    cumulative = counts_NK.cumsum(dim=-1)
    last = cumulative[:, -1:] - 1
    position = last.double() * share
    below = position.floor()
    ranks = torch.cat([below.long(), (below.long() + 1).minimum(last)], dim=1)
    ends = values_NK.gather(1, torch.searchsorted(cumulative, ranks, right=True)).double()
    return torch.lerp(ends[:, 0], ends[:, 1], (position - below).squeeze(1)).float()
