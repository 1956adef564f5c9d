"""The kernels of GPTQ's loop in Triton's interpreter, bit for bit beside a plain loop in the same order."""

import pytest
import torch

from quantcore.engine.selftest.parts import in_turn
from quantcore.formats import BUILT_IN, CodebookFormat

pytestmark = pytest.mark.usefixtures("interpreter")

FORMATS = [name for name, fmt in BUILT_IN.items() if fmt.scaled and not isinstance(fmt, CodebookFormat)]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def problem(fmt, num_inputs, num_outputs, *, has_zero):
    """Weights, their targets, feedback, groups and parameters; some weights are beyond the format's range."""
    value_KO = normal(num_inputs, num_outputs)
    step_JO = normal(3, num_outputs, seed=1).abs() * 2.5 / fmt.max + 1e-3
    zero_JO = (normal(3, num_outputs, seed=2) * 2 + (fmt.max + fmt.min) / 2).round() if has_zero else None
    feedback_KK = 0.3 * normal(num_inputs, num_inputs, seed=3)
    group_K = torch.arange(num_inputs) * 7 % 3
    return value_KO, value_KO + 0.1 * normal(num_inputs, num_outputs, seed=4), feedback_KK, group_K, step_JO, zero_JO


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(16, 40), (7, 33)])
def test_it_rounds_as_a_plain_loop(name, num_inputs, num_outputs):
    from quantcore.tensors.kernels.columns import round_in_turn
    from quantcore.tensors.kernels.rounding import rounding_of

    fmt = BUILT_IN[name]
    given = problem(fmt, num_inputs, num_outputs, has_zero=fmt.zero_point_ok)
    wanted_KO, lost_KO = in_turn(*given, fmt)
    value_KO, error_KO, feedback_KK, group_K, step_JO, zero_JO = given
    round_in_turn(value_KO, error_KO, feedback_KK, group_K, step_JO, zero_JO, rounding_of(fmt, "half_even"))
    assert torch.equal(value_KO, wanted_KO) and torch.equal(error_KO, lost_KO)
    assert len(value_KO.unique()) > 3
