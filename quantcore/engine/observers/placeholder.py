"""The observer for tensors that need no learned range."""

from __future__ import annotations

import torch

from quantcore.engine.observers.observer import OBSERVERS, Observer


@OBSERVERS.add("placeholder")
class PlaceholderObserver(Observer):
    """Finds no range. A plain cast (float16, bfloat16) gets an empty range, [0, 0], which leads to its scale 1.

    For any other format ``range`` raises ValueError: its scales are computed for every tensor.
    """

    def _find(self, minimum_RG: torch.Tensor, maximum_RG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.spec.format.scaled:
            raise ValueError(
                f"PlaceholderObserver computes no range, but {self.spec.dtype.value} needs one: use a MinMax "
                "observer, or quantize dynamically"
            )
        return torch.zeros_like(minimum_RG), torch.zeros_like(maximum_RG)
