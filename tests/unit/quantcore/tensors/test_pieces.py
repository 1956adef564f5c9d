"""A tensor that is worked on in pieces gives what it gives in one go, whatever its groups."""

from dataclasses import replace

import pytest
import torch

from quantcore.config.grouping import Grouping, activation_grouping, weight_grouping
from quantcore.config.presets import PRESETS
from quantcore.config.quantization import QuantizationSpec
from quantcore.tensors import affine
from quantcore.tensors.affine import QParams, fake_quantize, fake_quantize_activation, find_params, min_max
from quantcore.tensors.qtensor import quantize_weight
from tests.support.params import with_usual

SPECS = {name: preset.layer_config.weight for name, preset in PRESETS.items()} | {
    "int8_asym": QuantizationSpec(dtype="int8", qscheme="per_channel", symmetric=False),
    "uint8_float_zero": QuantizationSpec(dtype="uint8", symmetric=False, zero_point_type="float32"),
    "down": QuantizationSpec(dtype="int4", qscheme="per_group", group_size=64, ch_axis=0),
}


@pytest.mark.parametrize("name", with_usual(SPECS, {spec: name for name, spec in reversed(SPECS.items())}.values()))
def test_the_size_of_the_pieces_does_not_matter(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    spec = SPECS[name]
    weight = torch.randn(128, 256).bfloat16()
    grouping = weight_grouping(spec)
    params = find_params(*min_max(grouping.split(weight)), spec, torch.bfloat16)
    whole = quantize_weight(weight, params, spec)
    restored, faked = whole.dequantize(), fake_quantize(weight, spec, grouping, params)
    assert weight.numel() <= affine.CACHED_VALUES
    for piece in (64, 1000, 4096):
        monkeypatch.setattr(affine, "CACHED_VALUES", piece)
        cut = quantize_weight(weight, params, spec)
        assert torch.equal(cut.codes.view(torch.uint8), whole.codes.view(torch.uint8)), piece
        assert torch.equal(replace(whole).dequantize(), restored), piece
        assert torch.equal(fake_quantize(weight, spec, grouping, params), faked), piece


DYNAMIC = {
    name: spec
    for name, preset in PRESETS.items()
    if (spec := preset.layer_config.input_tensors) is not None and spec.is_dynamic and spec.outlier_threshold is None
}


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dynamic_scales_are_those_of_the_whole(monkeypatch, name, dtype):
    spec = DYNAMIC[name]
    x = (torch.randn(3, 16, 256) * torch.logspace(-2, 2, 16).unsqueeze(1)).to(dtype)
    grouping = activation_grouping(spec)
    params = find_params(*torch.aminmax(grouping.split(x.float()), dim=-1), spec, torch.float32)
    expected = fake_quantize(x, spec, grouping, params)
    for piece in (affine.CACHED_VALUES, 1024, 256, 100):
        monkeypatch.setattr(affine, "CACHED_VALUES", piece)
        assert torch.equal(fake_quantize_activation(x, spec, None), expected)


def test_the_input_is_never_written_to():
    x = torch.randn(4, 64)
    before = x.clone()
    params = QParams(torch.full((1, 1), 0.1))
    fake_quantize(x, QuantizationSpec(dtype="fp8_e4m3"), Grouping(), params)
    assert torch.equal(x, before)
