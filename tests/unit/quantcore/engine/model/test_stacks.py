"""Stacks of experts in modules of other forms: the same results with a linear layer for each expert."""

import pytest
import torch
from torch import nn

from quantcore import load
from quantcore.checkpoint.experts import find_routers
from quantcore.checkpoint.headers import read_local
from quantcore.engine.model.experts import split_experts
from quantcore.engine.model.parameter_names import projection_names
from quantcore.engine.model.stacks import OneByOne, restack
from tests.sweep.classes import build, find_class

EXPERTS = {
    "DbrxForCausalLM": {"ffn.experts.3.gate_proj", "ffn.experts.3.up_proj", "ffn.experts.3.down_proj"},
    "JetMoeForCausalLM": {
        "mlp.experts.3.gate_proj", "mlp.experts.3.up_proj", "mlp.experts.3.down_proj",
        "self_attention.experts.experts.3.up_proj", "self_attention.experts.experts.3.down_proj",
    },
}  # fmt: skip
ROUTERS = {
    "DbrxForCausalLM": {"ffn.router.layer"},
    "JetMoeForCausalLM": {"mlp.router.layer", "self_attention.experts.router.layer"},
}


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 34)[None], use_cache=False).logits


def in_first_block(names):
    return {name.split(".0.", 1)[1] for name in names if name.split(".", 3)[2] == "0"}


@pytest.mark.parametrize("name", EXPERTS)
def test_files_and_model_have_a_layer_for_each_expert(name, tmp_path):
    model = build(find_class(name))
    model.save_pretrained(tmp_path)
    tensors = read_local(tmp_path).tensors
    stored = {layer.removesuffix(".weight") for layer in tensors if ".experts.3." in layer}
    assert in_first_block(stored) == EXPERTS[name]
    assert in_first_block(find_routers({layer: each.shape for layer, each in tensors.items()})) == ROUTERS[name]
    loaded, expected = load(tmp_path).model, logits(model)
    assert all(isinstance(loaded.get_submodule(layer), nn.Linear) for layer in stored)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4 * expected.std().item())
    assert expected.std() > 0.01


@pytest.mark.parametrize("name", EXPERTS)
def test_a_model_in_memory_is_rebuilt_in_place(name):
    model = build(find_class(name))
    expected = logits(model)
    restack(model)
    split_experts(model, projection_names(model))
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4 * expected.std().item())
    [expert] = [layer for layer in EXPERTS[name] if layer.endswith("down_proj") and "attention" not in layer]
    block = next(path for path, _ in model.named_modules() if path.endswith(".0"))
    model.get_submodule(f"{block}.{expert}").weight.zero_()
    assert not torch.allclose(logits(model), expected)


def test_experts_without_tokens_run_only_where_all_must():
    """Ranks that share the layers gather them together."""
    experts = nn.ModuleDict({str(index): nn.ModuleDict({"up": nn.Linear(4, 2, bias=False)}) for index in range(3)})
    stack, called = OneByOne(experts, ("up",)), []
    for index, expert in experts.items():
        expert["up"].register_forward_hook(lambda *_, index=index: called.append(index))
    rows = torch.randn(5, 4)
    expected = torch.cat([experts["0"]["up"](rows[:2]), experts["2"]["up"](rows[2:])])
    for stack.runs_all, ran in ((False, ["0", "2"]), (True, ["0", "1", "2"])):
        called.clear()
        assert torch.equal(stack(rows, [2, 0, 3]), expected) and called == ran
