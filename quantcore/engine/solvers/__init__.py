"""Solvers choose the codes of weights, given the calibration statistics of their input. One file for each.

A layer computes y = W x. Rounding W to Q costs |W x - Q x|^2 over the calibration tokens, which is, row by row,
(w - q) H (w - q)^T with the Hessian H = X X^T (OBQ, Frantar and Alistarh 2022; GPTQ, Frantar et al. 2022). Axes: O
outputs (rows of W), I inputs, K inputs in the order in which they are rounded, T tokens.

==============================  ===========================================  ========================================
paper                           here                                         meaning
==============================  ===========================================  ========================================
W                               ``weight_OI``                                float weight, [out, in]
Q, quant(w)                     ``QTensor``, ``Columns.value_KO``            codes and their parameters
X, H = 2 X X^T                  ``Stats.gram_II``                            mean of x x^T over tokens: H/2 per token
diag(H)                         ``Stats.hessian_diagonal_I``                 mean square of each input
percdamp, lambda                ``damp_percent`` of ``Hessian.of``           share of the mean diagonal, added to it
act-order, desc_act             ``order_K`` of ``order_of``                  inputs with the largest diag(H) first
cholesky(H^-1)                  U of H = U U^T, upper triangular             no inverse: see ``Hessian``
1 / [H_F^-1]_kk                 ``Hessian.squared_u_K`` = U_kk^2             cost of an error in input k
-err [H_F^-1]_:k / [H_F^-1]_kk  ``Hessian.error_feedback_KK`` = U_lk / U_kk  the same updates, summed over all errors
H_kl / H_kk                     ``Hessian.row_scaled_KK``                    the same with all other inputs fixed
(X~ - X) X^T of GPTAQ           ``Stats.shift_II``                           mean of (y - x) x^T, y the float input
==============================  ===========================================  ========================================

The ``needs`` of a solver list the statistics that calibration must gather.

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

    from quantcore.config.layer_plan import LayerPlan
    from quantcore.engine.calibration.reduction import Span
    from quantcore.engine.calibration.stats import Needs, Stats
    from quantcore.tensors.qtensor import QTensor


Weights = Mapping["LayerPlan", "torch.Tensor"]
GlobalScales = Mapping["LayerPlan", "torch.Tensor"]
NONE: GlobalScales = MappingProxyType({})


class Solver(Protocol):
    """The interface of solvers, which are made from their algorithm's config: ``SOLVERS.get("gptq")(GPTQConfig())``."""

    needs: Needs
    """The statistics that calibration must gather."""
    notes: list[str]
    """Deviations from the config, in words for people; the reader of the list empties it."""

    def __init__(self, config: Any) -> None: ...

    def solve(
        self, weights: Weights, stats: Stats | None, global_scales: GlobalScales = NONE
    ) -> dict[LayerPlan, QTensor]:
        """Quantize the finite weights [out, in] of layers that read the same input, each by its plan.

        The weights do not change. ``stats`` is None if calibration saw too little of the input: the solver then uses
        only the weights. ``global_scales`` are those of layers that have one: see ``global_scale``.
        """


class Tuner(Protocol):
    """Improves the codes of all layers of a block together, by the output of the block."""

    notes: list[str]
    """Messages about the result, in words for people; the reader of the list empties it."""

    def __init__(self, config: Any) -> None: ...

    def tune(
        self,
        modules: Mapping[LayerPlan, nn.Module],
        start: Mapping[LayerPlan, QTensor],
        run: Callable[[int], torch.Tensor],
        targets: Sequence[torch.Tensor],
        span: Span,
    ) -> dict[LayerPlan, QTensor]:
        """Return codes and scales at least as good as ``start`` on windows that the search does not see.

        ``run`` returns the block's output for a window with the weights that the modules hold, with gradients;
        ``targets`` are the outputs of the float block; both have this rank's windows of ``span``. The modules are
        unchanged at the end. All ranks call it, and get the same.
        """


def _added() -> Mapping[str, Callable[[Any], Solver]]:
    return creators(SolverConfig)


SOLVERS: Registry[Callable[[Any], Solver]] = Registry("solver", "quantcore.engine.solvers", others=_added)
TUNERS: Registry[type[Tuner]] = Registry("tuner", "quantcore.engine.solvers")
