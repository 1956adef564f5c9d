"""Transforms change weights before they are rounded, but not the function of the float model. One file for each.

An installed package adds transforms by the options of their algorithms (``quantcore.config.algorithms``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quantcore.config.algorithms import TransformConfig, creators
from quantcore.engine.runtime.shards import whole
from quantcore.registry import Registry

if TYPE_CHECKING:
    import torch

    from quantcore.config.layer_plan import LayerPlan
    from quantcore.engine.calibration.stats import Needs, Stats
    from quantcore.engine.transforms.mappings.scale_pair import ScalePair


@dataclass(frozen=True)
class Consumer:
    """A module after an edge: its weight [O, I], statistics of its input, its planned quantization (None: none)."""

    weight: torch.Tensor
    stats: Stats
    layer: LayerPlan | None

    @property
    def weight_OI(self) -> torch.Tensor:
        """The weight in float32, a new tensor on every access. All ranks must access a sharded weight together."""
        return whole(self.weight).float()


class Smoothing(Protocol):
    """Chooses the scales that an edge moves from the activations into the weights. Made from its algorithm's config."""

    needs: Needs

    def __init__(self, config: Any) -> None: ...

    def choose(self, edge: ScalePair, consumers: Sequence[Consumer]) -> torch.Tensor | None:
        """Return scales [F] of ``edge``, float32, finite and above 0: inputs are divided by them, weights multiplied.

        At least one consumer will be quantized. Returns None if the edge is better left alone.
        """


def _added() -> Mapping[str, Callable[[Any], Smoothing]]:
    return creators(TransformConfig)


SMOOTHINGS: Registry[Callable[[Any], Smoothing]] = Registry("smoothing", "quantcore.engine.transforms", others=_added)
