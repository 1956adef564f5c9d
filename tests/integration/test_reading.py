"""Quantized checkpoints read back: as floats, as a model in memory, in another format, as the input of another job."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import quantcore
from quantcore.cli.main import main
from quantcore.config import presets
from quantcore.config.quantization import Dtype, parse_config
from quantcore.engine.commands.convert import convert
from quantcore.engine.containers.dequantize import open_source
from quantcore.errors import ConfigError, ModelError
from quantcore.export import EXPORTERS, holds_codes
from quantcore.export.importer import Importer, matches
from quantcore.importing.model import read_model
from tests.support.deepseek_v4 import publish_as_v4
from tests.support.models import MIXTURES, VOCAB_SIZE, tiny_model
from tests.support.params import with_rare, with_usual
from tests.support.proofs import proving_here
from tests.support.reading import measured, quantize
from tests.sweep.classes import build, find_class, save


def groups(dtype, **spec):
    spec = {"dtype": dtype, "qscheme": "per_group", "group_size": 32, **spec}
    return parse_config({"global_quant_config": {"weight": spec}, "exclude": ["lm_head", "*.1.mlp.up_proj"]})


MIXED = replace(
    groups("int4"), layer_quant_config={"*.down_proj": presets.resolve("int8_weight_only").global_quant_config}
)
BLOCKS = replace(
    presets.resolve("fp8_block"),
    global_quant_config=quantcore.QuantizationConfig(
        weight=quantcore.QuantizationSpec(dtype="fp8_e4m3", qscheme="per_block", block_size=(32, 32)),
        input_tensors=quantcore.QuantizationSpec(dtype="fp8_e4m3", qscheme="per_group", group_size=32, is_dynamic=True),
    ),
)
NVFP4_AND_FP8 = replace(
    presets.resolve("nvfp4", kv_cache="fp8"),
    layer_quant_config={"*.1.*": presets.resolve("fp8").global_quant_config},
)
CASES = {
    "quark": ("w4a16", "fp8", "int8_static", "mxfp4", "nvfp4", "int4_fp8", "mixed", "kv"),
    "compressed_tensors": (
        *(
            "w4a16",
            "w4a16_sym",
            "fp8",
            "int8_dynamic",
            "mixed",
            "kv",
            "nvfp4",
            "mxfp4",
            "mxfp6_e2m3",
            "mxfp8",
            "blocks",
        ),
        *("int2", "int3"),
    ),
    "fp8": ("fp8", "kv", "blocks"),
    "modelopt": ("nvfp4", "nvfp4_weight_only", "fp8", "kv", "nvfp4_and_fp8"),
    "gptq": ("int4", "int3", "int2", "mixed"),
    "gptq_v2": ("w4a16", "uint2", "mixed"),
    "awq": ("w4a16",),
    "bitsandbytes": ("nf4", "fp4_bnb", "nf4_double_quant", "fp4_bnb_double_quant", "llm_int8"),
    "onnx": ("w4a16", "int8_static", "mixed", "kv"),
    "mlx": ("w4a16", "w4a16_sym", "int2", "int3", "mxfp4_weight_only"),
}
ALL = [(export, name) for export, names in CASES.items() for name in names]
USUAL = [  # one to three of each format that no other is much like; a graph takes long to trace: see test_onnx
    ("quark", "kv"), ("compressed_tensors", "w4a16_sym"), ("compressed_tensors", "mxfp4"), ("fp8", "kv"),
    ("compressed_tensors", "blocks"), ("gptq", "mixed"), ("awq", "w4a16"), ("bitsandbytes", "nf4_double_quant"),
    ("modelopt", "nvfp4_and_fp8"), ("mlx", "w4a16"),
]  # fmt: skip
CONFIGS = {
    "kv": presets.resolve("fp8", kv_cache="fp8"),
    "mixed": MIXED,
    "nvfp4_and_fp8": NVFP4_AND_FP8,
    "blocks": BLOCKS,
    "uint2": groups("uint2", symmetric=False),
    **{dtype: groups(dtype) for dtype in ("int2", "int3", "int4")},
}
ODD = {"model_type": "qwen2", "vocab_size": VOCAB_SIZE, "num_hidden_layers": 2}  # biases, grouped queries, a tied head


pytestmark = pytest.mark.usefixtures("proof_in_this_process")


@pytest.fixture(scope="module")
def float_model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "odd", **ODD)


def config_of(name):
    return CONFIGS[name] if name in CONFIGS else presets.resolve(name)


def test_every_format_with_codes_can_be_read():
    readable = {name for name in EXPORTERS if isinstance(EXPORTERS.get(name), Importer)}
    assert readable == {*CASES, "gguf"} == set(filter(holds_codes, EXPORTERS))  # gguf: see test_gguf_reading


@pytest.mark.parametrize(("export", "name"), with_usual(ALL, USUAL))
def test_what_was_written_is_found_again(float_model, export, name, tmp_path):
    """The same floats as the rounded ones, and in memory the same model as the job had."""
    report = quantize(float_model, tmp_path / "out", config_of(name), export, "fake_quantized")
    found, plain = (read_model(tmp_path / "out" / folder) for folder in (export, "fake_quantized"))
    assert found.quantized.export == export
    assert found.headers.tensors.keys() == plain.headers.tensors.keys()
    for tensor in plain.headers.tensors:
        assert torch.equal(open_source(found).read(tensor), open_source(plain).read(tensor)), tensor
    model, config = quantcore.load(tmp_path / "out" / export)
    assert measured(model) == pytest.approx(report["summary"]["perplexity_after"], rel=1e-6)
    planned = {
        layer["name"]: layer["scheme"] for layer in json.loads((tmp_path / "out/plan.json").read_text())["layers"]
    }
    assert {layer.name: layer.scheme for layer in found.quantized.layers.values()}.keys() == planned.keys()
    assert all(
        config.choose(layer, "Linear")[0] == found.quantized.layers[f"{layer}.weight"].config for layer in planned
    )
    assert config.choose("lm_head", "Linear")[0] is None


CHAINS = {
    "w4a16": ("quark", "compressed_tensors", "gptq_v2", "awq", "quark"),
    "w4a16_sym": ("gptq", "quark", "compressed_tensors", "gptq_v2", "gptq"),
    "kv": ("fp8", "quark", "compressed_tensors", "fp8"),
    "blocks": ("fp8", "compressed_tensors", "fp8"),
    "nvfp4": ("modelopt", "quark", "compressed_tensors", "modelopt"),
    "mixed": ("gptq", "compressed_tensors", "gptq_v2", "gptq"),
}


@pytest.mark.parametrize("name", with_usual(CHAINS, ["w4a16", "kv", "mixed"]))
def test_converted_is_the_same_as_written(float_model, name, tmp_path):
    chain = CHAINS[name]
    quantize(float_model, tmp_path / "out", config_of(name), *dict.fromkeys(chain))
    here = tmp_path / "out" / chain[0]
    for step, export in enumerate(chain[1:]):
        summary = convert(here, tmp_path / str(step), export, lambda event: None)
        here = tmp_path / str(step)
        assert (summary["to"], summary["num_layers"]) == (export, 13 if name == "mixed" else 14)
        written, expected = (load_file(folder / "model.safetensors") for folder in (here, tmp_path / "out" / export))
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[key], expected[key]) for key in written)
        said = [json.loads((folder / "config.json").read_text()) for folder in (here, tmp_path / "out" / export)]
        if export != "quark":  # which says the same layers in more than one way
            assert said[0] == said[1]
        assert (here / "tokenizer.json").exists() and (here / "MANIFEST.json").exists()


INT8_LAYER = presets.resolve("int8_weight_only").global_quant_config
LEFT_OUT = ("lm_head", "*.0.self_attn.q_proj", "*.1.mlp.experts.2.up_proj")
ODD_MIXTURES = {
    "quark": replace(groups("uint4", symmetric=False), layer_quant_config={"*.1.*.down_proj": INT8_LAYER}),
    "compressed_tensors": replace(
        presets.resolve("nvfp4_weight_only"), layer_quant_config={"*.1.*.down_proj": INT8_LAYER}
    ),
    "fp8": presets.resolve("fp8"),
    "modelopt": replace(
        presets.resolve("nvfp4"), layer_quant_config={"*.1.*": NVFP4_AND_FP8.layer_quant_config["*.1.*"]}
    ),
    "gptq": MIXED,
    "gptq_v2": groups("uint4", symmetric=False),
    "awq": groups("uint4", symmetric=False),
    "bitsandbytes": presets.resolve("nf4"),
}


@pytest.fixture(scope="module")
def odd_mixture(tmp_path_factory):
    """Biases, grouped queries, a tied head, 509 tokens, experts and shared ones."""
    folder = tmp_path_factory.mktemp("model") / "mixture"
    odd = {**MIXTURES["qwen2_moe"], "vocab_size": 509, "num_hidden_layers": 2}
    return tiny_model(folder, model_type="qwen2_moe", qkv_bias=True, **odd)


@pytest.mark.parametrize("export", with_usual(ODD_MIXTURES, ["compressed_tensors", "gptq"]))
def test_an_odd_mixture_of_experts_in_every_format(odd_mixture, export, tmp_path):
    """Layers left out, another scheme beside the first: what is loaded computes what the job measured.

    GGUF has no such architecture, ONNX no mixtures, and MLX needs one scheme for all experts (see test_mlx).
    """
    assert set(EXPORTERS) - set(ODD_MIXTURES) == {"gguf", "onnx", "mlx", "fake_quantized"}
    config = replace(ODD_MIXTURES[export], exclude=LEFT_OUT)
    report = quantize(odd_mixture, tmp_path / "out", config, export)
    model, found = quantcore.load(tmp_path / "out")
    assert measured(model) == pytest.approx(report["summary"]["perplexity_after"], rel=1e-6)
    for name in ("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate"):
        assert found.choose(name, "Linear")[0] is None
    assert found.choose("model.layers.1.mlp.experts.2.up_proj", "Linear")[0] is None
    assert found.choose("model.layers.1.mlp.shared_expert.up_proj", "Linear")[0] is not None


@pytest.mark.parametrize(
    ("export", "other"), with_rare([("awq", "quark"), ("gptq", "compressed_tensors")], [("awq", "quark")])
)
def test_an_odd_mixture_of_experts_is_converted(odd_mixture, export, other, tmp_path):
    report = quantize(odd_mixture, tmp_path / "out", replace(ODD_MIXTURES[export], exclude=LEFT_OUT), export)
    convert(tmp_path / "out", tmp_path / "converted", other, lambda event: None)
    model, _ = quantcore.load(tmp_path / "converted")
    assert measured(model) == pytest.approx(report["summary"]["perplexity_after"], rel=1e-6)


def test_a_quantized_model_can_be_quantized_anew(float_model, tmp_path):
    quantize(float_model, tmp_path / "nf4", presets.resolve("nf4"), "bitsandbytes", "fake_quantized")
    reports = [
        quantize(tmp_path / "nf4" / folder, tmp_path / f"from_{folder}", presets.resolve("int8_dynamic"), "quark")
        for folder in ("bitsandbytes", "fake_quantized")
    ]
    one, other = (load_file(tmp_path / f"from_{name}/model.safetensors") for name in ("bitsandbytes", "fake_quantized"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    first, on_grid = (warning for warning in reports[0]["warnings"] if "already" in warning)
    assert "already quantized (bitsandbytes)" in first and "nf4, groups of 64 (100 %)" in on_grid
    by_values = reports[1]["model"]["grids"]
    assert {grid["name"] for grid in by_values} == {"nf4"} and sum(grid["share"] for grid in by_values) == 1
    assert "quantization_config" not in read_model(tmp_path / "nf4/bitsandbytes").headers.config
    assert json.loads((tmp_path / "from_bitsandbytes/config.json").read_text())["quantization_config"]["version"]


@pytest.fixture
def nested(float_model, tmp_path):
    """A bitsandbytes checkpoint with double quantization."""
    quantize(float_model, tmp_path / "nested", presets.resolve("nf4_double_quant"), "bitsandbytes")
    return tmp_path / "nested"


def test_states_that_bitsandbytes_wrote_are_of_any_length(nested):
    part = "model.layers.0.self_attn.q_proj.weight"
    before = open_source(read_model(nested)).read(part)

    def shorten(tensors):
        name = f"{part}.quant_state.bitsandbytes__nf4"
        text = json.dumps(json.loads(bytes(tensors[name].tolist()))).encode()
        assert len(text) < len(tensors[name])
        tensors[name] = torch.tensor(list(text), dtype=torch.uint8)

    edit_tensors(nested, shorten)
    assert torch.equal(open_source(read_model(nested)).read(part), before)


def test_scales_in_a_map_of_their_own_are_refused(nested):
    part = "model.layers.0.self_attn.q_proj.weight"
    edit_tensors(nested, lambda tensors: tensors[f"{part}.nested_quant_map"].mul_(2))
    with pytest.raises(ModelError, match="codes of a custom map"):
        open_source(read_model(nested)).read(part)


def publish_as_mxfp4(model_dir: Path) -> dict[str, torch.Tensor]:
    """Rewrite a gpt-oss model as it is published, with random codes; its experts in float, by Transformers itself."""
    tensors, expected = load_file(model_dir / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, width, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, rows, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 124, (num_experts, rows, width // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model_dir / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (model_dir / "config.json").write_text(json.dumps(config))
    return expected


def save_v4(folder: Path) -> None:
    save(build(find_class("DeepseekV4ForCausalLM")), folder)


def test_deepseek_v4_is_read_as_it_is_published(tmp_path):
    """Its block scales are called ``scale``: read as plain numbers, the codes would be thousands of times too large."""
    model_dir = tmp_path / "model"
    save_v4(model_dir)
    floats = load_file(model_dir / "model.safetensors")
    expected = publish_as_v4(model_dir)
    model = read_model(model_dir)
    source, planned = open_source(model), model.quantized.layers
    assert planned.keys() == expected.keys() and len(expected) > 200
    for name, weight in expected.items():
        assert torch.equal(source.read(name).float(), weight.to(torch.bfloat16).float()), name
        is_fp4 = planned[name].weight.dtype is Dtype.fp4
        assert is_fp4 == (".ffn.experts." in name)
        assert (weight - floats[name].float()).norm() < (0.2 if is_fp4 else 0.05) * floats[name].float().norm()
    config = presets.resolve("int8_weight_only")
    report = quantize(model_dir, tmp_path / "out", config, "fake_quantized", file2file=True)
    assert any("is already quantized (fp8)" in warning for warning in report["warnings"])
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all((written[name].float() - weight).norm() < 0.02 * weight.norm() for name, weight in expected.items())


def test_codes_of_another_layout_under_the_name_of_fp4_are_refused(tmp_path):
    save_v4(tmp_path)
    publish_as_v4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if ".ffn.experts." in name and name.endswith(".scale"))
    save_file({**tensors, name: tensors[name].float()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="not fp4 with e8m0 scales in groups of 32") as caught:
        read_model(tmp_path)
    assert caught.value.code == "unsupported_quantization"


def test_gpt_oss_is_read_as_it_is_published(tmp_path):
    model_dir = tiny_model(tmp_path / "model", model_type="gpt_oss", **MIXTURES["gpt_oss"])
    expected = publish_as_mxfp4(model_dir)
    found = read_model(model_dir)
    assert found.quantized.config.choose("model.layers.0.self_attn.q_proj", "Linear")[0] is None
    for name, stack in expected.items():
        experts, _, projection = name.rpartition(".")
        for index, weight in enumerate(stack):
            assert torch.equal(open_source(found).read(f"{experts}.{index}.{projection}.weight"), weight.T)
    quantize(model_dir, tmp_path / "out", presets.resolve("int8_weight_only"), "quark", "fake_quantized")
    written = load_file(tmp_path / "out/fake_quantized/model.safetensors")
    for name, stack in expected.items():
        assert written[name].shape == stack.shape
        assert (written[name] - stack).norm() < 0.01 * stack.norm()
    model, _ = quantcore.load(model_dir)
    plain, _ = quantcore.load(tmp_path / "out/fake_quantized")
    assert measured(model) == pytest.approx(measured(plain), rel=0.02)


def test_gpt_oss_is_converted_as_it_is_published(tmp_path):
    model_dir = tiny_model(tmp_path / "model", model_type="gpt_oss", **MIXTURES["gpt_oss"])
    expected = publish_as_mxfp4(model_dir)
    assert convert(model_dir, tmp_path / "plain", "fake_quantized", lambda event: None)["from"] == "mxfp4"
    assert convert(model_dir, tmp_path / "quark", "quark", lambda event: None)["to"] == "quark"
    written = load_file(tmp_path / "plain/model.safetensors")
    assert all(torch.equal(written[name], stack) for name, stack in expected.items())
    in_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).eval()
    again, _ = quantcore.load(tmp_path / "quark")
    assert measured(again) == pytest.approx(measured(in_transformers), rel=0.01)  # bfloat16, expert by expert here
    convert(model_dir, tmp_path / "nvfp4", "compressed_tensors", lambda event: None, with_nvfp4=True)
    as_nvfp4 = open_source(read_model(tmp_path / "nvfp4"))
    for name, stack in expected.items():
        experts, _, projection = name.rpartition(".")
        for index, weight in enumerate(stack):
            assert torch.equal(as_nvfp4.read(f"{experts}.{index}.{projection}.weight"), weight.T)


def test_a_float_model_is_loaded_as_it_is(float_model):
    model, config = quantcore.load(float_model)
    assert config is None and model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def gptq(float_model, tmp_path_factory):
    """A checkpoint to read only."""
    folder = tmp_path_factory.mktemp("gptq") / "out"
    with proving_here():
        quantize(float_model, folder, CONFIGS["int4"], "gptq")
    return folder


@pytest.fixture
def copied(gptq, tmp_path):
    """A copy to break."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in gptq.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def edit(folder: Path, **said):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= said
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


LAYER = "model.layers.0.self_attn.q_proj"
BROKEN = {
    "already_quantized": lambda m: edit(m, quant_method="hqq"),
    "invalid_quantization_config": lambda m: edit(m, bits="four"),
    "config_implausible": lambda m: edit_tensors(m, lambda t: t.update({f"{LAYER}.scales": t[f"{LAYER}.scales"][:1]})),
    "config_implausible ": lambda m: edit_tensors(m, lambda t: [t.pop(name) for name in list(t) if "qweight" in name]),
    "missing_tensors": lambda m: edit_tensors(m, lambda t: t.pop(f"{LAYER}.scales")),
    "unsupported_quantization": lambda m: edit_tensors(
        m, lambda t: t.update({f"{LAYER}.g_idx": t[f"{LAYER}.g_idx"].flip(0)})
    ),
    "unsupported_quantization ": lambda m: edit(m, dynamic={"+:(.*)*x": {"bits": 8}}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_says_why(copied, case):
    read_model(copied)
    BROKEN[case](copied)
    with pytest.raises(ModelError) as caught:
        read_model(copied)
    assert caught.value.code == case.strip() and caught.value.hint


def test_patterns_of_strangers_are_tried_only_where_they_end():
    assert matches(r".*\.down_proj$", "model.layers.0.mlp.down_proj")
    for pattern in ("(a+)+$", "(a|a)*$", ".*.*.*.*x"):
        with pytest.raises(ModelError, match="too many repetitions to be evaluated safely"):
            matches(pattern, "a" * 40)


REFUSED = {
    "awq": "its consumers|int4 and uint4|group_size",
    "bitsandbytes": "it supports nf4",
    "gptq": "in the gptq format already",
}


def test_conversions_that_would_lose_something_are_refused(float_model, gptq, tmp_path):
    def refused(model_dir, export):
        with pytest.raises(ConfigError) as caught:
            convert(model_dir, tmp_path / "new", export, lambda event: None)
        assert not (tmp_path / "new").exists()
        return caught.value

    assert refused(float_model, "gptq").code == "not_quantized"
    assert "already in the gptq format" in refused(gptq, "gptq").message
    assert "can only be written from float weights" in refused(gptq, "gguf").message
    assert "it supports nf4, fp4_bnb and int8" in refused(gptq, "bitsandbytes").message
    assert refused(gptq, "marlin").code == "unknown_export_format"
    quantize(float_model, tmp_path / "int8", presets.resolve("int8_dynamic"), "quark")
    error = refused(tmp_path / "int8", "fake_quantized")
    assert "stores only weights" in error.message and "compressed_tensors" in "".join(EXPORTERS)


def test_the_command_converts_and_explains(gptq, tmp_path, capsys):
    assert main(["convert", str(gptq), str(tmp_path / "awq"), "--to", "awq"]) == 0
    assert "13 layers to awq" in capsys.readouterr().out
    assert main(["convert", str(gptq), str(tmp_path / "bnb"), "--to", "bitsandbytes"]) == 1
    assert "Formats that can store" in capsys.readouterr().err
    assert main(["convert", str(gptq), str(tmp_path / "v2"), "--to", "gptq_v2", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[-1]["kind"] == "completed" and events[-1]["summary"]["num_layers"] == 13
