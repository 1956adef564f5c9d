"""The observer of the range whose quantization has the smallest squared error."""

from __future__ import annotations

import torch

from quantcore.config.grouping import PER_TOKEN
from quantcore.config.spec import ScaleType
from quantcore.engine.observers.distribution import DistributionObserver, Seen
from quantcore.engine.observers.observer import OBSERVERS
from quantcore.tensors.affine import fake_quantize, find_params

NUM_OCTAVES = 24
CANDIDATES_AN_OCTAVE = 32


@OBSERVERS.add("mse")
class MSEObserver(DistributionObserver):
    """Shrinks the exact range by 2^(-i / 32), i = 0, 1, 2 ..., and takes the first with the least squared error.

    The error is that of ``fake_quantize`` with the spec, summed over all values seen, with scales as a model of the
    values' own dtype stores them; both ends shrink alike. Scales that are powers of two are tried octave by octave. The
    search continues until clipping alone costs more than the best candidate, so no smaller range is missed. The full
    range is the first candidate: the result is never worse than min-max. Scales below a global one (NVFP4, two stages)
    are tried with the global scale of the full range, and the scale that holds the largest value of all does not
    shrink, so that the global scale does not change in the end.
    """

    def _choose(self, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        peak = seen.peak.view(1, 1)
        global_scale = find_params(-peak, peak, self.spec, torch.float32).global_scale
        largest = torch.maximum(seen.maximum_N, -seen.minimum_N)
        powers = self.spec.scale_type in (ScaleType.e8m0, ScaleType.pof2)
        num_steps, num_candidates = (1, NUM_OCTAVES) if powers else (8, NUM_OCTAVES * CANDIDATES_AN_OCTAVE)
        best_factor = torch.ones_like(largest)
        best_error = torch.full_like(largest, torch.inf, dtype=torch.float64)
        rows = torch.arange(len(largest), device=largest.device)
        if global_scale is not None:
            rows = rows[largest < seen.peak]
        for first in range(0, num_candidates, num_steps):
            if rows.numel() == 0:
                break
            search = _Search(self, seen, rows, global_scale)
            for step in range(first, first + num_steps):
                factor = 2.0 ** -(step if powers else step / CANDIDATES_AN_OCTAVE)
                error = search.error(factor)
                better = error < best_error[rows]
                best_error[rows] = torch.where(better, error, best_error[rows])
                best_factor[rows] = torch.where(better, factor, best_factor[rows])
            rows = rows[search.clipping(factor) < best_error[rows]]
        return seen.minimum_N * best_factor, seen.maximum_N * best_factor


class _Search:
    """Errors of the scales ``rows`` for one candidate after another, in units of each scale's largest magnitude."""

    def __init__(self, observer: MSEObserver, seen: Seen, rows: torch.Tensor, global_scale: torch.Tensor | None):
        self._spec, self._dtype = observer.spec, seen.dtype
        self._values_NK, self._counts_NK = seen.values_NK[rows], seen.counts_NK[rows].float()
        self._minimum_N1, self._maximum_N1 = seen.minimum_N[rows].unsqueeze(1), seen.maximum_N[rows].unsqueeze(1)
        largest = torch.maximum(self._maximum_N1, -self._minimum_N1)
        self._unit_N1 = torch.where(largest == 0, 1, largest)
        self._global_scale = global_scale

    def error(self, factor: float) -> torch.Tensor:
        """Return the squared error if the range shrinks by ``factor``, float64 [N]."""
        return self._sum_of_squares(self._quantize(self._values_NK, factor))

    def clipping(self, factor: float) -> torch.Tensor:
        """Return the part of the error that all smaller factors share: the loss of values outside the range."""
        far = torch.tensor([[-3e38, 3e38]], device=self._values_NK.device).expand(len(self._values_NK), -1)
        low_N1, high_N1 = torch.split(self._quantize(far, factor), 1, dim=1)
        return self._sum_of_squares(self._values_NK.clamp(low_N1, high_N1))

    def _quantize(self, x_NK: torch.Tensor, factor: float) -> torch.Tensor:
        ends = self._minimum_N1 * factor, self._maximum_N1 * factor
        params = find_params(*ends, self._spec, self._dtype, self._global_scale)
        return fake_quantize(x_NK, self._spec, PER_TOKEN, params)

    def _sum_of_squares(self, quantized_NK: torch.Tensor) -> torch.Tensor:
        lost_NK = quantized_NK.sub_(self._values_NK).div_(self._unit_N1).square_()
        return lost_NK.mul_(self._counts_NK).sum(dim=-1, dtype=torch.float64)
