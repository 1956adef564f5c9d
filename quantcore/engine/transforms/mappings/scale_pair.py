"""Edges: places in a decoder block where a scale can move from one module to the next without changing the function.

If linear layers read the output of a norm or a linear layer channel by channel, then its outputs can be divided by
positive numbers and the matching input columns of those layers multiplied by the same, without changing the block's
function. SmoothQuant (Xiao et al. 2022) and AWQ (Lin et al. 2023) choose these numbers so that rounding costs less.
``discovery`` finds and proves the edges of a block.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from quantcore.engine.runtime.shards import local_rows, rows_of
from quantcore.formats.weight_layout import canonical


@dataclass(frozen=True, eq=False)
class ScalePair:
    """An edge from ``producer`` to ``consumers``, the names of modules in the block, each with a ``weight``.

    ``rows`` [F]: the outputs of the producer that carry a scale, all of them or a part (v in a fused qkv). ``channels``
    [I]: for every input of the consumers its position in ``rows``: 0, 1, 2 ... or, where heads of queries share a head
    of values, with repetitions. ``plus_one``: the producer is a norm that multiplies with 1 + weight.
    """

    producer: str
    consumers: tuple[str, ...]
    rows: torch.Tensor
    channels: torch.Tensor
    plus_one: bool = False

    @property
    def num_scales(self) -> int:
        return len(self.rows)

    def fold(self, block: nn.Module, scale_F: torch.Tensor) -> list[str]:
        """Divide the producer's ``rows`` by ``scale_F`` > 0 and multiply the consumers' columns, in place.

        Computed in float32 and stored in each weight's dtype. The consumers of a norm are multiplied by the scale that
        its rounded weight holds. Returns the names of the parameters that changed (``v_proj.weight``).
        """
        self.multiply(block, self.divide(block, scale_F))
        has_bias = getattr(block.get_submodule(self.producer), "bias", None) is not None
        return [
            f"{self.producer}.weight",
            *([f"{self.producer}.bias"] if has_bias else []),
            *(f"{name}.weight" for name in self.consumers),
        ]

    def divide(self, block: nn.Module, scale_F: torch.Tensor) -> torch.Tensor:
        """Divide the producer by the scale; return the scale [F] that its weight could store, for the consumers."""
        producer = block.get_submodule(self.producer)
        weight = weight_of(producer)
        scale = scale_F.to(weight.device, torch.float32)
        stored = scale
        if weight.ndim == 1:
            rows, offset = self.rows.to(weight.device), 1.0 if self.plus_one else 0.0
            before = weight[rows].float() + offset
            weight[rows] = (before / scale - offset).to(weight.dtype)
            after = weight[rows].float() + offset
            stored = torch.where(after == 0, scale, before / after)
        else:
            rows, held = self._held(producer.get_parameter("weight"), weight)
            weight[rows] = (weight[rows].float() / scale[held, None]).to(weight.dtype)
        if getattr(producer, "bias", None) is not None:
            bias = local_rows(producer.get_parameter("bias"))
            rows, held = self._held(producer.get_parameter("bias"), bias)
            bias[rows] = (bias[rows].float() / stored[held]).to(bias.dtype)
        return stored

    def _held(self, parameter: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of ``rows`` in this rank's ``part`` of ``parameter``, and their indices in ``rows``."""
        first = rows_of(parameter).start
        held = ((self.rows >= first) & (self.rows < first + len(part))).nonzero().squeeze(1)
        return (self.rows[held] - first).to(part.device), held.to(part.device)

    def multiply(self, block: nn.Module, scale_F: torch.Tensor) -> None:
        """Multiply the consumers by the scale, the other half of ``fold``."""
        for name in self.consumers:
            weight_OI = weight_of(block.get_submodule(name))
            weight_OI.mul_(self.spread(scale_F.to(weight_OI.device)))

    def on(self, device: torch.device) -> ScalePair:
        """Return the edge with its ``channels`` on ``device``, where ``spread`` then copies nothing."""
        return replace(self, channels=self.channels.to(device))

    def spread(self, scale_F: torch.Tensor) -> torch.Tensor:
        """Return ``scale_F`` for every input of the consumers, [I]."""
        return scale_F[self.channels.to(scale_F.device)]

    def largest(self, value_I: torch.Tensor) -> torch.Tensor:
        """Return the largest value over the inputs that share a scale, [F]."""
        result = torch.zeros(self.num_scales, dtype=value_I.dtype, device=value_I.device)
        return result.scatter_reduce(0, self.channels.to(value_I.device), value_I, "amax", include_self=False)


@dataclass(frozen=True)
class Rejected:
    """Linear layers whose inputs take no scale, and the reason. ``producer`` is None if no layer feeds them."""

    producer: str | None
    consumers: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class FoundEdges:
    """The edges of a block and the rejected ones, which together cover every tensor that linear layers read."""

    edges: tuple[ScalePair, ...]
    rejected: tuple[Rejected, ...]

    def to_dict(self) -> dict[str, list[dict[str, Any]]]:
        """Return the edges as the report has them."""
        return {
            "found": [{"producer": edge.producer, "consumers": list(edge.consumers)} for edge in self.edges],
            "rejected": [asdict(edge) for edge in self.rejected],
        }


def weight_of(module: nn.Module) -> torch.Tensor:
    """Return a view of the weight of a norm [O] or a linear layer [O, I], to change in place.

    Of a sharded weight it shows the rows of this rank.
    """
    return canonical(local_rows(module.get_parameter("weight")), kind_of(module))


def shape_of(module: nn.Module) -> torch.Size:
    """Return the shape of the whole weight: [O] or [O, I]."""
    return canonical(module.get_parameter("weight"), kind_of(module)).shape


def kind_of(module: nn.Module) -> str:
    """Return the name of a module's storage layout, as ``weight_layout`` uses it."""
    return "Conv1D" if any(parent.__name__ == "Conv1D" for parent in type(module).__mro__) else type(module).__name__
