"""The running minimum and maximum of a tensor that comes in many pieces."""

from __future__ import annotations

import torch


class MinMax:
    """Streaming and mergeable range of one tensor: the order and the shapes of the batches do not matter.

    NaN and infinity are kept, not hidden: ``range`` shows them and the solver refuses them by name.
    """

    def __init__(self) -> None:
        self._range_2: torch.Tensor | None = None  # [minimum, -maximum], so that one minimum merges both
        self.num_values = 0

    def update(self, x: torch.Tensor) -> None:
        """Take in one batch of any shape; an empty one changes nothing."""
        if x.numel() == 0:
            return
        minimum, maximum = torch.aminmax(x)
        self._merge(torch.stack([minimum, -maximum]).float(), x.numel())

    def merge(self, other: MinMax) -> None:
        """Take in all that ``other`` has seen."""
        if other._range_2 is not None:
            self._merge(other._range_2, other.num_values)

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(minimum, maximum), float32 scalars. Raises ValueError before any value was seen."""
        if self._range_2 is None:
            raise ValueError("the observer has seen no value")
        return self._range_2[0], -self._range_2[1]

    def _merge(self, range_2: torch.Tensor, num_values: int) -> None:
        self._range_2 = range_2 if self._range_2 is None else torch.minimum(self._range_2, range_2)
        self.num_values += num_values
