"""The kernel that searches the range of a group, in Triton's interpreter, beside the search of torch."""

import pytest
import torch

from quantcore.config import presets
from quantcore.config.algorithms import config_of
from quantcore.config.spec import ScaleType
from quantcore.engine.selftest.parts import solved
from quantcore.engine.solvers import gptq, ranges
from quantcore.tensors.affine import QParams
from quantcore.tensors.kernels import switch

pytestmark = pytest.mark.usefixtures("interpreter")
CPU = torch.device("cpu")
SEARCHED = ["w4a16", "w4a16_sym", "w3a16", "w2a16_sym", "int8", "fp8", "mxfp4", "mxint8", "nvfp4"]
LEFT_TO_TORCH = ["nf4", "gguf_iq4_nl", "gguf_q4_1", "gguf_q4_k", "int4_fp8"]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Kernels on the CPU, as if it was a GPU."""
    monkeypatch.setattr(switch, "are_used_on", lambda device: True)


def weight_of(preset):
    return presets.PRESETS[preset].layer_config.weight


def problem(spec, num_inputs):
    """Weights of 70 outputs, some at the edges, the cost of their errors, and global scales if the spec has one."""
    generator = torch.Generator().manual_seed(0)
    weight_SO = torch.randn(num_inputs, 70, generator=generator) * 0.02
    weight_SO[:, :3] = 0
    weight_SO[:, 3], weight_SO[:, 4] = weight_SO[:, 3].abs(), -weight_SO[:, 4].abs()
    weight_SO[0, 5] = 1.0
    weight_SO[:, 6] *= 1e-20
    global_O = torch.tensor(5e-5).expand(70) if spec.scale_type is ScaleType.e4m3 else None
    return weight_SO, torch.rand(num_inputs, generator=generator) + 0.1, global_O


def cost(spec, given, scale_O, zero_O):
    """Return what the errors of each output cost [O], in float64."""
    weight_SO, cost_S, global_O = given
    params = QParams(scale_O, zero_O, global_O)
    step_O, zero_O = params.step.double(), params.zero_point_or_zeros
    codes_SO = spec.format.round((weight_SO / step_O + zero_O).float())
    return ((codes_SO - zero_O) * step_O - weight_SO).square().mul(cost_S[:, None]).sum(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("preset", SEARCHED)
def test_it_finds_what_torch_finds(preset, dtype):
    spec = weight_of(preset)
    num_inputs = spec.group_size or 100
    given = problem(spec, num_inputs)
    kernel = ranges.kernel_for(spec, dtype, num_inputs, CPU)
    scale_O, zero_O = kernel(*given)
    expected_O, expected_zero_O = gptq._searched(spec, dtype, *given)
    differs_O = scale_O != expected_O
    if zero_O is not None or expected_zero_O is not None:
        differs_O |= zero_O != expected_zero_O
    assert differs_O.sum() <= 1, "processors sum up in different orders, which decides between equally good ranges"
    costs = [cost(spec, given, *found)[differs_O] for found in ((scale_O, zero_O), (expected_O, expected_zero_O))]
    torch.testing.assert_close(*costs, rtol=1e-6, atol=0)
    full = ranges.FullRange(given[0].amin(0), given[0].amax(0), spec, dtype, given[2]).params()
    assert not torch.equal(scale_O, full.scale), "nothing was better than the full range"


@pytest.mark.parametrize("preset", ["w4a16", "w4a16_sym", "fp8"])
def test_scales_in_float32_differ_by_the_rounding_of_sums(preset):
    spec = weight_of(preset)
    given = problem(spec, 64)
    scale_O, zero_O = ranges.kernel_for(spec, torch.float32, 64, CPU)(*given)
    expected_O, expected_zero_O = gptq._searched(spec, torch.float32, *given)
    torch.testing.assert_close(scale_O, expected_O, rtol=1e-4, atol=0)
    assert zero_O is None or torch.equal(zero_O, expected_zero_O)


def test_a_part_of_the_rows_of_a_larger_tensor():
    spec = weight_of("w4a16")
    weight_SO, cost_S, _ = problem(spec, 64)
    larger_KO = torch.zeros(100, 70)
    larger_KO[20:84] = weight_SO
    kernel = ranges.kernel_for(spec, torch.bfloat16, 64, CPU)
    for one, other in zip(kernel(larger_KO[20:84], cost_S, None), kernel(weight_SO, cost_S, None), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("preset", LEFT_TO_TORCH)
def test_what_it_cannot_search_is_left_to_torch(preset):
    assert ranges.kernel_for(weight_of(preset), torch.bfloat16, 32, CPU) is None


def test_large_groups_are_left_to_torch():
    assert ranges.kernel_for(weight_of("w4a16"), torch.bfloat16, 256, CPU) is None


def test_without_kernels_torch_searches(monkeypatch):
    monkeypatch.setattr(switch, "are_used_on", lambda device: False)
    assert ranges.kernel_for(weight_of("w4a16"), torch.bfloat16, 64, CPU) is None


@pytest.mark.parametrize(
    "preset", ["w4a16", pytest.param("mxfp4", marks=pytest.mark.slow), pytest.param("nvfp4", marks=pytest.mark.slow)]
)
def test_gptq_loses_as_much_with_kernels(preset, monkeypatch):
    with_kernels = solved(preset, config_of("gptq"), CPU)
    monkeypatch.setattr(switch, "are_used_on", lambda device: False)
    without = solved(preset, config_of("gptq"), CPU)
    assert (with_kernels.codes != without.codes).float().mean() < 0.02
    torch.testing.assert_close(with_kernels.numbers, without.numbers, rtol=0.01, atol=0)
