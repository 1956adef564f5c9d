"""Solvers choose the codes of one weight: ``solve(weight_OI, layer, stats) -> QTensor``. One file each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quantcore.registry import Registry

if TYPE_CHECKING:
    import torch

    from quantcore.layer import LayerPlan
    from quantcore.qtensor import QTensor

    Solver = Callable[[torch.Tensor, LayerPlan], QTensor]

SOLVERS: Registry[Solver] = Registry("solver", "quantcore.solvers")
