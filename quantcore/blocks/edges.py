"""Edges: places in a decoder block where a scale can move from one module to the next without changing the function.

If a norm or a linear layer hands its output, channel by channel, to linear layers, then its outputs can be divided by
positive numbers and the matching input columns of those layers multiplied by the same: the block computes what it
computed. SmoothQuant (Xiao et al. 2022) and AWQ (Lin et al. 2023) choose such numbers so that rounding hurts less.
Which edges a block has is found and proven by ``discovery``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quantcore.layouts import canonical


@dataclass(frozen=True)
class Edge:
    """``producer`` and ``consumers`` are names of modules in the block, each with a ``weight``.

    ``rows`` [F]: the outputs of the producer that carry a scale, all of them or a part (v in a fused qkv). ``channels``
    [I]: for every input of the consumers the position in ``rows`` that it comes from: 0, 1, 2 ... or, where heads of
    queries share a head of values, with repetitions. ``plus_one``: the producer is a norm that multiplies with
    1 + weight.
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

        Computed in float32 and stored in each weight's dtype. What a norm can store decides: its consumers take back
        the scale that is in its rounded weight. Returns the names of the parameters that changed (``v_proj.weight``).
        """
        scale = scale_F.float()
        producer = block.get_submodule(self.producer)
        weight = canonical(producer.get_parameter("weight").data, kind_of(producer))
        rows = self.rows.to(weight.device)
        if weight.ndim == 1:
            offset = 1.0 if self.plus_one else 0.0
            before = weight[rows].float() + offset
            weight[rows] = (before / scale - offset).to(weight.dtype)
            after = weight[rows].float() + offset
            scale = torch.where(after == 0, scale, before / after)
        else:
            weight[rows] = (weight[rows].float() / scale[:, None]).to(weight.dtype)
        changed = [f"{self.producer}.weight"]
        if getattr(producer, "bias", None) is not None:
            bias = producer.get_parameter("bias").data
            bias[rows] = (bias[rows].float() / scale).to(bias.dtype)
            changed.append(f"{self.producer}.bias")
        for name in self.consumers:
            consumer = block.get_submodule(name)
            columns = canonical(consumer.get_parameter("weight").data, kind_of(consumer))
            columns.copy_(columns.float() * self.spread(scale))
            changed.append(f"{name}.weight")
        return changed

    def spread(self, scale_F: torch.Tensor) -> torch.Tensor:
        """``scale_F`` for every input of the consumers, [I]."""
        return scale_F[self.channels.to(scale_F.device)]

    def largest(self, value_I: torch.Tensor) -> torch.Tensor:
        """The largest value over the inputs that share a scale, [F]."""
        result = torch.zeros(self.num_scales, dtype=value_I.dtype, device=value_I.device)
        return result.scatter_reduce(0, self.channels.to(value_I.device), value_I, "amax", include_self=False)


def kind_of(module: nn.Module) -> str:
    """The name by which ``layouts`` knows how a module stores its weight."""
    return "Conv1D" if any(parent.__name__ == "Conv1D" for parent in type(module).__mro__) else type(module).__name__
