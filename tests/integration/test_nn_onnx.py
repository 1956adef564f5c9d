"""ONNX files: ONNX Runtime computes what the frozen model computes, and the weights lie there as codes."""

import importlib.util

import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quantcore import (
    Config,
    ConfigError,
    ModelExporter,
    ModelQuantizer,
    QuantizationConfig,
    QuantizationMode,
    QuantizationSpec,
    RotationConfig,
)
from quantcore.engine.modules.layers import quantized_layers
from tests.support.consumers import HAS_VNNI
from tests.support.models import SHAPE
from tests.support.onnx_runtime import session_options
from tests.support.params import with_rare, with_usual

GRAPH = QuantizationMode.fx_graph_mode


def spec(dtype, qscheme="per_tensor", **options):
    return QuantizationSpec(dtype=dtype, qscheme=qscheme, **options)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4),
    )  # fmt: skip


def linears():
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))


IMAGES, ROWS = (4, 4, 9, 11), (3, 5, 64)
INT8 = spec("int8", "per_channel")
# name -> (weight, inputs, type of the stored codes, how far the default optimizations of ONNX Runtime may go away)
CASES = {
    "int8 static": (INT8, spec("int8"), TensorProto.INT8, 0.02),
    "int8 static asymmetric": (spec("int8"), spec("int8", symmetric=False), TensorProto.INT8, 0.02),
    "uint8": (spec("uint8", "per_channel"), spec("uint8"), TensorProto.UINT8, 0.02),
    "int16": (spec("int16", "per_channel"), spec("uint16"), TensorProto.INT16, 1e-3),
    "int8 dynamic": (INT8, spec("int8", is_dynamic=True, symmetric=False), TensorProto.INT8, 0.02),
    "fp8": (spec("fp8_e4m3"), spec("fp8_e4m3"), TensorProto.FLOAT8E4M3FN, 1e-3),
    "fp8 e5m2": (spec("fp8_e5m2", "per_channel"), spec("fp8_e5m2"), TensorProto.FLOAT8E5M2, 1e-3),
    "4 bits": (spec("int4", "per_channel"), spec("int4"), TensorProto.INT4, 1e-3),
    "uint4 in groups": (spec("uint4", "per_group", group_size=2), None, TensorProto.UINT4, 0.02),
    "int4 in groups of outputs": (spec("int4", "per_group", group_size=4, ch_axis=0), None, TensorProto.INT4, 1e-3),
}
FOR_LINEARS = {
    "int8 per token": (INT8, spec("int8", "per_channel", is_dynamic=True), TensorProto.INT8, 0.03),
    "int8 per feature": (INT8, spec("int8", "per_channel", ch_axis=-1), TensorProto.INT8, 1e-3),
    "fp8 per token": (INT8, spec("fp8_e4m3", "per_channel", is_dynamic=True), TensorProto.INT8, 0.03),
    "fp8 in blocks": (spec("fp8_e4m3", "per_block", block_size=(20, 32)), None, TensorProto.FLOAT8E4M3FN, 1e-3),
    "mxfp8": (spec("fp8_e4m3", "per_group", group_size=16, scale_type="e8m0"), None, TensorProto.FLOAT8E4M3FN, 1e-3),
    "bfloat16": (spec("bfloat16"), spec("bfloat16"), TensorProto.FLOAT, 1e-3),
}
ALL = [(name, linears, ROWS) for name in CASES | FOR_LINEARS] + [
    (name, convolutions, IMAGES)
    for name in ("int8 static asymmetric", "uint8", "fp8", "4 bits", "int4 in groups of outputs")
]
RARE = [  # each is like another case, or like one of those below
    *((name, linears) for name in ("bfloat16", "uint4 in groups")),
    *((name, linears) for name in ("int8 static", "uint8", "fp8 e5m2", "int4 in groups of outputs", "fp8 per token")),
    *((name, linears) for name in ("int8 per feature", "mxfp8", "fp8 in blocks", "int16", "int8 per token")),
    *((name, convolutions) for name in ("int8 static asymmetric", "fp8", "4 bits", "int4 in groups of outputs")),
]


def frozen(model, config, batch):
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(model, [batch]))


def run(path, x, *, optimized, static_inputs=False):
    session = onnxruntime.InferenceSession(
        path, session_options(optimized=optimized, static_inputs=static_inputs), providers=["CPUExecutionProvider"]
    )
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.parametrize(
    ("name", "make", "shape"),
    [
        pytest.param(*case, id=f"{case[0]}, {case[1].__name__}", marks=[pytest.mark.slow] if case[:2] in RARE else [])
        for case in ALL
    ],
)
def test_onnx_runtime_computes_what_the_frozen_model_computes(name, make, shape, tmp_path):
    torch.manual_seed(0)
    weight, inputs, element_type, tolerance = (CASES | FOR_LINEARS)[name]
    model, x = make().train(False), torch.randn(shape)
    config = Config(global_quant_config=QuantizationConfig(weight=weight, input_tensors=inputs))
    frozen(model, config, x)
    x = 1.5 * x  # some of it beyond what was calibrated
    before, state = model(x), {key: value.clone() for key, value in model.state_dict().items()}
    ModelExporter(tmp_path / "out").export_onnx_model(model, x[:1])
    file = tmp_path / "out" / "model.onnx"
    exactly = 1e-4 if "16" in name else 1e-5  # a step of 16 bits is as small as float32's noise: it may go either way
    static = inputs is not None and inputs.is_static and inputs.qscheme == "per_tensor"
    for optimized, allowed in ((False, exactly), (True, tolerance)):
        found = run(file, x, optimized=optimized, static_inputs=static)
        assert (found - before).abs().max() <= allowed * before.abs().max(), optimized
    stored = {tensor.name: tensor.data_type for tensor in onnx.load(file).graph.initializer}
    codes = {kind for key, kind in stored.items() if key.startswith("0.weight_codes")}
    assert codes == ({element_type} if weight.format.scaled else set())
    assert not weight.format.scaled or "0.weight" not in stored, "the float weight is stored, too"
    assert torch.equal(model(x), before) and model.state_dict().keys() == state.keys()
    assert all(layer.frozen for _, layer in quantized_layers(model))


def test_nodes_say_what_was_asked_for(tmp_path):
    x = torch.randn(2, 64)
    weight = spec("uint4", "per_group", group_size=16)
    config = Config(global_quant_config=QuantizationConfig(weight=weight, input_tensors=spec("uint8")))
    model = frozen(linears(), config, x)
    ModelExporter(tmp_path / "out").export_onnx_model(model, x, input_names=["rows"], output_names=["scores"])
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    assert [value.name for value in (*graph.input, *graph.output)] == ["rows", "scores"]
    kinds = [node.op_type for node in graph.node if "Linear" in node.op_type]
    assert sorted(kinds) == ["DequantizeLinear"] * 4 + ["QuantizeLinear"] * 2
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    assert shapes["0.weight_codes_4bit"] == [48, 64] and shapes["0.weight_scale"] == [48, 4]
    floats = [tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT]
    assert max(onnx.numpy_helper.to_array(tensor).size for tensor in floats) == 48 * 4


@pytest.mark.slow  # "uint8, convolutions" above is much like it
@pytest.mark.parametrize("mode", QuantizationMode)
def test_convolutional_nets_in_both_modes(mode, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(IMAGES)
    config = QuantizationConfig(weight=INT8, input_tensors=spec("int8"))
    model = frozen(convolutions().train(False), Config(global_quant_config=config, quant_mode=mode), x)
    ModelExporter(tmp_path / "out").export_onnx_model(model, x[:1])
    result = run(tmp_path / "out" / "model.onnx", torch.cat([x, x]), optimized=False)
    torch.testing.assert_close(result, model(torch.cat([x, x])), atol=1e-5, rtol=1e-5)
    kinds = [node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node]
    assert ("BatchNormalization" in kinds) == (mode is QuantizationMode.eager_mode)


LANGUAGE_MODELS = {
    "llama": ({"tie_word_embeddings": False}, {}),
    "gpt2": ({"n_embd": 64, "n_layer": 1, "n_head": 4}, {}),
    "llama with fp8 attention": ({"tie_word_embeddings": False}, {"softmax_quant_spec": spec("fp8_e4m3")}),
    "llama with rotated inputs of MLPs": (
        {"tie_word_embeddings": False},
        {"algo_config": RotationConfig(r1=False, r4=True)},
    ),
    "llama with rotated keys": (
        {"tie_word_embeddings": False},
        {
            "algo_config": RotationConfig(r1=False, r3=True),
            "kv_cache_quant_config": {
                "*k_proj": QuantizationConfig(
                    weight=INT8,
                    output_tensors=spec("int8", "per_channel", is_dynamic=True),
                ),
            },
        },
    ),
}


ALIKE = ("gpt2", "llama", "llama with fp8 attention", "llama with rotated inputs of MLPs")  # each is like another


@pytest.mark.parametrize("name", with_rare(LANGUAGE_MODELS, ALIKE))
@pytest.mark.filterwarnings("ignore:.*token_id")
def test_language_models(name, tmp_path):
    torch.manual_seed(0)
    options, extra = LANGUAGE_MODELS[name]
    config = AutoConfig.for_model(name.split()[0], **{**SHAPE, **options, "num_hidden_layers": 1})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train(False)
    ids = torch.randint(0, 512, (3, 24))
    layer = QuantizationConfig(weight=INT8, input_tensors=spec("fp8_e4m3" if extra else "int8"))
    frozen(model, Config(global_quant_config=layer, exclude=["lm_head"], **extra), ids)
    ModelExporter(tmp_path / "out").export_onnx_model(model, {"input_ids": ids[:1, :9]}, output_names=["logits"])
    expected = model(ids).logits
    for optimized in (False, True):
        difference = (run(tmp_path / "out" / "model.onnx", ids, optimized=optimized) - expected).abs()
        if optimized and not HAS_VNNI:  # the integers' sums saturate
            assert difference.max() <= 0.2 * expected.abs().max()
        else:
            assert difference.max() <= 0.03 * expected.abs().max()  # noise moves a few values over a border
            assert difference.mean() <= 3e-3 * expected.abs().mean()


REFUSED = {
    "no such type": (spec("fp4", "per_group", group_size=16), None, "weight of 0 .fp4 per_group.: its element types"),
    "two scales": (spec("int4", "per_channel", over=spec("fp8_e4m3")), None, "one scale per value, not two"),
    "real zero points": (
        spec("uint4", "per_channel", zero_point_type="float32"), None, "zero points are codes: zero_point_type int32",
    ),
    "rounding": (INT8, spec("int8", round_method="floor"), "input_tensors of 0 .*: it rounds half to even"),
    "powers of two": (
        INT8, spec("fp8_e4m3", "per_group", group_size=16, scale_type="e8m0", is_dynamic=True), "compute powers of two",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_onnx_cannot_say_is_refused_by_name(case, tmp_path):
    weight, inputs, text = REFUSED[case]
    x = torch.randn(2, 64)
    config = Config(global_quant_config=QuantizationConfig(weight=weight, input_tensors=inputs))
    with pytest.raises(ConfigError, match=text) as caught:
        ModelExporter(tmp_path / "out").export_onnx_model(frozen(linears(), config, x), x)
    assert caught.value.code == "incompatible_export" and not (tmp_path / "out").exists()


def test_keys_that_onnx_cannot_hold_are_refused(tmp_path):
    keys = QuantizationConfig(output_tensors=spec("fp4", "per_group", group_size=16, is_dynamic=True))
    config = Config(
        global_quant_config=QuantizationConfig(weight=INT8), kv_cache_quant_config={"*k_proj": keys},
        algo_config=RotationConfig(r1=False, r3=True),
    )  # fmt: skip
    ids = torch.randint(0, 512, (2, 8))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **{**SHAPE, "num_hidden_layers": 1}), dtype=torch.float32
    )
    with pytest.raises(
        ConfigError, match=r"cannot store the key of model.layers.0.self_attn .fp4 per_group.: its element"
    ):
        ModelExporter(tmp_path / "out").export_onnx_model(frozen(model, config, ids), ids)


def test_other_refusals_teach(tmp_path, monkeypatch):
    x = torch.randn(2, 64)
    config = Config(global_quant_config=QuantizationConfig(weight=INT8))
    exporter = ModelExporter(tmp_path / "out")
    with pytest.raises(ConfigError, match="not frozen"):
        exporter.export_onnx_model(linears(), x)
    model = frozen(linears(), config, x)
    with pytest.raises(ConfigError, match=r"opset_version is 17; .* need 21 or later"):
        exporter.export_onnx_model(model, x, opset_version=17)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(ConfigError, match=r"needs the package.s. onnxscript\. pip install"):
        exporter.export_onnx_model(model, x)


def small_language_model():
    config = AutoConfig.for_model("llama", **{**SHAPE, "num_hidden_layers": 1})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


# name -> (model, a batch)
MODELS = {
    "linears": (
        lambda: nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 32)),
        torch.randn(ROWS),
    ),
    "convolutions": (convolutions, torch.randn(IMAGES)),
    "a language model": (small_language_model, torch.arange(14).view(2, 7)),
}
WIDE = {  # noise of two-byte floats moves some static inputs to the next code
    "int8": (QuantizationConfig(weight=INT8), 0.01),
    "int8 static": (QuantizationConfig(weight=INT8, input_tensors=spec("int8")), 0.05),
    "fp8": (QuantizationConfig(weight=spec("fp8_e4m3"), input_tensors=spec("fp8_e4m3")), 0.05),
}


DTYPES = [
    (dtype, kind, scheme)
    for dtype in (torch.bfloat16, torch.float16, torch.float64)
    for kind in MODELS
    for scheme in WIDE
]
USUAL = [
    (torch.bfloat16, "linears", "int8 static"), (torch.float16, "linears", "int8"), (torch.float64, "linears", "int8"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "kind", "scheme"), with_usual(DTYPES, USUAL))
def test_onnx_runtime_loads_and_computes_models_of_every_dtype(dtype, kind, scheme, tmp_path):
    """It has kernels for float32 and float16: bfloat16 and float64 become float32. The model in memory stays."""
    torch.manual_seed(0)
    make, batch = MODELS[kind]
    config, tolerance = WIDE[scheme]
    batch = batch.to(dtype) if batch.is_floating_point() else batch
    model = frozen(make().to(dtype).eval(), Config(global_quant_config=config), batch)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ModelExporter(tmp_path / "out").export_onnx_model(model, batch[:1])
    session = onnxruntime.InferenceSession(
        tmp_path / "out" / "model.onnx", session_options(optimized=False),
        providers=["CPUExecutionProvider"],
    )  # fmt: skip
    expected_dtype = torch.float16 if dtype is torch.float16 else torch.float32
    given = batch.to(expected_dtype) if batch.is_floating_point() else batch
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: given.numpy()})[0])
    assert found.dtype is expected_dtype
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) and tensor.dtype == state[name].dtype
               for name, tensor in model.state_dict().items())  # fmt: skip
    with torch.no_grad():
        output = model.float()(batch.float() if batch.is_floating_point() else batch)
    expected = getattr(output, "logits", output)
    assert (found.float() - expected).abs().max() <= tolerance * expected.abs().max()


class ComputesInBfloat16(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.layer(x).to(torch.bfloat16) * 2).float()


def test_a_model_that_computes_in_bfloat16_on_its_own_is_refused(tmp_path):
    x = torch.randn(2, 8)
    model = frozen(ComputesInBfloat16(), Config(global_quant_config=QuantizationConfig(weight=INT8)), x)
    with pytest.raises(ConfigError, match="computes in bfloat16") as caught:
        ModelExporter(tmp_path / "out").export_onnx_model(model, x)
    assert caught.value.code == "incompatible_export" and not (tmp_path / "out").exists()
