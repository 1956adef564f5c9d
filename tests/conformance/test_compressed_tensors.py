"""What we write is what compressed-tensors itself writes, and it reads our weights from it to the last bit."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig as ForeignConfig

from quantcore import affine
from quantcore.checkpoint.source import TORCH_DTYPES
from quantcore.config import Config
from quantcore.export import EXPORTERS
from quantcore.spec import ScaleType
from tests.conformance.test_exporters import CONFIGS, accepting

EXPORTER = EXPORTERS.get("compressed_tensors")
CASES = [(name, layer, quantized) for name, layer, quantized in accepting("compressed_tensors")]
IDS = [f"{name}-{layer.out_features}x{layer.in_features}" for name, layer, _ in CASES]
SMALL = torch.tensor(1e-30)


def stored_tensors(layer, quantized, model_dtype):
    layout = EXPORTER.layout(layer, model_dtype)
    parts = EXPORTER.encode(layer, quantized, model_dtype)
    return {part: tensor.to(TORCH_DTYPES[layout[part].dtype]).contiguous() for part, tensor in parts.items()}


def scheme_of(layer):
    config = EXPORTER.quantization_config(Config(global_quant_config=layer.config), (layer,), ("lm_head",))
    return ForeignConfig.model_validate(config).config_groups["group_0"]


@pytest.mark.parametrize(("name", "layer", "quantized"), CASES, ids=IDS)
def test_the_same_tensors_as_its_own_compressor(name, layer, quantized):
    """Key by key, dtype by dtype, value by value, from our weight and our scales."""
    scheme = scheme_of(layer)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    stored = {part: x for part, x in stored_tensors(layer, quantized, "BF16").items() if not part.startswith("../")}
    assert set(compressor.compression_param_names(scheme)) <= stored.keys() | {"weight"}
    params = quantized.weight.params
    scale = stored["weight_scale"]
    given = {part: x for part, x in stored.items() if part.startswith(("input_", "weight_global"))}
    # What its modules hold before they are compressed: float scales, zero points from the lowest signed code.
    given["weight_scale"] = scale if scale.is_floating_point() and scale.itemsize > 1 else params.scale
    if params.zero_point is not None:
        fmt = layer.weight.format
        given["weight_zero_point"] = (params.zero_point - int(fmt.min) - (1 << (fmt.bits - 1))).to(torch.int8)
    weight = quantized.weight.dequantize()
    given["weight"] = torch.where(weight == 0, torch.copysign(SMALL, weight), weight)  # it forgets the sign of -0
    theirs = compressor.compress(given, scheme)
    assert theirs.keys() == stored.keys()
    for part, tensor in theirs.items():
        assert (tensor.dtype, tensor.shape) == (stored[part].dtype, stored[part].shape), part
        ours, tensor = (x.view(torch.uint8) if x.itemsize == 1 else x for x in (stored[part], tensor))
        assert torch.equal(ours, tensor), part


@pytest.mark.parametrize("model_dtype", ["BF16", "F32"])
@pytest.mark.parametrize(("name", "layer", "quantized"), CASES, ids=IDS)
def test_its_decompressor_reads_our_weight(name, layer, quantized, model_dtype):
    """In the dtype that it computes in: that of ordinary scales; bfloat16 for blocks."""
    scheme = scheme_of(layer)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    found = compressor.decompress(stored_tensors(layer, quantized, model_dtype), scheme)["weight"]
    has_own_type = layer.weight.scale_type in (ScaleType.e8m0, ScaleType.e4m3)
    is_wide = model_dtype == "F32" or layer.weight.scale_type is ScaleType.float32
    assert found.dtype == (torch.float32 if is_wide and not has_own_type else torch.bfloat16)
    ours = quantized.weight.dequantize()
    if layer.weight.scale_type is ScaleType.e4m3:
        # It divides by the reciprocal that it stores: one unit in the last place of float32 before it rounds.
        one_away = torch.stack([ours.nextafter(ours * factor) for factor in (0, 1, 2)]).to(found.dtype)
        assert (found == one_away).any(0).all()
    else:
        assert torch.equal(found, ours.to(found.dtype))


@pytest.mark.parametrize(("name", "layer", "quantized"), CASES, ids=IDS)
def test_it_would_take_the_format_that_we_name(name, layer, quantized):
    scheme = scheme_of(layer)
    ours, scheme.format = scheme.format, None
    theirs = infer_module_format(torch.nn.Linear, scheme).value
    # fp8 without quantized inputs: one compressor under two names, of which vLLM and Transformers read both.
    is_weight_only_fp8 = ours == "float-quantized" and layer.input_tensors is None
    assert theirs == ("naive-quantized" if is_weight_only_fp8 else ours)


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


def test_packed_fp4_has_the_first_code_in_the_low_bits():
    _, layer, quantized = next(case for case in CASES if case[0] == "mxfp4_weight_only")
    packed = stored_tensors(layer, quantized, "BF16")["weight_packed"]
    levels = unpack_fp4_from_uint8(packed, layer.out_features, layer.in_features, torch.float32)
    assert torch.equal(levels, quantized.weight.spec.format.decode(quantized.weight.codes))
