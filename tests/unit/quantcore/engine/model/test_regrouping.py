"""Layers that Transformers cuts or joins when it loads a checkpoint: as stored in ours, and the same results."""

import pytest
import torch
import transformers
from torch import nn

from quantcore import load
from quantcore.checkpoint.headers import read_local
from quantcore.engine.model.parameter_names import find_assembled, find_conversions, place_tensors
from quantcore.engine.model.regrouping import Rows, SideBySide, regroup
from quantcore.engine.model.skeleton import build_skeleton
from quantcore.tensors.source import Source
from tests.sweep.classes import build, find_class, save

REBUILT = {
    "GteForMaskedLM": {"qkv_proj.weight", "qkv_proj.bias", "up_gate_proj.weight"},
    "NomicBertForMaskedLM": {"Wqkv.weight"},
    "InklingForConditionalGeneration": {"w13_dn.weight"},  # rows of gate and up alternate
    "MiniMaxM3SparseForConditionalGeneration": {"gate_proj.weight", "up_proj.weight"},
}
EXPERTS = [
    "Ernie4_5_VLMoeForConditionalGeneration",  # experts for images are in another module, and numbered after the others
    "Step3p7ForConditionalGeneration",  # three stacks, in a module of another name
]
ASSEMBLED = {"OlmoHybridForCausalLM": "conv1d.weight", "KimiLinearForCausalLM": "conv1d.weight"}


@pytest.fixture
def folder(request, tmp_path):
    save(build(find_class(request.param)), tmp_path / "model")
    return tmp_path / "model", getattr(transformers, request.param)


@pytest.mark.parametrize("folder", [*REBUILT, *EXPERTS, *ASSEMBLED], indirect=True)
def test_the_model_computes_what_transformers_computes(folder):
    path, kind = folder
    ids = torch.arange(2, 34)[None]
    with torch.no_grad():
        expected = kind.from_pretrained(path, dtype=torch.float32)(input_ids=ids, use_cache=False).logits
        got = load(path).model.float()(input_ids=ids, use_cache=False).logits
    assert expected.std() > 0.01
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.std().item())


@pytest.mark.parametrize("folder", REBUILT, indirect=True)
def test_layers_are_rebuilt_as_they_are_stored(folder):
    path, kind = folder
    headers = read_local(path)
    model = build_skeleton(headers.config, torch.float32)
    placed = place_tensors(model, headers.tensors)
    conversions = find_conversions(model, headers.tensors, placed)
    places = regroup(model, conversions)
    assembled = find_assembled(model, conversions, placed | places)
    for name, place in places.items():
        assert tuple(model.get_parameter(place).shape) == headers.tensors[name].shape
    filled = placed.keys() | places.keys() | {source for each in assembled.values() for source in each.sources}
    assert headers.tensors.keys() == filled
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Rows | SideBySide)}
    assert layers and not any(isinstance(model.get_submodule(name), nn.Linear) for name in layers)
    assert {".".join(name.rsplit(".", 2)[1:]) for name in places} == REBUILT[kind.__name__]


@pytest.mark.parametrize("folder", ASSEMBLED, indirect=True)
def test_a_kernel_is_put_together_by_the_table_of_transformers(folder):
    path, kind = folder
    headers = read_local(path)
    model = build_skeleton(headers.config, torch.float32)
    placed = place_tensors(model, headers.tensors)
    assembled = find_assembled(model, find_conversions(model, headers.tensors, placed), placed)
    ending = ASSEMBLED[kind.__name__]
    assert assembled and all(place.endswith(ending) for place in assembled)
    own, read = kind.from_pretrained(path).state_dict(), Source(path, headers.tensors).read
    for place, conversion in assembled.items():
        assert torch.equal(conversion.read(place, read), own[place])
