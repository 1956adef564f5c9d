"""The innermost loop of ``columns`` for accelerators, compiled by torch.compile to one kernel for several inputs.

There every operation on a few thousand numbers is a launch that takes longer than its work (on GPUs the kernel is
Triton's). Compiling takes half a minute on an H100, so it is done once for any number of outputs; a test compiles it
for the CPU. If it cannot be compiled, the loop runs operation by operation, as on CPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch

from quantcore.solvers.groups import GroupParams

if TYPE_CHECKING:
    from quantcore.solvers.columns import Grid

logger = logging.getLogger("quantcore")

Pair = tuple[torch.Tensor, torch.Tensor]
_works = True


def pays(device: torch.device) -> bool:
    return device.type != "cpu"


def round_in_turn(
    grid: Grid, value_KO: torch.Tensor, error_KO: torch.Tensor, error_feedback_KK: torch.Tensor, params: GroupParams
) -> Pair | None:
    """Round ``value_KO`` input by input, each moved first by error_feedback[k, l] * error[l] of all l < k.

    Returns the rounded values and their errors; None if it cannot be compiled. ``params`` are [K, O].
    """
    global _works
    if not _works:
        return None
    try:
        return _compiled()(grid, value_KO, error_KO, error_feedback_KK, params)
    except torch._dynamo.exc.TorchDynamoException as error:
        logger.warning("The inner loop of GPTQ cannot be compiled (%s): it is slower.", type(error).__name__)
        _works = False
        return None


@cache
def _compiled() -> Callable[..., Pair]:
    """Compile the loop when it is first needed: the compiler takes seconds to load."""
    return torch.compile(_one_by_one, dynamic=True)


def _one_by_one(
    grid: Grid, value_KO: torch.Tensor, error_KO: torch.Tensor, error_feedback_KK: torch.Tensor, params: GroupParams
) -> Pair:
    values: list[torch.Tensor] = []
    errors: list[torch.Tensor] = []
    for k in range(len(value_KO)):
        value_O, own = value_KO[k].clone(), params.at(k)
        for before, error_O in enumerate(errors):
            value_O = value_O + error_feedback_KK[k, before] * error_O
        values.append(grid.round_(value_O, own))
        errors.append(grid.subtract_(error_KO[k].clone(), values[k], own))
    return torch.stack(values), torch.stack(errors)
