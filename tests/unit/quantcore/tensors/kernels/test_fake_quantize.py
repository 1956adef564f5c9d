"""The kernel that rounds numbers with known scales, in Triton's interpreter, bit for bit beside torch."""

import pytest
import torch

from quantcore.config import presets
from quantcore.engine.selftest.parts import ACTIVATIONS
from quantcore.tensors import affine
from quantcore.tensors.kernels import switch

pytestmark = pytest.mark.usefixtures("interpreter")
CPU = torch.device("cpu")
INPUTS = [((1, 128), torch.float32), ((1, 37, 512), torch.bfloat16), ((3, 150, 256), torch.float16)]


@pytest.fixture
def kernels(monkeypatch):
    """Kernels on the CPU, as if it was a GPU, counted."""
    from quantcore.tensors.kernels import fake_quantize

    calls = []

    def counted(*given):
        calls.append(given)
        return there_and_back(*given)

    there_and_back = fake_quantize.there_and_back
    monkeypatch.setattr(fake_quantize, "there_and_back", counted)

    def switched(on):
        monkeypatch.setattr(switch, "are_used_on", lambda device: on)
        return calls

    return switched


@pytest.mark.parametrize(("shape", "dtype"), INPUTS)
@pytest.mark.parametrize("preset", ACTIVATIONS)
def test_an_activation_has_the_bits_that_torch_gives(preset, shape, dtype, kernels):
    spec = presets.PRESETS[preset].layer_config.input_tensors
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 4
    x = x.to(dtype)
    x.view(-1)[:4] = torch.tensor([0.0, -0.0, 300.0, -0.001])
    kernels(on=False)
    expected = affine.fake_quantize_activation(x, spec, None)
    calls = kernels(on=True)
    found = affine.fake_quantize_activation(x, spec, None)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert found.dtype == dtype and torch.equal(found.view(bits), expected.view(bits)) and calls
    assert not torch.equal(found, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_nan(dtype, kernels):
    spec = presets.PRESETS["int8_dynamic"].layer_config.input_tensors
    x = torch.ones(2, 64, dtype=dtype)
    x[0, 3] = torch.nan
    kernels(on=True)
    assert affine.fake_quantize_activation(x, spec, None)[0].isnan().all()


def test_gradients_take_the_plain_path(kernels):
    spec = presets.PRESETS["int8_dynamic"].layer_config.input_tensors
    calls = kernels(on=True)
    x = torch.randn(2, 64, requires_grad=True)
    affine.fake_quantize_activation(x, spec, None).sum().backward()
    assert not calls


@pytest.mark.parametrize("preset", ["fp8", "int8_static"])
def test_an_activation_with_a_calibrated_scale(preset, kernels):
    spec = presets.PRESETS[preset].layer_config.input_tensors
    x = torch.randn(2, 50, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    static = affine.find_params(x.amin()[None, None], x.amax()[None, None] / 2, spec, torch.float32)
    kernels(on=False)
    expected = affine.fake_quantize_activation(x, spec, static)
    calls = kernels(on=True)
    assert torch.equal(affine.fake_quantize_activation(x, spec, static), expected) and calls
