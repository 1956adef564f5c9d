"""SmoothQuant with a search of alpha for every edge: the one whose quantized layers come closest to the float ones.

The search quantizes weights and inputs as planned, on a sample of the calibration's tokens. If the range of an input
is fixed by calibration, x and w of s = x^alpha / w^(1 - alpha) are the largest values, as in the paper (Xiao et al.
2022): the largest outlier sets the step for all tokens. If every token or group has its own range, or inputs are not
quantized, typical sizes matter: x and w are means of magnitudes.

Legend: T tokens, R rows that represent all outputs, I in, F scales of an edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from quantcore.config.algorithms import AutoSmoothQuantConfig
from quantcore.config.grouping import PER_TENSOR, activation_grouping
from quantcore.config.quantization import learns_from_data
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.calibration.stats import Needs, Stats
from quantcore.engine.transforms import SMOOTHINGS, Consumer
from quantcore.engine.transforms.mappings.scale_pair import ScalePair
from quantcore.engine.transforms.scale_search import (
    WORTHWHILE,
    TriedWeight,
    largest,
    mean_over_tokens,
    mean_weight,
    quantized,
    scale_for,
    search,
    share_of_rows,
    spread_evenly,
    sums_of,
)
from quantcore.tensors.affine import QParams, fake_quantize_activation, find_params, min_max, static_params

NUM_TOKENS = 256
MAX_EXCESS_ERROR = 0.1
"""Upper bound on the error above the least one, for static ranges.

The smallest alpha within it is used: with a large alpha every channel fills the calibrated range, and tokens of another
text exceed it.
"""

Measure = Callable[[torch.Tensor], torch.Tensor]
MEASURES: dict[str, Measure] = {
    "MSE": lambda error: error.square().mean(),
    "MAE": lambda error: error.abs().mean(),
    "RMSE": lambda error: error.square().mean().sqrt(),
}


@SMOOTHINGS.add("autosmoothquant")
class AutoSmoothQuant:
    """Searches alpha for each edge. Edges that no alpha improves are left alone."""

    needs = Needs(sample=NUM_TOKENS)

    def __init__(self, config: AutoSmoothQuantConfig) -> None:
        self._measure = MEASURES[config.compute_scale_loss]

    def choose(self, edge: ScalePair, consumers: Sequence[Consumer]) -> torch.Tensor | None:
        counted = quantized(consumers)
        if not counted:
            return None
        errors = [OutputError(consumer, share_of_rows(consumer, counted), self._measure) for consumer in counted]
        is_static = any(error.is_static for error in errors)
        x_F, w_F = largest(edge, counted) if is_static else usual(edge, counted)

        def losses_of(scales: Iterable[torch.Tensor]) -> list[float]:
            return sums_of([[error(scale_I) for error in errors] for scale_I in map(edge.spread, scales)])

        losses = search(lambda steps: losses_of(scale_for(step, x_F, w_F) for step in steps))
        least, worthwhile = min(losses.values()), WORTHWHILE * losses_of([torch.ones_like(x_F)])[0]
        enough = (1 + MAX_EXCESS_ERROR) * least if is_static else least
        good = [step for step, error in losses.items() if error <= enough and error < worthwhile]
        return scale_for(min(good), x_F, w_F) if good else None


class OutputError:
    """The change of one layer's output by quantizing, as a share of the output, times its tokens."""

    def __init__(self, consumer: Consumer, num_rows: int, measure: Measure) -> None:
        assert consumer.layer is not None
        assert consumer.stats.sample_TI is not None, "calibration was not asked for a sample"
        self._measure = measure
        self._weight = TriedWeight(consumer.weight_OI, consumer.layer.weight, num_rows)
        self._spec = consumer.layer.input_tensors
        sample_TI = consumer.stats.sample_TI
        self._x_TI = sample_TI[spread_evenly(len(sample_TI), NUM_TOKENS).to(sample_TI.device)].float()
        self._ends_2I = input_range(consumer.stats)
        self._y_TR = self._x_TI @ self._weight.weight_RI.T
        self._unit = consumer.stats.num_tokens / measure(self._y_TR).clamp(min=torch.finfo(torch.float32).tiny)

    @property
    def is_static(self) -> bool:
        """True if values of the input beyond the calibrated range are clipped."""
        return self._spec is not None and self._spec.is_static

    def __call__(self, scale_I: torch.Tensor) -> torch.Tensor:
        x_TI = self._x_TI / scale_I
        if self._spec is not None:
            x_TI = fake_quantize_activation(x_TI, self._spec, static(self._ends_2I / scale_I, self._spec))
        error_TR = (x_TI @ self._weight.rounded(scale_I).T).sub_(self._y_TR)
        return self._measure(error_TR) * self._unit


def usual(edge: ScalePair, consumers: Sequence[Consumer]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean |x| and |w| of all inputs that share a scale, both float32 [F]."""
    x_F = mean_over_tokens(edge, consumers, [consumer.stats.mean_abs_I.float() for consumer in consumers])
    return x_F, mean_weight(edge, consumers)


def input_range(stats: Stats) -> torch.Tensor:
    """Return the smallest and largest value of every input, float32 [2, I].

    The end that is further from 0 is that of all tokens; its sign and the other end come from the sample.
    """
    assert stats.sample_TI is not None
    low_I, high_I = (end.float() for end in stats.sample_TI.aminmax(dim=0))
    below = -low_I > high_I
    return torch.stack([torch.where(below, -stats.largest_I, low_I), torch.where(below, high_I, stats.largest_I)])


def static(ends_2I: torch.Tensor, spec: QuantizationSpec) -> QParams | None:
    """Return the parameters that calibration would find for inputs in this range.

    Returns None if a kernel finds all of them.
    """
    if not learns_from_data(spec):
        return None
    grouping = PER_TENSOR if spec.is_dynamic else activation_grouping(spec)
    return static_params(find_params(*min_max(grouping.split(ends_2I)), spec, torch.float32), spec)
