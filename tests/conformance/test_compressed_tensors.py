"""What we write is what compressed-tensors itself writes, and it reads our weights from it to the last bit."""

from functools import cache

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig as ForeignConfig
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.config.spec import ScaleType
from quantcore.export import EXPORTERS
from quantcore.export.exporter import stored_scale_dtype
from quantcore.tensors import affine
from quantcore.tensors.source import TORCH_DTYPES
from tests.support.exporting import CONFIGS, accepting
from tests.support.params import with_rare

EXPORTER = EXPORTERS.get("compressed_tensors")
CONFIG_NAMES = [
    name
    for name, config in CONFIGS.items()
    if EXPORTER.refuse(LayerPlan("model.layers.0.self_attn.k_proj", 0, (128, 256), config)) is None
]
SMALL = torch.tensor(1e-30)


@cache
def all_layers():
    return list(accepting("compressed_tensors"))


def layers_of(name):
    """(layer, its quantized weight) for every shape that the exporter takes."""
    return [(layer, quantized) for found, layer, quantized in all_layers() if found == name]


def stored_tensors(layer, quantized, model_dtype):
    layout = EXPORTER.layout(layer, model_dtype)
    parts = EXPORTER.encode(layer, quantized, model_dtype)
    return {part: tensor.to(TORCH_DTYPES[layout[part].dtype]).contiguous() for part, tensor in parts.items()}


def scheme_of(layer):
    config = EXPORTER.quantization_config(Config(global_quant_config=layer.config), (layer,), ("lm_head",))
    return ForeignConfig.model_validate(config).config_groups["group_0"]


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_the_same_tensors_as_its_own_compressor(name):
    """Key by key, dtype by dtype, value by value, from our weight and our scales."""
    for layer, quantized in layers_of(name):
        scheme = scheme_of(layer)
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        stored = {part: x for part, x in stored_tensors(layer, quantized, "BF16").items() if part[:3] != "../"}
        assert set(compressor.compression_param_names(scheme)) <= stored.keys()
        theirs = compressor.compress(uncompressed(layer, quantized, stored), scheme)
        assert theirs.keys() == stored.keys()
        for part, tensor in theirs.items():
            assert (tensor.dtype, tensor.shape) == (stored[part].dtype, stored[part].shape), part
            ours, tensor = (x.view(torch.uint8) if x.itemsize == 1 else x for x in (stored[part], tensor))
            assert torch.equal(ours, tensor), part


def uncompressed(layer, quantized, stored):
    """What its modules hold before they are compressed: float scales, zero points from the lowest signed code."""
    weight, params, fmt = quantized.weight.dequantize(), quantized.weight.params, layer.weight.format
    given = {part: x for part, x in stored.items() if part.startswith(("input_", "weight_global"))}
    given["weight"] = torch.where(weight == 0, torch.copysign(SMALL, weight), weight)  # it forgets the sign of -0
    has_own_type = layer.weight.scale_type in (ScaleType.e8m0, ScaleType.e4m3)
    given["weight_scale"] = params.scale if has_own_type else stored["weight_scale"]
    if params.zero_point is not None:
        given["weight_zero_point"] = (params.zero_point - int(fmt.min) - (1 << (fmt.bits - 1))).to(torch.int8)
    return given


@pytest.mark.parametrize("model_dtype", with_rare(["BF16", "F32"], ["F32"]))
@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_its_decompressor_reads_our_weight(name, model_dtype):
    """In the dtype that it computes in: that of ordinary scales; bfloat16 for blocks."""
    for layer, quantized in layers_of(name):
        scheme, scale_type = scheme_of(layer), layer.weight.scale_type
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        found = compressor.decompress(stored_tensors(layer, quantized, model_dtype), scheme)["weight"]
        is_block = scale_type in (ScaleType.e8m0, ScaleType.e4m3)
        stored = "BF16" if is_block else stored_scale_dtype(layer.weight, model_dtype)
        assert found.dtype == TORCH_DTYPES[stored]
        ours = quantized.weight.dequantize()
        if scale_type is ScaleType.e4m3:
            # It divides by the reciprocal that it stores: one unit in the last place of float32 before it rounds.
            near = torch.stack([ours.nextafter(ours * factor) for factor in (0, 1, 2)]).to(found.dtype)
            assert (found == near).any(0).all()
        else:
            assert torch.equal(found, ours.to(found.dtype))


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_it_would_take_the_format_that_we_name(name):
    layer, _ = layers_of(name)[-1]
    scheme = scheme_of(layer)
    ours, scheme.format = scheme.format, None
    # fp8 without quantized inputs: two names for one layout, of which vLLM reads the one with "float" alone.
    is_weight_only_fp8 = ours == "float-quantized" and layer.input_tensors is None
    assert infer_module_format(torch.nn.Linear, scheme).value == ("naive-quantized" if is_weight_only_fp8 else ours)


OWN_NAMES = {
    "nvfp4": "NVFP4", "nvfp4_weight_only": "NVFP4A16", "mxfp4": "MXFP4", "mxfp4_weight_only": "MXFP4A16",
    "mxfp8": "MXFP8", "mxfp8_weight_only": "MXFP8A16", "fp8_block": "FP8_BLOCK", "fp8_dynamic": "FP8_DYNAMIC",
    "fp8": "FP8",
}  # fmt: skip


@pytest.mark.parametrize("name", list(OWN_NAMES))
def test_config_json_says_what_its_own_scheme_of_that_name_says(name):
    layer, _ = layers_of(name)[-1]
    ours, theirs = scheme_of(layer), preset_name_to_scheme(OWN_NAMES[name], ["Linear"])
    how_scales_were_found = {"observer", "zp_dtype"}
    for ours_of, theirs_of in ((ours.weights, theirs.weights), (ours.input_activations, theirs.input_activations)):
        assert (ours_of is None) == (theirs_of is None)
        if ours_of is not None:
            own, foreign = (args.model_dump(exclude=how_scales_were_found) for args in (ours_of, theirs_of))
            assert own == foreign


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp6_e2m3", "fp8_block", "fp8_dynamic", "int8_dynamic"])
def test_it_quantizes_inputs_at_run_time_as_we_measured_them(name):
    """From what config.json says and, for NVFP4, the stored global scale; in float32, where we round alike.

    Not MXFP8, whose inputs it rounds to the next power of two where we clip up to a ninth.
    """
    spec = CONFIGS[name].input_tensors
    layer = LayerPlan("model.layers.0.self_attn.k_proj", 0, (128, 256), CONFIGS[name])
    args = scheme_of(layer).input_activations
    x_TI = torch.randn(64, 256)
    x_TI[3, 5] = 60
    static = stored = None
    if spec.scale_type is ScaleType.e4m3:
        static = affine.static_params(affine.find_params(x_TI.amin()[None, None], x_TI.amax()[None, None], spec,
                                                         torch.float32), spec)  # fmt: skip
        stored = 1 / static.scale.reshape(1)
    scale, zero_point = compute_dynamic_scales_and_zp(x_TI[None], args, None, stored)
    theirs = fake_quantize(x_TI[None], scale, None if spec.symmetric else zero_point, args, stored)[0]
    ours = affine.fake_quantize_activation(x_TI, spec, static)
    if static is None:
        assert torch.equal(ours, theirs)
    else:  # half-way values and e4m3 scales may fall to the other side of a quotient's rounding
        assert torch.isclose(ours, theirs, rtol=2.0**-22, atol=0).float().mean() > 0.999


def test_a_reciprocal_of_the_global_scale_loses_nothing_that_matters():
    """All significands that the global scale of NVFP4 and the scales below it can have.

    The stored reciprocal gives our number back. A consumer that divides a scale by it instead of multiplying with ours
    is at most one unit in the last place away.
    """
    significand = torch.arange(127 << 23, 128 << 23, 5, dtype=torch.int32).view(torch.float32)
    one = torch.ones_like(significand)
    ours = one / (one / significand)
    stored = one / ours
    assert torch.equal(one / stored, ours)
    assert ((ours.view(torch.int32) - significand.view(torch.int32)).abs() <= 1).all()
    assert not torch.equal(ours, significand)  # the rule is needed
    for scale in (1, 3, 5, 7, 9, 11, 13, 15):
        apart = (scale * ours).view(torch.int32) - (one * scale / stored).view(torch.int32)
        assert (apart.abs() <= 1).all()


@pytest.mark.parametrize("exponent", [-130, -60, -1, 0, 60, 126])
def test_every_global_scale_of_ours_comes_back(exponent):
    spec = CONFIGS["nvfp4"].weight
    for peak in torch.ldexp(1 + torch.rand(200), torch.tensor(exponent)):
        ours = affine.find_params(-peak.reshape(1, 1), peak.reshape(1, 1), spec, torch.bfloat16).global_scale
        assert 1 / (1 / ours.reshape(1)) == ours
