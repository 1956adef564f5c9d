"""The loop of GPTQ over the inputs of a group: one launch for all of them.

A program has some outputs and keeps their weights for all inputs in registers. Errors are added in the order of the
inputs, product by product, so a result does not depend on how many outputs a program has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantcore.tensors.kernels.rounding import Rounding, rounded

OUTPUTS = 32
"""Number of outputs of a program, which is one warp."""


def round_in_turn(
    value_KO: torch.Tensor,
    error_KO: torch.Tensor,
    feedback_KK: torch.Tensor,
    group_K: torch.Tensor,
    step_JO: torch.Tensor,
    zero_JO: torch.Tensor | None,
    rounding: Rounding,
) -> None:
    """Round ``value_KO`` in place, input by input, each moved first by feedback[k, l] * error[l] of all l < k.

    ``error_KO`` holds the weights to reach, and then what they lost. ``group_K`` is the row of the parameters
    ``step_JO`` and ``zero_JO`` of each input. All are float32 or indices, and contiguous along the outputs. Each input
    takes a register, so 64 of them are many.
    """
    num_inputs, num_outputs = value_KO.shape
    zeros = step_JO if zero_JO is None else zero_JO
    _round_in_turn[(triton.cdiv(num_outputs, OUTPUTS),)](
        value_KO,
        error_KO,
        feedback_KK,
        group_K,
        step_JO,
        zeros,
        num_inputs,
        num_outputs,
        value_KO.stride(0),
        error_KO.stride(0),
        feedback_KK.stride(0),
        step_JO.stride(0),
        zeros.stride(0),
        HAS_ZERO=zero_JO is not None,
        INPUTS=triton.next_power_of_2(num_inputs),
        OUTPUTS=OUTPUTS,
        **rounding._asdict(),
        num_warps=1,
        enable_fp_fusion=False,
    )


@triton.jit
def _round_in_turn(
    value,
    error,
    feedback,
    group,
    step,
    zero,
    num_inputs,
    num_outputs,
    value_stride,
    error_stride,
    feedback_stride,
    step_stride,
    zero_stride,
    HAS_ZERO: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    IS_INT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MAGIC: tl.constexpr,
    LOWEST_BINADE: tl.constexpr,
):
    k_K = tl.arange(0, INPUTS)
    o_O = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output_O = o_O < num_outputs
    is_inside_KO = (k_K < num_inputs)[:, None] & is_output_O[None, :]
    moved_KO = tl.load(value + k_K[:, None] * value_stride + o_O[None, :], mask=is_inside_KO, other=0.0)
    for k in range(num_inputs):
        j = tl.load(group + k)
        step_O = tl.load(step + j * step_stride + o_O, mask=is_output_O, other=1.0)
        x_O = tl.div_rn(tl.sum(tl.where(k_K[:, None] == k, moved_KO, 0.0), axis=0), step_O)
        if HAS_ZERO:
            zero_O = tl.load(zero + j * zero_stride + o_O, mask=is_output_O, other=0.0)
            x_O = zero_O + x_O
        value_O = rounded(x_O, IS_INT, LOW, HIGH, MAGIC, LOWEST_BINADE)
        tl.store(value + k * value_stride + o_O, value_O, mask=is_output_O)
        if HAS_ZERO:
            value_O -= zero_O
        error_O = tl.load(error + k * error_stride + o_O, mask=is_output_O, other=0.0) - value_O * step_O
        tl.store(error + k * error_stride + o_O, error_O, mask=is_output_O)
        is_later_K = (k_K > k) & (k_K < num_inputs)
        feedback_K = tl.load(feedback + k_K * feedback_stride + k, mask=is_later_K, other=0.0)
        moved_KO += feedback_K[:, None] * error_O[None, :]
