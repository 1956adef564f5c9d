"""AWQ, activation-aware weight quantization (Lin et al. 2023): scales up the weights that multiply large inputs.

The rounding step then is small relative to them. The paper's scale is mean|x|^alpha, its authors' code also divides by
|w|^(1 - alpha). Here it is rms(x)^alpha / mean|w|^(1 - alpha): the error of an output depends on x^2, and large weights
need no larger scale. alpha is searched for each edge by the error of the consumers' outputs after rounding to nearest;
inputs are not quantized.

Legend: R rows that represent all outputs, I in, F scales of an edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from quantcore.config.algorithms import AWQConfig
from quantcore.engine.calibration.stats import Needs
from quantcore.engine.transforms import SMOOTHINGS, Consumer
from quantcore.engine.transforms.mappings.scale_pair import ScalePair
from quantcore.engine.transforms.scale_search import (
    WORTHWHILE,
    TriedWeight,
    mean_over_tokens,
    mean_weight,
    quantized,
    scale_for,
    search,
    share_of_rows,
    sums_of,
)


@SMOOTHINGS.add("awq")
class AWQ:
    """Searches alpha for each edge. Edges that no alpha improves are left alone."""

    needs = Needs(gram=True)

    def __init__(self, config: AWQConfig) -> None:
        pass

    def choose(self, edge: ScalePair, consumers: Sequence[Consumer]) -> torch.Tensor | None:
        counted = quantized(consumers)
        if not counted:
            return None
        power_F = mean_over_tokens(edge, counted, [consumer.stats.hessian_diagonal_I for consumer in counted])
        x_F, w_F = power_F.sqrt(), mean_weight(edge, counted)
        errors = [RoundingError(consumer, share_of_rows(consumer, counted)) for consumer in counted]

        def losses_of(scales: Iterable[torch.Tensor]) -> list[float]:
            return sums_of([[error(scale_I) for error in errors] for scale_I in map(edge.spread, scales)])

        losses = search(lambda steps: losses_of(scale_for(step, x_F, w_F) for step in steps))
        best = min(losses, key=losses.__getitem__)
        if not losses[best] < WORTHWHILE * losses_of([torch.ones_like(x_F)])[0]:
            return None
        return scale_for(best, x_F, w_F)


class RoundingError:
    """The change of one layer's output by rounding its weight, as a share of the output's power, times its tokens.

    Errors of different columns are treated as independent: then only the mean of x^2 counts. With tr(D gram D^T) for
    the change D of the weight, scales chosen on a real model were no better, for twice the time.
    """

    def __init__(self, consumer: Consumer, num_rows: int) -> None:
        assert consumer.layer is not None
        self._weight = TriedWeight(consumer.weight_OI, consumer.layer.weight, num_rows)
        self._diagonal_I = consumer.stats.hessian_diagonal_I
        power = self._power(self._weight.weight_RI.clone())
        self._unit = consumer.stats.num_tokens / power.clamp(min=torch.finfo(torch.float32).tiny)

    def __call__(self, scale_I: torch.Tensor) -> torch.Tensor:
        change_RI = self._weight.rounded(scale_I).div_(scale_I).sub_(self._weight.weight_RI)
        return self._power(change_RI) * self._unit

    def _power(self, weight_RI: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the outputs of these rows, summed over rows; overwrites the rows."""
        return (weight_RI.square_() @ self._diagonal_I).sum()
