"""The search for the range of a group of inputs, ``engine.solvers.ranges.search``: one launch for all its candidates.

A program has some outputs and keeps their weights in registers. It tries one candidate after the other, with the
parameters that ``affine.find_params`` gives. Only sums over the inputs are added in another order than torch has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quantcore.formats import FORMATS
from quantcore.formats.floats import FLOAT32_BIAS, FLOAT32_MANTISSA_BITS
from quantcore.tensors.kernels.rounding import Rounding, nearest_bfloat16, rounded, rounding_of

MOST_INPUTS = 128
"""Largest number of inputs of a group: each takes registers."""
OUTPUTS = 32
"""Number of outputs of a program."""
MANTISSA_BITS, MAX_EXPONENT = tl.constexpr(FLOAT32_MANTISSA_BITS), tl.constexpr(2 * FLOAT32_BIAS)
SMALLEST_POWER = tl.constexpr(2.0**-FLOAT32_BIAS)
TINY, TINY_HALF = map(tl.constexpr, (torch.finfo(torch.float32).tiny, torch.finfo(torch.float16).tiny))
"""The smallest normal numbers of float32 and bfloat16, and of float16."""
E4M3 = rounding_of(FORMATS["fp8_e4m3"], "half_even")
assert E4M3 is not None
E4M3_MAX, E4M3_MAGIC, E4M3_BINADE = map(tl.constexpr, (E4M3.HIGH, E4M3.MAGIC, E4M3.LOWEST_BINADE))


class Scales(NamedTuple):
    """The stored type of scales, as a constant of the kernel: a dtype of torch, ``e4m3`` or ``e8m0``.

    For e8m0, ``CARRY`` is that of ``affine.carry_to_power``, and ``EMAX`` that of the weights' format.
    """

    TYPE: str
    CARRY: int = 0
    EMAX: int = 0


@dataclass(frozen=True)
class Search:
    """What stays the same in the searches of a weight's groups: the constants of the kernel, and the candidates.

    ``factors`` are the ``num_first`` of the first round, and then those of the second: see ``engine.solvers.ranges``.
    """

    scales: Scales
    rounding: Rounding
    has_zero: bool
    factors: torch.Tensor
    num_first: int

    def __call__(
        self, weight_SO: torch.Tensor, cost_S: torch.Tensor, global_O: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scale [O], float32, and the zero point [O], int32 or None, whose errors cost least.

        An error e of a weight of input s costs ``cost_S[s]`` e^2. ``weight_SO`` is contiguous along the outputs.
        """
        num_inputs, num_outputs = weight_SO.shape
        scale_O = torch.empty(num_outputs, dtype=torch.float32, device=weight_SO.device)
        zero_O = torch.empty_like(scale_O, dtype=torch.int32) if self.has_zero else None
        globals_, stride = (scale_O, 0) if global_O is None else (global_O, global_O.stride(0))
        _search[(triton.cdiv(num_outputs, OUTPUTS),)](
            weight_SO,
            cost_S,
            globals_,
            self.factors,
            scale_O,
            scale_O if zero_O is None else zero_O,
            num_inputs,
            num_outputs,
            weight_SO.stride(0),
            stride,
            self.num_first,
            len(self.factors),
            HAS_GLOBAL=global_O is not None,
            HAS_ZERO=self.has_zero,
            INPUTS=triton.next_power_of_2(num_inputs),
            OUTPUTS=OUTPUTS,
            **self.scales._asdict(),
            **self.rounding._asdict(),
            num_warps=2,
            enable_fp_fusion=False,
        )
        return scale_O, zero_O


@triton.jit
def _search(
    weight, cost, globals_, factors, scale, zero, num_inputs, num_outputs, weight_stride, global_stride,
    num_first, num_factors, HAS_GLOBAL: tl.constexpr, HAS_ZERO: tl.constexpr, INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr, TYPE: tl.constexpr, CARRY: tl.constexpr, EMAX: tl.constexpr,
    IS_INT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, MAGIC: tl.constexpr, LOWEST_BINADE: tl.constexpr,
):  # fmt: skip
    s_S = tl.arange(0, INPUTS)
    o_O = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output_O = o_O < num_outputs
    is_inside_SO = (s_S < num_inputs)[:, None] & is_output_O[None, :]
    w_SO = tl.load(weight + s_S[:, None] * weight_stride + o_O[None, :], mask=is_inside_SO, other=0.0)
    cost_S1 = tl.load(cost + s_S, mask=s_S < num_inputs, other=0.0)[:, None]
    is_input_S1 = (s_S < num_inputs)[:, None]
    minimum_O = tl.min(tl.where(is_input_S1, w_SO, float("inf")), axis=0)
    maximum_O = tl.max(tl.where(is_input_S1, w_SO, float("-inf")), axis=0)
    unit_O = tl.full((OUTPUTS,), 1.0, tl.float32)
    if HAS_GLOBAL:
        unit_O = tl.load(globals_ + o_O * global_stride, mask=is_output_O, other=1.0)
    best_O, zero_O = _params(minimum_O, maximum_O, unit_O, HAS_ZERO, TYPE, CARRY, EMAX, LOW, HIGH)
    low_O = tl.full((OUTPUTS,), 1.0, tl.float32)
    high_O = tl.full((OUTPUTS,), 1.0, tl.float32)
    error_O = tl.full((OUTPUTS,), float("inf"), tl.float32)
    # Both ends by the factors of the first round. The zero point stays.
    full_O = best_O
    for i in range(num_first):
        factor = tl.load(factors + i)
        if TYPE == "e8m0":
            tried_O, _ = _params(minimum_O * factor, maximum_O * factor, unit_O, HAS_ZERO, TYPE, CARRY, EMAX, LOW, HIGH)
        else:
            tried_O = _stored(full_O * factor, TYPE)
        own_O = _error(w_SO, cost_S1, tried_O * unit_O, zero_O, IS_INT, LOW, HIGH, MAGIC, LOWEST_BINADE)
        is_better_O = own_O < error_O
        error_O, best_O = tl.where(is_better_O, own_O, error_O), tl.where(is_better_O, tried_O, best_O)
        low_O, high_O = tl.where(is_better_O, factor, low_O), tl.where(is_better_O, factor, high_O)
    if HAS_ZERO:
        for end in range(2):
            low_before_O, high_before_O = low_O, high_O
            for i in range(num_first, num_factors):
                factor = tl.load(factors + i)
                own_low_O = low_before_O * tl.where(end == 0, factor, 1.0)
                own_high_O = high_before_O * tl.where(end == 1, factor, 1.0)
                tried_O, own_zero_O = _params(
                    minimum_O * own_low_O, maximum_O * own_high_O, unit_O, HAS_ZERO, TYPE, CARRY, EMAX, LOW, HIGH
                )
                own_O = _error(w_SO, cost_S1, tried_O * unit_O, own_zero_O, IS_INT, LOW, HIGH, MAGIC, LOWEST_BINADE)
                is_better_O = own_O < error_O
                error_O, best_O = tl.where(is_better_O, own_O, error_O), tl.where(is_better_O, tried_O, best_O)
                zero_O = tl.where(is_better_O, own_zero_O, zero_O)
                low_O = tl.where(is_better_O, own_low_O, low_O)
                high_O = tl.where(is_better_O, own_high_O, high_O)
    else:
        before_O = best_O
        for i in range(num_first, num_factors):
            tried_O = _stored(before_O * tl.load(factors + i), TYPE)
            own_O = _error(w_SO, cost_S1, tried_O * unit_O, zero_O, IS_INT, LOW, HIGH, MAGIC, LOWEST_BINADE)
            is_better_O = own_O < error_O
            error_O, best_O = tl.where(is_better_O, own_O, error_O), tl.where(is_better_O, tried_O, best_O)
    if TYPE != "e8m0":  # the least-squares scale for the codes
        x_SO = zero_O[None, :] + tl.div_rn(w_SO, (best_O * unit_O)[None, :])
        code_SO = rounded(x_SO, IS_INT, LOW, HIGH, MAGIC, LOWEST_BINADE) - zero_O[None, :]
        above_O, below_O = tl.sum(code_SO * cost_S1 * w_SO, axis=0), tl.sum(code_SO * cost_S1 * code_SO, axis=0)
        fitted_O = tl.div_rn(tl.div_rn(above_O, tl.where(below_O > 0, below_O, 1.0)), unit_O)
        tried_O = _stored(tl.where((below_O > 0) & (fitted_O > 0), fitted_O, best_O), TYPE)
        own_O = _error(w_SO, cost_S1, tried_O * unit_O, zero_O, IS_INT, LOW, HIGH, MAGIC, LOWEST_BINADE)
        best_O = tl.where(own_O < error_O, tried_O, best_O)
    tl.store(scale + o_O, best_O, mask=is_output_O)
    if HAS_ZERO:
        tl.store(zero + o_O, zero_O.to(tl.int32), mask=is_output_O)


@triton.jit
def _error(
    w_SO,
    cost_S1,
    step_O,
    zero_O,
    IS_INT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MAGIC: tl.constexpr,
    LOWEST_BINADE: tl.constexpr,
):
    """Return the cost of rounding with these parameters, [O]."""
    x_SO = zero_O[None, :] + tl.div_rn(w_SO, step_O[None, :])
    lost_SO = x_SO - rounded(x_SO, IS_INT, LOW, HIGH, MAGIC, LOWEST_BINADE)
    return tl.sum(cost_S1 * (lost_SO * lost_SO), axis=0) * step_O * step_O


@triton.jit
def _params(
    minimum_O,
    maximum_O,
    unit_O,
    HAS_ZERO: tl.constexpr,
    TYPE: tl.constexpr,
    CARRY: tl.constexpr,
    EMAX: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Return scale and zero point [O], a float, of a range: ``affine.find_params``."""
    zero_O = tl.zeros_like(minimum_O)
    if TYPE == "e8m0":
        scale_O = _power_of_two(tl.maximum(maximum_O, -minimum_O), CARRY, EMAX)
    elif HAS_ZERO:
        scale_O, below_O = _asymmetric(tl.minimum(minimum_O, 0.0), tl.maximum(maximum_O, 0.0), HIGH - LOW)
        scale_O, zero_O = _stored(scale_O, TYPE), below_O + LOW
    else:
        scale_O = tl.maximum(tl.div_rn(maximum_O, unit_O * HIGH), tl.div_rn(minimum_O, unit_O * LOW))
        scale_O = _stored(scale_O, TYPE)
    return scale_O, zero_O


@triton.jit
def _asymmetric(minimum_O, maximum_O, NUM_STEPS: tl.constexpr):
    """Return the scale, and the number of codes below zero: ``affine._asymmetric``."""
    scale_O = tl.div_rn(maximum_O / 2 - minimum_O / 2, tl.full(minimum_O.shape, NUM_STEPS / 2, tl.float32))
    real_O = tl.where(scale_O > 0, tl.div_rn(-minimum_O, tl.where(scale_O > 0, scale_O, 1.0)), 0.0)
    return scale_O, rounded(real_O, True, 0.0, NUM_STEPS, 0.0, 0)


@triton.jit
def _power_of_two(largest_O, CARRY: tl.constexpr, EMAX: tl.constexpr):
    """Return the e8m0 scale for this largest magnitude: ``affine._power_of_two``."""
    bits_O = tl.abs(largest_O).to(tl.int32, bitcast=True)
    exponent_O = ((bits_O + CARRY) >> MANTISSA_BITS) - EMAX
    exponent_O = tl.minimum(tl.maximum(exponent_O, 0), MAX_EXPONENT)
    scale_O = (exponent_O << MANTISSA_BITS).to(tl.float32, bitcast=True)
    return tl.where(bits_O == 0, 1.0, tl.where(exponent_O == 0, SMALLEST_POWER, scale_O))


@triton.jit
def _stored(scale_O, TYPE: tl.constexpr):
    """Round scales to their stored type: ``affine.as_stored``."""
    if TYPE == "e4m3":
        scale_O = rounded(scale_O, False, -E4M3_MAX, E4M3_MAX, E4M3_MAGIC, E4M3_BINADE)
        scale_O = tl.where(scale_O == 0, 1.0, scale_O)
    else:
        scale_O = tl.where(scale_O == 0, 1.0, tl.maximum(scale_O, TINY_HALF if TYPE == "float16" else TINY))
        if TYPE == "float16":
            scale_O = scale_O.to(tl.float16).to(tl.float32)
        if TYPE == "bfloat16":
            scale_O = nearest_bfloat16(scale_O)
    return scale_O
