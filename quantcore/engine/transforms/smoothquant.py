"""SmoothQuant (Xiao et al. 2022): scales outlier channels of activations down, and the weights that read them up.

With scale s = max|x|^alpha / max|w|^(1 - alpha) a channel's largest input becomes (max|x| max|w|)^(1 - alpha) and its
largest weight (max|x| max|w|)^alpha: with alpha 0.5 both are equal, with a larger alpha the weights are larger.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantcore.config.algorithms import SmoothQuantConfig
from quantcore.engine.calibration.stats import Needs
from quantcore.engine.transforms import SMOOTHINGS, Consumer
from quantcore.engine.transforms.mappings.scale_pair import ScalePair
from quantcore.engine.transforms.scale_search import largest, quantized


@SMOOTHINGS.add("smooth")
@SMOOTHINGS.add("smoothquant")
class SmoothQuant:
    """Uses one alpha for all edges. ``smooth`` is the name in AMD Quark's config files."""

    needs = Needs()

    def __init__(self, config: SmoothQuantConfig) -> None:
        self._config = config

    def choose(self, edge: ScalePair, consumers: Sequence[Consumer]) -> torch.Tensor | None:
        counted = quantized(consumers)
        return migration(*largest(edge, counted), self._config.alpha, self._config.scale_clamp_min) if counted else None


def migration(x_F: torch.Tensor, w_F: torch.Tensor, alpha: float, least: float) -> torch.Tensor:
    """Return the paper's scale from the largest |x| and |w|, at least ``least``; 1 if either is 0 or not finite."""
    scale = (x_F**alpha / w_F ** (1 - alpha)).clamp(min=least)
    has_signal = (x_F > 0) & (w_F > 0) & torch.isfinite(scale)
    return torch.where(has_signal, scale, 1.0)
