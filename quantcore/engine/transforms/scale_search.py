"""The search for the best alpha that smoothings share: weights are rounded under trial scales.

Scales are not rounded to powers of two. Folding those would be exact, but the error of outputs grew by 15 to 40 %
(SmolLM2-135M; uint4 groups, int8 static and dynamic); rounding folded weights to bfloat16 costs 0 to 2 %.

Legend: O out, R rows of a weight that represent all, I in, F scales of an edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil, inf, isfinite

import torch

from quantcore.config.grouping import PER_TENSOR, Grouping, weight_grouping
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.transforms import Consumer
from quantcore.engine.transforms.mappings.scale_pair import ScalePair
from quantcore.tensors.affine import fake_quantize, find_params, min_max
from quantcore.tensors.super_blocks import as_two_levels

NUM_STEPS = 20  # alpha is a whole multiple of 1/20
NUM_ROWS = 1024  # of all consumers together; not much less, because few outputs may bear most of the error
MIN_ROWS = 16  # of one consumer
MIN_CHANNEL_SHARE = 1e-4  # of the largest channel; smaller ones get the scales of this share
WORTHWHILE = 0.95
"""Largest share of the error without smoothing that counts as better.

A smaller gain may be chance, and folding rounds weights.
"""


def quantized(consumers: Sequence[Consumer]) -> list[Consumer]:
    """Return the consumers whose rounding matters: planned, and reached by tokens."""
    return [consumer for consumer in consumers if consumer.layer is not None and consumer.stats.num_tokens > 0]


def share_of_rows(consumer: Consumer, consumers: Sequence[Consumer], num_rows: int = NUM_ROWS) -> int:
    """Return the consumer's share of ``num_rows`` rows, by its size."""
    total = sum(len(other.weight) for other in consumers)
    return max(MIN_ROWS, num_rows * len(consumer.weight) // total)


def largest(edge: ScalePair, consumers: Sequence[Consumer]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest |x| and |w| of all inputs that share a scale, both float32 [F]."""
    x_I = torch.stack([consumer.stats.largest_I.float() for consumer in consumers]).amax(0)
    w_I = torch.stack([consumer.weight_OI.abs().amax(0).float() for consumer in consumers]).amax(0)
    return edge.largest(x_I), edge.largest(w_I)


def mean_weight(edge: ScalePair, consumers: Sequence[Consumer]) -> torch.Tensor:
    """Return the mean |w| of all inputs that share a scale, float32 [F]."""
    total_I = sum_of([consumer.weight_OI.abs().sum(0, dtype=torch.float32) for consumer in consumers])
    return mean(edge, total_I / sum(len(consumer.weight) for consumer in consumers))


def mean_over_tokens(edge: ScalePair, consumers: Sequence[Consumer], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean [F] of ``values`` [I], each a mean over the tokens that its consumer read."""
    tokens = [consumer.stats.num_tokens for consumer in consumers]
    weighted = [value_I * (count / sum(tokens)) for value_I, count in zip(values, tokens, strict=True)]
    return mean(edge, sum_of(weighted))


def mean(edge: ScalePair, value_I: torch.Tensor) -> torch.Tensor:
    """Return the mean over the inputs that share a scale, [F]."""
    result = torch.zeros(edge.num_scales, dtype=value_I.dtype, device=value_I.device)
    return result.scatter_reduce(0, edge.channels.to(value_I.device), value_I, "mean", include_self=False)


def sum_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add ``values`` element by element."""
    return torch.stack([*values]).sum(0)


def scale_for(step: int, x_F: torch.Tensor, w_F: torch.Tensor) -> torch.Tensor:
    """Return SmoothQuant's x^alpha / w^(1 - alpha) with alpha = step / 20, times a factor that centres the ends on 1.

    The scale is 1 for channels where x or w is 0. The common factor leaves float16 room on both sides; rounding does
    not depend on it unless scales are powers of two.
    """
    alpha = step / NUM_STEPS
    has_signal = (x_F > 0) & (w_F > 0)
    x_F, w_F = (value.clamp(min=MIN_CHANNEL_SHARE * value.max()) for value in (x_F, w_F))
    log_F = alpha * x_F.log() - (1 - alpha) * w_F.log()
    least, most = torch.where(has_signal, log_F, inf).amin(), torch.where(has_signal, log_F, -inf).amax()
    return torch.where(has_signal, (log_F - (least + most) / 2).exp(), 1.0)


def search(losses_of: Callable[[Sequence[int]], Sequence[float]]) -> dict[int, float]:
    """Return the loss of every alpha that was tried, in steps of 1/20: first each fifth part, then closer to the best.

    A loss that is not a number counts as infinite. ``losses_of`` is called once for all alphas of a round.
    """
    losses: dict[int, float] = {}

    def try_(steps: Iterable[int]) -> None:
        new = [step for step in steps if step not in losses and 0 <= step <= NUM_STEPS]
        losses.update((step, loss if isfinite(loss) else inf) for step, loss in zip(new, losses_of(new), strict=True))

    try_(range(0, NUM_STEPS + 1, 4))
    for distance in (2, 1):
        best = min(losses, key=losses.__getitem__)
        try_((best - distance, best + distance))
    return losses


def sums_of(losses: Sequence[Sequence[torch.Tensor]]) -> list[float]:
    """Return the sum of each row of numbers, which come from the device together."""
    return [sum(row) for row in torch.stack([torch.stack([*row]) for row in losses]).tolist()] if losses else []


class TriedWeight:
    """Some rows of a weight [O, I], rounded like rows of the whole weight.

    There are about ``num_rows`` of them, spread evenly, or more if scales cover several rows. Ranges are the smallest
    and largest values, with any observer in the spec: solvers search better ones once the scales are chosen.
    """

    def __init__(self, weight_OI: torch.Tensor, spec: QuantizationSpec, num_rows: int) -> None:
        self._spec = spec
        self._dtype = weight_OI.dtype
        self._grouping = weight_grouping(spec)
        chosen = spread_evenly(len(weight_OI), num_rows, _height(self._grouping, len(weight_OI)))
        self.weight_RI = weight_OI[chosen.to(weight_OI.device)].float()
        self._low_I, self._high_I = weight_OI.amin(0).float(), weight_OI.amax(0).float()

    def rounded(self, scale_I: torch.Tensor) -> torch.Tensor:
        """Return the rows times ``scale_I``, rounded: float32 [R, I]."""
        scaled = self.weight_RI * scale_I
        low, high = (self._low_I * scale_I).amin().reshape(1, 1), (self._high_I * scale_I).amax().reshape(1, 1)
        params = find_params(low, high, self._spec, self._dtype)  # of the whole weight
        if self._grouping != PER_TENSOR:
            ends = min_max(self._grouping.split(scaled))
            params = find_params(*ends, self._spec, self._dtype, params.global_scale)
            if self._spec.scale_type.is_whole:  # others are stored by the mean of all rows' scales, or one by one
                params = as_two_levels(params, self._spec)
        return fake_quantize(scaled, self._spec, self._grouping, params)


def spread_evenly(length: int, num_wanted: int, height: int = 1) -> torch.Tensor:
    """Return about ``num_wanted`` of ``length`` positions, in pieces of ``height``, spread evenly from 0 on."""
    step = min(ceil(length / height), max(1, round(length / max(num_wanted, height))))
    position = torch.arange(length)
    return position[(position // height) % step == 0]


def _height(grouping: Grouping, num_rows: int) -> int:
    """Return the number of neighbouring rows that share scales and cannot be separated."""
    if grouping.block is not None:
        return grouping.block[0]
    if grouping.axis is None:
        return 1
    along_rows = grouping.axis % 2 == 0
    if grouping.across:
        return 1 if along_rows else num_rows
    return (grouping.size or num_rows) if along_rows else 1
