"""Measures how fast a device does the work of a job, compared with the speeds that ``bitfoundry plan`` assumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from quantcore.config import presets
from quantcore.config.algorithms import GPTQConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.calibration.reduction import Sums
from quantcore.engine.calibration.stats import Needs
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.engine.solvers import SOLVERS
from quantcore.plan.capacity import FLOAT_PASSES, GRAM_SHARE
from quantcore.plan.hardware import DEVICE, HOST
from quantcore.plan.workload import KERNEL_INPUTS, solving_flops
from quantcore.tensors.hashing import Hashing

ON_DEVICE, ON_CPU = (4096, 16384), (512, 1024)
"""Inputs and outputs of a layer, and tokens: large enough for a device, and a second's work for a CPU."""


@dataclass(frozen=True)
class Work:
    """A piece of work of ``amount`` (FLOP or bytes), and the seconds that a plan has for it.

    ``run`` does it, and may be run several times.
    """

    name: str
    amount: float
    unit: Literal["FLOP", "B"]
    planned_s: float
    run: Callable[[], object]


def work_on(device: torch.device, num_threads: int) -> Iterator[Work]:
    """Yield the operations whose speed determines how long a job takes on ``device``."""
    is_cpu = device.type == "cpu"
    speeds, (width, num_tokens) = (HOST, ON_CPU) if is_cpu else (DEVICE, ON_DEVICE)
    shape = (width, width)
    x_TI = torch.ones(num_tokens, width, dtype=torch.bfloat16, device=device).normal_()
    weight_OI = torch.ones(shape, dtype=torch.bfloat16, device=device).normal_()

    def multiply() -> None:
        with matmul_precision(device):
            functional.linear(x_TI, weight_OI)

    flops = 2.0 * num_tokens * width**2
    yield Work("products of the model", flops, "FLOP", flops / speeds.products, multiply)
    sums, weight_T = Sums(width, Needs(gram=True), device), torch.ones(num_tokens, device=device)
    flops *= GRAM_SHARE
    yield Work("statistics", flops, "FLOP", flops / speeds.grams, lambda: sums.add(x_TI, None, weight_T, 0, 1))
    layer = LayerPlan("layer", 0, shape, presets.PRESETS["w4a16"].layer_config)
    flops = sum(solving_flops(width, width))
    planned_s = flops / speeds.solving + width / KERNEL_INPUTS * speeds.step_s
    planned_s += FLOAT_PASSES * 4 * width**2 / speeds.rounding
    config = GPTQConfig()
    solver, stats, weights = SOLVERS.get(config.name)(config), sums.stats(), {layer: weight_OI.float()}
    yield Work("GPTQ", flops, "FLOP", planned_s, lambda: solver.solve(weights, stats))
    here = torch.zeros(shape, dtype=torch.bfloat16)
    if not is_cpu:
        pinned = here.pin_memory()
        yield Work(
            "copies to the device",
            here.nbytes,
            "B",
            here.nbytes / speeds.link,
            lambda: pinned.to(device, non_blocking=True),
        )

    def digest() -> None:
        hashing = Hashing(1 if is_cpu else num_threads)
        hashing.add({}, "weight", weight_OI)
        hashing.settle()

    yield Work("digests", here.nbytes, "B", here.nbytes / speeds.hashing, digest)
