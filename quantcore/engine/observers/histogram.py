"""Entropy calibration: the range whose codes keep most information about the values."""

from __future__ import annotations

import torch

from quantcore.config.grouping import PER_TOKEN
from quantcore.engine.observers.distribution import DistributionObserver, Seen
from quantcore.engine.observers.observer import OBSERVERS
from quantcore.tensors.affine import fake_quantize, find_params

NUM_BINS = 2048
FEWEST_BINS = 128
STRIDE = 16
LEAST_COUNT = 1e-4  # of Q where P has values and Q none; MXNet and ONNX Runtime smooth with the same number


@OBSERVERS.add("histogram")
class HistogramObserver(DistributionObserver):
    """Chooses the range with the least Kullback-Leibler divergence between the values and their codes.

    S. Migacz, "8-bit inference with TensorRT" (GTC 2017): a histogram of 2048 equal bins over the exact range (of the
    magnitudes for symmetric specs) is cut to its innermost 2048, 2032, ... 128 bins. P is the rest, with all values
    that were cut off in the outermost bin. Q is the rest without them: each code's share is spread evenly over its bins
    that are not empty in P, with at least a ten-thousandth of a value. The candidate with the least KL(P || Q) wins; of
    equal ones the widest. Unlike there, a bin belongs to the code that the spec gives its centre, so that any format
    works, and asymmetric ranges shrink at both ends. With fewer than 2048 values the exact range is kept.

    Made for activations per tensor: it takes seconds for a thousand scales, and the counters of more than 2048 are too
    coarse for it.
    """

    def _choose(self, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        if seen.num_values < NUM_BINS:
            return seen.minimum_N, seen.maximum_N
        low, high = seen.minimum_N.clamp(max=0).unsqueeze(1), seen.maximum_N.clamp(min=0).unsqueeze(1)
        values_NK = seen.values_NK
        if self.spec.symmetric:
            low, high, values_NK = torch.zeros_like(low), torch.maximum(-low, high), values_NK.abs()
        high = torch.where(high == low, 1, high)
        span = high.double() - low
        bin_NK = ((values_NK - low.double()) / span * NUM_BINS).long().clamp(0, NUM_BINS - 1)
        counts_NB = seen.counts_NK.new_zeros(len(low), NUM_BINS).scatter_add_(1, bin_NK, seen.counts_NK)
        steps = torch.arange(NUM_BINS, device=low.device, dtype=torch.float64) + 0.5
        centres_NB = (low + steps / NUM_BINS * span).float()
        best_factor = torch.ones_like(seen.minimum_N)
        best_divergence = torch.full_like(best_factor, torch.inf, dtype=torch.float64)
        for num_left in range(NUM_BINS, FEWEST_BINS - 1, -STRIDE):
            factor = num_left / NUM_BINS
            divergence = self._divergence(counts_NB, centres_NB, low * factor, high * factor)
            better = divergence < best_divergence
            best_divergence = torch.where(better, divergence, best_divergence)
            best_factor = torch.where(better, factor, best_factor)
        return seen.minimum_N * best_factor, seen.maximum_N * best_factor

    def _divergence(
        self, counts_NB: torch.Tensor, centres_NB: torch.Tensor, low_N1: torch.Tensor, high_N1: torch.Tensor
    ) -> torch.Tensor:
        """Return KL(P || Q) of the range [low, high], float64 [N]; infinite if no values are left."""
        below, above = centres_NB < low_N1, centres_NB > high_N1
        left_NB = counts_NB.where(~(below | above), 0).double()
        first, last = below.sum(1, keepdim=True), NUM_BINS - 1 - above.sum(1, keepdim=True)
        p_NB = left_NB.scatter_add(1, first, (counts_NB * below).sum(1, keepdim=True).double())
        p_NB.scatter_add_(1, last, (counts_NB * above).sum(1, keepdim=True).double())

        ends = (-high_N1 if self.spec.symmetric else low_N1), high_N1
        params = find_params(*ends, self.spec, torch.float32)
        quantized_NB = fake_quantize(centres_NB, self.spec, PER_TOKEN, params)
        code_NB = torch.nn.functional.pad((quantized_NB.diff(dim=1) != 0).cumsum(dim=1), (1, 0))
        mass_NB = torch.zeros_like(p_NB).scatter_add_(1, code_NB, left_NB)
        num_bins_NB = torch.zeros_like(p_NB).scatter_add_(1, code_NB, (p_NB > 0).double())
        q_NB = (mass_NB / num_bins_NB).gather(1, code_NB).clamp(min=LEAST_COUNT)

        num_p_N1, num_left_N1 = p_NB.sum(dim=1, keepdim=True), left_NB.sum(dim=1, keepdim=True)
        parts_NB = torch.where(p_NB > 0, p_NB * (p_NB / q_NB * (num_left_N1 / num_p_N1)).log(), 0)
        divergence_N1 = parts_NB.sum(dim=1, keepdim=True) / num_p_N1
        return divergence_N1.where(num_left_N1 > 0, torch.inf).squeeze(1)
