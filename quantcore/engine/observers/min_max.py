"""The observer of the exact range, from the smallest to the largest value."""

from __future__ import annotations

import torch

from quantcore.engine.observers.observer import OBSERVERS, Observer


@OBSERVERS.add("min_max")
class MinMaxObserver(Observer):
    """Keeps the exact range."""

    def _find(self, minimum_RG: torch.Tensor, maximum_RG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return minimum_RG, maximum_RG
