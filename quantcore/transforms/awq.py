"""AWQ, activation-aware weight quantization (Lin et al. 2023): weights that meet large inputs are scaled up, so that
the rounding step is small beside them.

The paper's scale is mean|x|^alpha, its authors' code also divides by |w|^(1 - alpha). Here it is rms(x)^alpha /
mean|w|^(1 - alpha): the error of an output depends on x^2, and large weights need no larger scale. alpha is searched
for each edge by the error that rounding to nearest leaves in the consumers' outputs; inputs stay as they are.

Legend: R rows that stand for all outputs, I in, F scales of an edge.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantcore.algorithms import AWQConfig
from quantcore.blocks.edges import Edge
from quantcore.stats import Needs
from quantcore.transforms import SMOOTHINGS, Consumer
from quantcore.transforms.scale_search import (
    WORTHWHILE,
    TriedWeight,
    mean_over_tokens,
    mean_weight,
    quantized,
    scale_for,
    search,
    share_of_rows,
)

NUM_EXACT_ROWS = 128  # for the last word


@SMOOTHINGS.add("awq")
class AWQ:
    """Edges that no alpha makes better stay alone."""

    needs = Needs(gram=True)

    def __init__(self, config: AWQConfig) -> None:
        pass

    def choose(self, edge: Edge, consumers: Sequence[Consumer]) -> torch.Tensor | None:
        counted = quantized(consumers)
        if not counted:
            return None
        power_F = mean_over_tokens(edge, counted, [consumer.stats.power_I for consumer in counted])
        x_F, w_F = power_F.sqrt(), mean_weight(edge, counted)
        errors = [RoundingError(consumer, share_of_rows(consumer, counted)) for consumer in counted]

        def loss(step: int) -> float:
            scale_I = edge.spread(scale_for(step, x_F, w_F))
            return sum(error.expected(scale_I) for error in errors)

        losses = search(loss)
        scale_F = scale_for(min(losses, key=losses.__getitem__), x_F, w_F)
        return scale_F if self._helps(edge.spread(scale_F), counted) else None

    def _helps(self, scale_I: torch.Tensor, consumers: list[Consumer]) -> bool:
        errors = [RoundingError(one, share_of_rows(one, consumers, NUM_EXACT_ROWS)) for one in consumers]
        before, after = (sum(error.exact(scale) for error in errors) for scale in (torch.ones_like(scale_I), scale_I))
        return after < WORTHWHILE * before


class RoundingError:
    """How far rounding one weight moves its layer's output, as a share of the output's power, times its tokens."""

    def __init__(self, consumer: Consumer, num_rows: int) -> None:
        assert consumer.layer is not None
        assert consumer.stats.gram_II is not None, "calibration was not asked for gram_II"
        self._weight = TriedWeight(consumer.weight_OI, consumer.layer.weight, num_rows)
        self._gram_II = consumer.stats.gram_II.float()
        self._power_I = consumer.stats.power_I
        power = self._power(self._weight.weight_RI)
        self._unit = consumer.stats.num_tokens / power.clamp(min=torch.finfo(torch.float32).tiny)

    def expected(self, scale_I: torch.Tensor) -> float:
        """As if the errors of different columns had nothing to do with each other: only the mean of x^2 counts."""
        power_R = self._error(scale_I).square_() @ self._power_I
        return (power_R.sum() * self._unit).item()

    def exact(self, scale_I: torch.Tensor) -> float:
        """On all tokens of the calibration."""
        return (self._power(self._error(scale_I)) * self._unit).item()

    def _error(self, scale_I: torch.Tensor) -> torch.Tensor:
        return self._weight.rounded(scale_I).div_(scale_I).sub_(self._weight.weight_RI)

    def _power(self, weight_RI: torch.Tensor) -> torch.Tensor:
        """The mean power of the outputs that these rows give, summed over rows: tr(W gram W^T)."""
        return (weight_RI @ self._gram_II).mul_(weight_RI).sum()
