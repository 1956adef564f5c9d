"""Transforms change weights before they are rounded, and the function of the float model not at all. One file each.

An installed package adds transforms by the options of their algorithms (``quantcore.config.algorithms``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quantcore.config.algorithms import TransformConfig, creators
from quantcore.registry import Registry
from quantcore.runtime.shards import whole

if TYPE_CHECKING:
    import torch

    from quantcore.calibration.stats import Needs, Stats
    from quantcore.config.layer_plan import LayerPlan
    from quantcore.edges.edge import Edge


@dataclass(frozen=True)
class Consumer:
    """A module behind an edge: its weight [O, I], what it reads, how it will be quantized (None: it will not)."""

    weight: torch.Tensor
    stats: Stats
    layer: LayerPlan | None

    @property
    def weight_OI(self) -> torch.Tensor:
        """In float32, made anew each time. Of a sharded weight all ranks ask together."""
        return whole(self.weight).float()


class Smoothing(Protocol):
    """Chooses the scales that an edge takes from the activations into the weights. Made from its algorithm's config."""

    needs: Needs

    def __init__(self, config: Any) -> None: ...

    def choose(self, edge: Edge, consumers: Sequence[Consumer]) -> torch.Tensor | None:
        """Scales [F] of ``edge``, float32, finite and above 0: inputs are divided by them, weights multiplied.

        At least one consumer will be quantized. None: better leave this edge alone.
        """


def _added() -> Mapping[str, Callable[[Any], Smoothing]]:
    return creators(TransformConfig)


SMOOTHINGS: Registry[Callable[[Any], Smoothing]] = Registry("smoothing", "quantcore.transforms", others=_added)
