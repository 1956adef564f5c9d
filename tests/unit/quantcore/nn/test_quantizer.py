"""ModelQuantizer on small models: which layers, calibration, sharing, and every refusal with what to do."""

import dataclasses
from collections import UserDict

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quantcore import (
    CalibrationError,
    Config,
    ConfigError,
    ModelError,
    ModelQuantizer,
    NumericsError,
    QuantizationConfig,
    QuantizationSpec,
)
from quantcore.config import presets
from quantcore.engine.modules.layers import QuantizedLayer
from tests.support.models import SHAPE

INT8 = QuantizationSpec(dtype="int8", qscheme="per_channel")
STATIC = QuantizationConfig(weight=INT8, input_tensors=QuantizationSpec(dtype="fp8_e4m3"))
WEIGHT_ONLY = QuantizationConfig(weight=INT8)


class Net(nn.Module):
    """Two towers, of which ``b`` is skipped unless it is asked for."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8)
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 20, bias=False)

    def forward(self, ids, use_b=True):
        x = self.drop(self.a(self.norm(self.embed(ids))))
        return self.head(self.b(x) if use_b else x)


def net():
    torch.manual_seed(0)
    return Net()


IDS = torch.arange(12).view(2, 6)


def names_of_quantized(model):
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}


def quantize(model, config=STATIC, dataloader=(IDS,), **fields):
    return ModelQuantizer(Config(global_quant_config=config, **fields)).quantize_model(model, dataloader)


def test_the_config_decides_by_exclusion_name_type_and_default(capsys):
    wide = QuantizationConfig(weight=QuantizationSpec(dtype="int8"))
    model = quantize(
        net(), WEIGHT_ONLY, exclude=["h*"], layer_quant_config={"b": wide}, layer_type_quant_config={nn.Embedding: wide}
    )
    assert names_of_quantized(model) == {"a", "b", "embed"}
    assert [getattr(model, name).weight_quantizer.scale.numel() for name in ("a", "b", "embed")] == [8, 1, 1]
    assert capsys.readouterr().err == "[QUANTCORE-INFO]: Model quantization has been completed.\n"


def test_embeddings_are_left_alone_unless_asked():
    assert names_of_quantized(quantize(net(), WEIGHT_ONLY)) == {"a", "b", "head"}


BATCHES = {
    "tensor": IDS,
    "dict": {"ids": IDS},
    "batch encoding": UserDict(ids=IDS),
    "tuple": (IDS, True),
    "list": [IDS],
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_every_kind_calibrate_alike(kind):
    scales = [quantize(net(), dataloader=[batch]).head.input_quantizer.scale for batch in (IDS, BATCHES[kind])]
    assert torch.equal(*scales)


def test_calibration_sees_the_float_model_in_evaluation_mode():
    model = net()
    model.norm.train(False)
    watched = []
    handle = model.head.register_forward_pre_hook(
        lambda _, inputs: watched.append((inputs[0], torch.is_grad_enabled()))
    )
    twin = net().train(False)
    quantize(model, dataloader=iter([IDS, IDS + 1]))
    handle.remove()
    expected = [twin.b(twin.a(twin.norm(twin.embed(ids)))) for ids in (IDS, IDS + 1)]
    assert [torch.equal(seen, x) for (seen, _), x in zip(watched, expected, strict=True)] == [True, True]
    assert [grad for _, grad in watched] == [False, False]
    assert model.head.input_quantizer.scale == torch.stack(expected).abs().max() / 448
    assert model.training and model.drop.training and not model.norm.training


@pytest.mark.parametrize("config", [WEIGHT_ONLY, QuantizationConfig(
    weight=INT8, input_tensors=QuantizationSpec(dtype="int8", qscheme="per_channel", is_dynamic=True))])  # fmt: skip
def test_nothing_runs_where_nothing_is_to_be_learned(config):
    def forbidden():
        raise AssertionError("the dataloader was read")
        yield

    quantize(net(), config, forbidden())
    quantize(net(), config, None)


def test_a_shared_weight_that_all_want_alike_is_quantized_once_and_stays_shared():
    model = net()
    model.head.weight = model.embed.weight
    floor = QuantizationConfig(weight=dataclasses.replace(INT8, round_method="floor"))  # a second time is not the same
    quantize(model, floor, layer_type_quant_config={nn.Embedding: floor})
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    before = model.train(False)(IDS)
    ModelQuantizer.freeze(model)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(IDS), before)


@pytest.mark.parametrize("types", [{}, {nn.Embedding: QuantizationConfig(weight=QuantizationSpec(dtype="int8"))}])
def test_a_shared_weight_is_left_alone_where_the_wishes_differ(types, capsys):
    model = net()
    model.head.weight = model.embed.weight
    before = model.embed.weight.detach().clone()
    ModelQuantizer.freeze(quantize(model, WEIGHT_ONLY, layer_type_quant_config=types))
    assert names_of_quantized(model) == {"a", "b"}
    assert model.head.weight is model.embed.weight and torch.equal(model.embed.weight, before)
    said = capsys.readouterr().err
    assert "[QUANTCORE-WARNING]: head shares its weight with embed" in said and "head.weight.clone()" in said


def test_routers_are_left_alone_unless_named():
    """Of two experts: one output each, beside them; and the weight of a shared expert."""

    def mixture():
        parts = {"gate": nn.Linear(8, 2), "shared_gate": nn.Linear(8, 1), "up": nn.Linear(8, 2)}
        experts = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 16)}) for _ in range(2))
        return nn.ModuleDict({"mlp": nn.ModuleDict(parts | {"experts": experts})})

    inside = {"mlp.experts.0.up", "mlp.experts.1.up"}
    assert names_of_quantized(quantize(mixture(), WEIGHT_ONLY)) == inside
    named = {"mlp.gate": WEIGHT_ONLY}
    assert names_of_quantized(quantize(mixture(), WEIGHT_ONLY, layer_quant_config=named)) == inside | {"mlp.gate"}


def test_a_pattern_that_matches_nothing_is_a_warning(capsys):
    quantize(net(), WEIGHT_ONLY, exclude=["lm_head"], layer_quant_config={"*.q_proj": WEIGHT_ONLY})
    said = capsys.readouterr().err
    assert "The pattern 'lm_head' matches no layer." in said and "The pattern '*.q_proj' matches no layer." in said


def test_a_class_that_matches_nothing_is_a_warning_and_with_strict_an_error(capsys):
    typed = {"Conv2d": QuantizationConfig(weight=QuantizationSpec(dtype="int8"))}
    config = Config(
        global_quant_config=QuantizationConfig(), layer_type_quant_config={**typed, "Linear": typed["Conv2d"]}
    )
    ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(4, 4)))
    assert "The class 'Conv2d' of layer_type_quant_config matches no layer." in "".join(capsys.readouterr())
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"The class 'Conv2d' .* matches no layer") as caught:
        ModelQuantizer(dataclasses.replace(config, strict=True)).quantize_model(model)
    assert caught.value.code == "unmatched_names" and type(model[0]) is nn.Linear


def nan_in(model, name):
    with torch.no_grad():
        model.get_submodule(name).weight[3, 3] = torch.nan
    return model


class Huge(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x) * torch.inf)


GROUP_3 = QuantizationConfig(weight=QuantizationSpec(dtype="int4", qscheme="per_group", group_size=3))
REFUSED = {
    "no batch": (net, STATIC, [], CalibrationError, "no_calibration_data", "need data .3 layer.*is_dynamic=True"),
    "no dataloader": (net, STATIC, None, CalibrationError, "no_calibration_data", "few batches"),
    "a layer unseen": (net, STATIC, [(IDS, False)], CalibrationError, "layers_without_data", "saw no data: b. Exclude"),
    "labels": (
        net, STATIC, [(IDS, True, 3)], CalibrationError, "batch_does_not_fit", "too many positional.*without labels",
    ),
    "unknown names": (net, STATIC, [{"x": IDS}], CalibrationError, "batch_does_not_fit", "missing a required"),
    "overflow": (Huge, STATIC, [torch.ones(1, 4)], NumericsError, "nonfinite_activations", "input of second became"),
    "bad weight": (lambda: nan_in(net(), "b"), STATIC, [IDS], NumericsError, "nonfinite_weights", "weight of b has 1"),
    "groups": (net, GROUP_3, None, ConfigError, "group_size_not_dividing", "8 inputs: a and 2 more"),
    "offloaded": (
        lambda: nn.Sequential(nn.Linear(4, 4).to("meta")), STATIC, [], ModelError, "weight_not_in_memory", "of 0 is",
    ),
    "8-bit weights": (
        lambda: nn.Sequential(nn.Linear(4, 4).to(torch.float8_e4m3fn)), STATIC, [], ModelError,
        "unsupported_weights_dtype", "float8_e4m3fn. Use the float model",
    ),
    "nothing": (nn.ReLU, STATIC, [], ConfigError, "nothing_to_quantize", "Layers: none"),
    "indices": (
        lambda: nn.Sequential(nn.Embedding(4, 4)), {nn.Embedding: STATIC}, [], ConfigError, "invalid_config", "indices",
    ),
    "blocks of a convolution": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3)),
        QuantizationConfig(weight=QuantizationSpec(dtype="fp8_e4m3", qscheme="per_block", block_size=(2, 2))),
        [], ConfigError, "invalid_config", "0 is a Conv2d whose weight has 4 dimensions",
    ),
    "tokens of a convolution": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3)),
        QuantizationConfig(weight=INT8, input_tensors=dataclasses.replace(INT8, is_dynamic=True)),
        [], ConfigError, "invalid_config", "0 is a Conv2d.*per_tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_teaches_and_leaves_the_model_as_it_was(case):
    make, config, dataloader, kind, code, text = REFUSED[case]
    model = make()
    before = {name: type(module) for name, module in model.named_modules()}
    types = config if isinstance(config, dict) else {}
    with pytest.raises(kind, match=text) as caught:
        quantize(model, STATIC if types else config, dataloader, layer_type_quant_config=types)
    assert caught.value.code == code
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_quantizing_twice_is_refused():
    model = quantize(net(), WEIGHT_ONLY)
    with pytest.raises(ConfigError, match="already quantized") as caught:
        quantize(model, WEIGHT_ONLY)
    assert caught.value.code == "already_quantized"


def test_freezing_a_float_model_is_refused_and_freezing_twice_changes_nothing():
    with pytest.raises(ConfigError, match="not quantized") as caught:
        ModelQuantizer.freeze(net())
    assert caught.value.code == "not_quantized"
    model = ModelQuantizer.freeze(quantize(net(), WEIGHT_ONLY))
    weight = model.a.weight.detach().clone()
    assert ModelQuantizer.freeze(model) is model and torch.equal(model.a.weight, weight)


OF_FILES = [name for name, preset in presets.PRESETS.items() if (of := preset.config.gguf) and of.names_tensors]


@pytest.mark.parametrize("preset", OF_FILES)
def test_types_of_a_file_are_refused_in_memory(preset):
    with pytest.raises(ConfigError, match="gguf gives types to the tensors of a file"):
        ModelQuantizer(presets.resolve(preset)).quantize_model(net())


@pytest.mark.parametrize("preset", [name for name in presets.PRESETS if name not in OF_FILES])
def test_every_preset_quantizes_and_freezes_to_the_same_bits(preset):
    torch.manual_seed(0)
    shape = SHAPE | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape), dtype=torch.float32).train(False)
    ids = torch.randint(0, 512, (2, 16))
    before = model(ids).logits
    ModelQuantizer(presets.resolve(preset)).quantize_model(model, [ids])
    quantized = model(ids).logits
    bound = 0.9 if preset.startswith(("w2", "gguf_iq2", "gguf_tq")) else 0.6
    bound = 0.97 if preset.startswith("gguf_iq1") else bound  # of random weights, and without a solver
    assert 0 < (quantized - before).norm() / before.norm() < bound
    assert torch.equal(ModelQuantizer.freeze(model)(ids).logits, quantized)


def test_scales_in_two_levels_need_rows_of_super_blocks():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE), dtype=torch.float32)
    with pytest.raises(ConfigError, match="nested under one super-block scale per 256 inputs"):
        ModelQuantizer(presets.resolve("gguf_q4_k")).quantize_model(model)


def test_layers_side_by_side_share_the_global_scale_of_nvfp4():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 16), nn.Linear(32, 16)

        def forward(self, x):
            return self.a(x) + self.b(x)

    torch.manual_seed(0)
    model = nn.Sequential(Pair(), nn.Linear(16, 32), Pair())
    with torch.no_grad():
        model[0].a.weight[3, 5] = 100
    config = presets.PRESETS["nvfp4_weight_only"].layer_config
    ModelQuantizer(Config(global_quant_config=config)).quantize_model(model)
    scales = [module.weight_quantizer.global_scale for module in (model[0].a, model[0].b, model[2].a, model[2].b)]
    assert scales[0] == scales[1] > scales[2] == scales[3]
    assert not scales[0].requires_grad
    weight = model[0].b.weight.detach()
    assert (model[0].b.weight_quantizer(weight) - weight).norm() < 0.12 * weight.norm()
