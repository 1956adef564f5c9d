"""Quantized layers of every kind: the numbers, and that the module is otherwise what it was."""

import copy
import io

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from transformers.pytorch_utils import Conv1D

from quantcore import Config, ModelQuantizer, QuantizationConfig, QuantizationSpec

INT8_TENSOR = QuantizationSpec(dtype="int8")
INT8_CHANNEL = QuantizationSpec(dtype="int8", qscheme="per_channel")
INDICES = torch.tensor([[1, 5, 2], [0, 9, 5]])

# name -> (layer, what it is called with, the axes of the stored weight: outputs, inputs)
LAYERS = {
    "linear": (lambda: nn.Linear(16, 12), (torch.randn(4, 16),), (0, 1)),
    "linear without bias": (lambda: nn.Linear(16, 12, bias=False), (torch.randn(2, 3, 16),), (0, 1)),
    "conv1d of gpt-2": (lambda: Conv1D(12, 16), (torch.randn(2, 3, 16),), (1, 0)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2), (torch.randn(2, 4, 9),), (0, 1)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (torch.randn(2, 4, 7, 7),), (0, 1)),
    "reflecting conv2d": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (torch.randn(2, 4, 7, 7),), (0, 1),
    ),
    "grouped conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2), (torch.randn(2, 4, 7, 7),), (0, 1)),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (torch.randn(2, 4, 5, 5), [12, 12]), (1, 0)),
    "embedding": (lambda: nn.Embedding(10, 8, padding_idx=0), (INDICES,), (0, 1)),
    "embedding bag": (lambda: nn.EmbeddingBag(10, 8, mode="sum"), (INDICES, None, torch.rand(2, 3)), (0, 1)),
}  # fmt: skip


def config_for(layer, **specs):
    """Every layer, embeddings too, with these specs."""
    chosen = QuantizationConfig(**specs)
    return Config(global_quant_config=chosen, layer_type_quant_config={"Embedding": chosen, "EmbeddingBag": chosen})


def quantized(layer, batches=(), **specs):
    model = nn.Sequential(layer)
    ModelQuantizer(config_for(layer, **specs)).quantize_model(model, batches)
    return model[0]


def int8_per_channel(weight, axis):
    """Round to nearest with one scale for each index along ``axis``: written down once more, not with our code."""
    others = [i for i in range(weight.ndim) if i != axis]
    scale = torch.maximum(weight.amax(others, keepdim=True) / 127, weight.amin(others, keepdim=True) / -128)
    scale = scale + (scale == 0)  # a padding row of zeros
    return (weight / scale).round().clamp(-128, 127) * scale


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_with_what_its_codes_stand_for(name):
    torch.manual_seed(0)
    make, inputs, (out_axis, _) = LAYERS[name]
    layer = make()
    reference = copy.deepcopy(layer)
    with torch.no_grad():
        reference.weight.copy_(int8_per_channel(reference.weight, out_axis))
    expected = reference(*inputs)
    given = quantized(layer, weight=INT8_CHANNEL)
    assert given is layer and isinstance(layer, type(reference))
    assert torch.equal(layer(*inputs), expected)
    assert not torch.equal(layer._parameters["weight"], reference.weight)
    ModelQuantizer.freeze(layer)
    assert torch.equal(layer._parameters["weight"], reference.weight)
    assert torch.equal(layer(*inputs), expected)


@pytest.mark.parametrize("name", [name for name in LAYERS if "bag" not in name])
def test_groups_run_along_the_inputs(name):
    make, inputs, (_, in_axis) = LAYERS[name]
    layer = make()
    weight = layer.weight.detach().clone()
    quantized(layer, weight=QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=2, symmetric=False))
    pairs = weight.movedim(in_axis, -1).unflatten(-1, (-1, 2))
    restored = layer.weight.detach().movedim(in_axis, -1).unflatten(-1, (-1, 2))
    # One step for two values: neither is further from its code than half of it, and the range holds 0.
    span = pairs.amax(-1).clamp(min=0) - pairs.amin(-1).clamp(max=0)
    assert ((pairs - restored).abs().amax(-1) <= span / 14 / 2 + 1e-7).all()
    assert not torch.equal(pairs, restored)
    assert layer(*inputs).isfinite().all()


def test_grouped_transposed_convolutions_have_their_channels_in_order():
    torch.manual_seed(1)
    layer = nn.ConvTranspose2d(4, 6, 2, groups=2)  # stored as [in, out / groups]: outputs 0-2 from inputs 0-1, ...
    with torch.no_grad():
        layer.weight.mul_(torch.rand(4, 3, 1, 1) * 10)
    parts = [int8_per_channel(layer.weight.detach()[2 * g : 2 * g + 2], 1) for g in range(2)]
    quantized(layer, weight=INT8_CHANNEL)
    assert layer.weight_quantizer.scale.shape == (6, 1)
    assert torch.equal(layer.weight, torch.cat(parts))


ACTIVATIONS = {
    "fp8 static": {"dtype": "fp8_e4m3"},
    "int8 static asymmetric": {"dtype": "int8", "symmetric": False},
    "int8 per token": {"dtype": "int8", "qscheme": "per_channel", "is_dynamic": True},
    "int8 per feature": {"dtype": "int8", "qscheme": "per_channel", "ch_axis": -1},
    "mxfp4": {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "scale_type": "e8m0", "is_dynamic": True},
    "nvfp4": {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "scale_type": "e4m3", "is_dynamic": True},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_inputs_and_outputs_pass_through_their_own_quantizers(name):
    torch.manual_seed(2)
    spec = QuantizationSpec(**ACTIVATIONS[name])
    x = torch.randn(5, 16)
    layer = nn.Linear(16, 16)
    given = quantized(layer, [x], weight=QuantizationSpec(dtype="bfloat16"), input_tensors=spec, output_tensors=spec)
    inside = nn.functional.linear(given.input_quantizer(x), layer._parameters["weight"].bfloat16().float(), layer.bias)
    assert torch.equal(given(x), given.output_quantizer(inside))
    assert 0 < (given.input_quantizer(x) - x).abs().mean() < 0.2
    assert (given.input_quantizer.scale is None) == (name in ("int8 per token", "mxfp4", "bfloat16"))


def test_static_scales_are_those_of_the_calibration_data():
    spec = QuantizationSpec(dtype="fp8_e4m3")
    batches = [torch.tensor([[1.0, -3.5]]), torch.tensor([[0.5, 2.0], [0.25, 1.0]])]
    layer = quantized(nn.Linear(2, 2), batches, weight=INT8_CHANNEL, input_tensors=spec)
    assert layer.input_quantizer.scale.tolist() == [[3.5 / 448]]
    assert layer.input_quantizer(torch.tensor([100.0])).tolist() == [3.5]


def test_biases_are_quantized_when_asked():
    layer = nn.Linear(8, 4)
    expected = int8_per_channel(layer.bias.detach()[None], 0)[0]
    quantized(layer, weight=INT8_CHANNEL, bias=QuantizationSpec(dtype="int8"))
    assert torch.equal(layer.bias, expected)
    ModelQuantizer.freeze(layer)
    assert torch.equal(layer._parameters["bias"], expected)


def test_hooks_stay_and_accelerate_is_told():
    class Count(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Count.calls += 1
            return args, kwargs

    layer = nn.Linear(8, 8)
    seen = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    add_hook_to_module(layer, Count())
    quantized(layer, weight=INT8_CHANNEL, input_tensors=QuantizationSpec(dtype="int8", is_dynamic=True))
    x = torch.randn(3, 8)
    assert torch.equal(layer(x), nn.functional.linear(layer.input_quantizer(x), layer.weight, layer.bias))
    assert (seen, Count.calls) == ([1], 1)


def test_it_can_be_copied_saved_and_loaded():
    spec = QuantizationSpec(dtype="int8", symmetric=False)
    x = torch.randn(3, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    config = config_for(model, weight=INT8_CHANNEL, input_tensors=spec)
    other = copy.deepcopy(model)
    ModelQuantizer(config).quantize_model(model, [x])
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)
    ModelQuantizer(config).quantize_model(other, [2 * x])
    assert not torch.equal(other(x), expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), expected)


def test_scales_keep_their_precision_when_the_model_is_cast():
    layer = quantized(nn.Linear(16, 4), [torch.randn(9, 16)], weight=INT8_CHANNEL, input_tensors=INT8_TENSOR)
    scales = layer.weight_quantizer.scale.clone(), layer.input_quantizer.scale.clone()
    layer.to(torch.bfloat16)
    assert layer._parameters["weight"].dtype == torch.bfloat16
    assert torch.equal(layer.weight_quantizer.scale, scales[0]) and torch.equal(layer.input_quantizer.scale, scales[1])
    assert layer(torch.randn(2, 16).bfloat16()).dtype == torch.bfloat16
    assert layer.to("meta").weight_quantizer.scale.is_meta


def test_a_subclass_does_with_its_weight_what_it_did():
    class Doubled(nn.Embedding):
        def forward(self, ids):
            return 2 * super().forward(ids)

    layer = Doubled(10, 8)
    expected = 2 * int8_per_channel(layer.weight.detach(), 0)[INDICES]
    assert torch.equal(quantized(layer, weight=INT8_CHANNEL)(INDICES), expected)


def test_a_frozen_layer_compiles_into_one_graph():
    x = torch.randn(4, 16)
    layer = quantized(nn.Linear(16, 8), [x], weight=INT8_CHANNEL, input_tensors=INT8_TENSOR)
    ModelQuantizer.freeze(layer)
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))
