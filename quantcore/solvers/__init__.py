"""Solvers choose the codes of weights, given what calibration learned of their input. One file each.

An installed package adds solvers by the options of their algorithms (``quantcore.config.algorithms``), and a running
process by a function (``per_layer``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from quantcore.config.algorithms import SolverConfig, creators
from quantcore.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quantcore.calibration.stats import Needs, Stats
    from quantcore.config.layer_plan import LayerPlan
    from quantcore.numerics.qtensor import QTensor


Weights = Mapping["LayerPlan", "torch.Tensor"]
GlobalScales = Mapping["LayerPlan", "torch.Tensor"]
NONE: GlobalScales = MappingProxyType({})


class Solver(Protocol):
    """Made from its algorithm's config: ``SOLVERS.get("gptq")(GPTQConfig())``."""

    needs: Needs
    """What it asks of calibration."""
    notes: list[str]
    """What was done otherwise than asked for, in words for people; whoever reads it empties it."""

    def __init__(self, config: Any) -> None: ...

    def solve(
        self, weights: Weights, stats: Stats | None, global_scales: GlobalScales = NONE
    ) -> dict[LayerPlan, QTensor]:
        """Quantize the finite weights [out, in] of layers that read the same input, each as its plan says.

        The weights are left as they are. ``stats`` is None where calibration saw too little of the input: the solver
        then chooses from the weights alone. ``global_scales`` are given to the layers that have one: see ``shared``.
        """


class Tuner(Protocol):
    """Improves the codes of all layers of a block together, by what the block computes."""

    needs: Needs

    def __init__(self, config: Any) -> None: ...

    def tune(
        self, modules: Mapping[LayerPlan, nn.Module], start: Mapping[LayerPlan, QTensor],
        run: Callable[[int], torch.Tensor], targets: Sequence[torch.Tensor],
    ) -> dict[LayerPlan, QTensor]:  # fmt: skip
        """Other codes, and scales, than ``start``; never worse ones.

        ``run`` gives the block's output for a window with the weights that the modules hold, with gradients;
        ``targets`` are the outputs of the float block. The modules are left as they were.
        """


def _added() -> Mapping[str, Callable[[Any], Solver]]:
    return creators(SolverConfig)


SOLVERS: Registry[Callable[[Any], Solver]] = Registry("solver", "quantcore.solvers", others=_added)
TUNERS: Registry[type[Tuner]] = Registry("tuner", "quantcore.solvers")
