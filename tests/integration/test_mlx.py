"""The format of MLX: what is written is mlx-lm's layout, published files are read, and what does not fit is refused."""

import json
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import quantcore
from quantcore import ModelExporter, ModelQuantizer
from quantcore.config import presets
from quantcore.config.quantization import Config, parse_config
from quantcore.engine.commands.convert import convert
from quantcore.engine.containers.dequantize import open_source, read_layer
from quantcore.errors import ConfigError, ModelError, ProofError
from quantcore.importing.model import read_model
from quantcore.plan.inspection import inspect
from tests.support.models import MIXTURES, tiny_model
from tests.support.reading import measured, quantize

pytestmark = pytest.mark.usefixtures("proof_in_this_process")

LAYER = "model.layers.0.mlp.up_proj"
EMBEDDING = "model.embed_tokens"


def groups(dtype: str, size: int = 32, **spec: Any) -> dict[str, Any]:
    return {"weight": {"dtype": dtype, "qscheme": "per_group", "group_size": size, **spec}}


def every_mode(*, symmetric: bool) -> Config:
    """Return a config with another mode, width or group size for each kind of layer, and codes of the embedding."""
    if symmetric:
        spec, widths = {}, ("int2", "int3", "int4", "int5", "int6", "int8")
    else:
        spec, widths = (
            {"symmetric": False, "zero_point_type": "float32"},
            ("uint2", "int3", "uint4", "uint5", "int6", "uint8"),
        )
    kinds = ("q", "k", "v", "o", "gate", "up")
    layers = {f"*.{kind}_proj": groups(dtype, **spec) for kind, dtype in zip(kinds, widths, strict=True)}
    layers |= {
        "*.0.mlp.down_proj": groups("fp4", scale_type="e8m0"),
        "*.0.self_attn.o_proj": groups("fp8_e4m3", scale_type="e8m0"),
        EMBEDDING: groups("int6", 64),
    }
    usual, kept = groups("int4", 128), ["lm_head", "*.2.*q_proj"]
    return parse_config(
        {"global_quant_config": usual, "layer_quant_config": dict(reversed(layers.items())), "exclude": kept}
    )


@pytest.fixture(scope="module")
def float_model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module", params=[True, False], ids=["symmetric", "asymmetric"])
def written(request, float_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    config = every_mode(symmetric=request.param)
    report = quantize(float_model, folder, config, "mlx", "fake_quantized")
    return folder, config, report["summary"]["perplexity_after"]


def decoded(stored: dict[str, torch.Tensor], module: str, group_size: int, bits: int, mode: str) -> torch.Tensor:
    """Dequantize a weight by the formulas of ``mx.quantize``'s documentation, in float64."""
    words = stored[f"{module}.weight"].view(torch.int32).long() & 0xFFFFFFFF
    stream = ((words.unsqueeze(-1) >> torch.arange(32)) & 1).flatten(1)
    codes = (stream.view(len(words), -1, bits) << torch.arange(bits)).sum(-1).double()
    scales = stored[f"{module}.scales"]
    if mode == "affine":
        biases = stored[f"{module}.biases"].double().repeat_interleave(group_size, 1)
        return codes * scales.double().repeat_interleave(group_size, 1) + biases
    if mode == "mxfp4":
        steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        values = torch.cat([steps, -steps])[codes.long()]
    else:
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    return values * (2.0 ** (scales.double() - 127)).repeat_interleave(group_size, 1)


def test_weights_are_what_the_formulas_of_mlx_make_of_the_file(written):
    """To the bit for symmetric codes and floats; a real zero point costs a rounding of float32 (see ``QParams``)."""
    folder, _, _ = written
    settings = json.loads((folder / "mlx" / "config.json").read_text())["quantization"]
    usual = {key: settings[key] for key in ("group_size", "bits", "mode")}
    stored = load_file(folder / "mlx" / "model.safetensors")
    model = read_model(folder / "mlx")
    modules = [name.removesuffix(".scales") for name in stored if name.endswith(".scales")]
    assert len(modules) == 21
    seen = set()
    for module in modules:
        own = settings.get(module, usual)
        seen.add((own["mode"], own["bits"]))
        expected = decoded(stored, module, **own)
        plan = {**model.quantized.layers, **model.quantized.embeddings}[f"{module}.weight"]
        allowed = 0 if plan.weight.symmetric else expected.abs().max() * 2**-21
        assert (values_of(folder / "mlx", module).double() - expected).abs().max() <= allowed, module
    affine = {("affine", bits) for bits in (2, 3, 4, 5, 6, 8)}
    assert seen == affine | {("mxfp4", 4), ("mxfp8", 8)}


def values_of(folder, module):
    quantized = read_model(folder).quantized
    plan = {**quantized.layers, **quantized.embeddings}[f"{module}.weight"]
    return read_layer(quantized, plan).weight.dequantize()


def test_the_same_floats_and_model_are_found_again(written):
    folder, config, perplexity = written
    found, plain = (read_model(folder / export) for export in ("mlx", "fake_quantized"))
    assert found.quantized.export == "mlx" and "quantization" not in found.headers.config
    for name in plain.headers.tensors:
        assert torch.equal(open_source(found).read(name), open_source(plain).read(name)), name
    model, again = quantcore.load(folder / "mlx")
    assert measured(model) == pytest.approx(perplexity, rel=1e-6)
    assert again.choose(LAYER, "Linear")[0] == config.choose(LAYER, "Linear")[0]


def test_both_places_of_the_settings_say_the_same(written):
    folder, _, _ = written
    config = json.loads((folder / "mlx" / "config.json").read_text())
    ours, theirs = config["quantization_config"], config["quantization"]
    assert ours["quant_method"] == "mlx" and "quant_method" not in theirs
    named = {name for name, own in theirs.items() if isinstance(own, dict)}
    assert EMBEDDING in named and "model.layers.0.mlp.up_proj" in named
    for name in named:
        assert theirs[name].keys() == {"group_size", "bits", "mode"}
        assert {**ours[name], **theirs[name]} == ours[name]


def test_whole_zero_points_become_real_ones_and_the_job_says_so(float_model, tmp_path):
    report = quantize(float_model, tmp_path / "out", presets.resolve("w4a16"), "mlx")
    assert any("zero points as biases" in warning for warning in report["warnings"])
    [layer, *_] = read_model(tmp_path / "out").quantized.layers.values()
    assert layer.weight.zero_point_type == "float32" and not layer.weight.symmetric


def published(folder, settings):
    """Turn what we wrote into a file as mlx-lm publishes it, which has no word of ours, with a negative scale."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps({**config, **settings}))
    file = folder / "model.safetensors"
    stored = load_file(file)
    stored[f"{LAYER}.scales"][0, 0] *= -1
    save_file(stored, file, {"format": "mlx"})


def test_a_file_as_mlx_lm_publishes_it_is_read(float_model, tmp_path):
    quantize(float_model, tmp_path / "out", presets.resolve("w4a16_sym"), "mlx")
    before = values_of(tmp_path / "out", LAYER)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    published(tmp_path / "out", {"quantization_config": settings})
    after = values_of(tmp_path / "out", LAYER)
    assert torch.equal(before[1:], after[1:]) and not torch.equal(before[0], after[0])
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(after.double()[1:], decoded(stored, LAYER, 64, 4, "affine")[1:])
    torch.testing.assert_close(after.double(), decoded(stored, LAYER, 64, 4, "affine"), rtol=2**-22, atol=1e-7)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["quantization_config"]  # as mlx-lm wrote it at first
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert torch.equal(values_of(tmp_path / "out", LAYER), after)
    assert inspect(tmp_path / "out").quantization == {"quant_method": "unknown", "export": "mlx"}


@pytest.mark.parametrize("model", ["float_model", "mixture"])
def test_codes_go_to_other_formats_and_back(model, tmp_path, request):
    """Also those of experts, which lie in stacks in one of them."""
    formats = ("mlx", "compressed_tensors")
    quantize(request.getfixturevalue(model), tmp_path / "out", presets.resolve("w4a16_sym"), *formats)
    for source, target in (formats, formats[::-1]):
        convert(tmp_path / "out" / source, tmp_path / target, target, lambda event: None)
        made, expected = (load_file(folder / target / "model.safetensors") for folder in (tmp_path, tmp_path / "out"))
        assert made.keys() == expected.keys()
        assert all(torch.equal(made[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in made)


def test_nvfp4_of_mlx_has_one_as_the_scale_above_the_others(float_model, tmp_path):
    quantize(float_model, tmp_path / "out", presets.resolve("mxfp4_weight_only"), "mlx")
    path, file = tmp_path / "out" / "config.json", tmp_path / "out" / "model.safetensors"
    config, stored = json.loads(path.read_text()), load_file(file)
    for name in [name for name in stored if name.endswith(".scales")]:
        rows, num_groups = stored[name].shape
        stored[name] = torch.arange(2 * rows * num_groups).remainder(120).add(1).to(torch.uint8).view(rows, -1)
    save_file(stored, file)
    settings = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    path.write_text(json.dumps({**config, "quantization": settings, "quantization_config": settings}))
    scale = stored[f"{LAYER}.scales"].view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
    units = {**stored, f"{LAYER}.scales": torch.full((128, 2), 127, dtype=torch.uint8)}
    values = values_of(tmp_path / "out", LAYER)
    assert torch.equal(values.double(), decoded(units, LAYER, 32, 4, "mxfp4") * scale)
    convert(tmp_path / "out", tmp_path / "modelopt", "modelopt", lambda event: None)
    assert torch.equal(values_of(tmp_path / "modelopt", LAYER), values)
    with pytest.raises(ConfigError, match="no scale above"):
        quantize(tmp_path / "modelopt", tmp_path / "back", presets.resolve("nvfp4_weight_only"), "mlx")


def test_whole_zero_points_are_not_converted(float_model, tmp_path):
    """Their biases would be rounded, and real zero points are in no other format."""
    quantize(float_model, tmp_path / "awq", presets.resolve("w4a16"), "awq")
    with pytest.raises(ConfigError, match="whole zero points would be rounded") as refused:
        convert(tmp_path / "awq", tmp_path / "mlx", "mlx", lambda event: None)
    assert refused.value.code == "incompatible_export"
    quantize(float_model, tmp_path / "real", presets.resolve("w4a16"), "mlx")
    with pytest.raises(ConfigError, match="stored as whole numbers"):
        convert(tmp_path / "real", tmp_path / "back", "awq", lambda event: None)


def test_a_model_in_memory_is_written(float_model, tmp_path):
    def export(preset: str) -> None:
        config = presets.resolve(preset)
        quantizer = ModelQuantizer(config)
        frozen = quantizer.freeze(quantizer.quantize_model(AutoModelForCausalLM.from_pretrained(float_model)))
        ModelExporter(tmp_path / preset).export_safetensors_model(frozen, config, custom_mode="mlx")

    export("w4a16_sym")
    assert read_model(tmp_path / "w4a16_sym").quantized.export == "mlx"
    with pytest.raises(ConfigError, match="whole zero points would be rounded"):
        export("w4a16")


MXFP4 = groups("fp4", scale_type="e8m0")
REFUSED = {
    "groups of 16": (groups("int4", 16), "groups of 32, 64 or 128"),
    "channels": ({"weight": {"dtype": "int8", "qscheme": "per_channel"}}, "groups of 32, 64 or 128"),
    "float16 scales": (groups("int4", scale_type="float16"), "the model's own dtype"),
    "NVFP4": (groups("fp4", 16, scale_type="e4m3"), "no scale above"),
    "nf4": (groups("nf4", 64), "2, 3, 4, 5, 6 or 8 bits, MXFP4 and MXFP8"),
    "inputs": (
        {
            **groups("fp4", scale_type="e8m0"),
            "input_tensors": groups("fp4", scale_type="e8m0", is_dynamic=True)["weight"],
        },
        "only weights",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mlx_does_not_have_is_refused_before_any_work(float_model, tmp_path, name):
    own, reason = REFUSED[name]
    config = parse_config({"global_quant_config": own, "exclude": ["lm_head"]})
    with pytest.raises(ConfigError, match=reason) as refused:
        quantize(float_model, tmp_path / "out", config, "mlx")
    assert refused.value.code == "incompatible_export" and not (tmp_path / "out").exists()


def test_models_without_a_class_and_unequal_experts_are_refused(tmp_path):
    opt = tiny_model(tmp_path / "opt", model_type="opt", word_embed_proj_dim=64, ffn_dim=128)
    with pytest.raises(ConfigError, match=r"mlx-lm 0\.32\.2 has no class for model_type 'opt'"):
        quantize(opt, tmp_path / "out", presets.resolve("w4a16_sym"), "mlx")
    mixture = tiny_model(tmp_path / "mixture", model_type="mixtral", **MIXTURES["mixtral"])
    left_out = replace(presets.resolve("w4a16_sym"), exclude=("lm_head", "*.1.*.experts.2.w3"))
    with pytest.raises(ConfigError, match=r"experts\.0\.w3\.weight and .*experts\.2\.w3\.weight are quant"):
        quantize(mixture, tmp_path / "out", left_out, "mlx")


MOE = "model.layers.1.mlp"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("mixture") / "m", model_type="qwen3_moe", **MIXTURES["qwen3_moe"])


def test_experts_are_written_in_stacks_and_found_again(mixture, tmp_path):
    """The stacks hold the experts in order; what is read back is the model that was made."""
    config = parse_config(
        {"global_quant_config": groups("int4"), "layer_quant_config": {"*.experts.*.down_proj": groups("int8")},
         "exclude": ["lm_head", "*.gate", "*.0.mlp.experts.*"]}
    )  # fmt: skip
    report = quantize(mixture, tmp_path, config, "mlx", "fake_quantized", max_shard_size="100KB")
    stored = {}
    for file in (tmp_path / "mlx").glob("model*.safetensors"):
        stored |= load_file(file)
    assert not [name for name in stored if ".experts." in name]
    found, plain = (read_model(tmp_path / export) for export in ("mlx", "fake_quantized"))
    assert found.headers.tensors.keys() == plain.headers.tensors.keys()
    for name in plain.headers.tensors:
        assert torch.equal(open_source(found).read(name), open_source(plain).read(name)), name
    settings = json.loads((tmp_path / "mlx" / "config.json").read_text())["quantization"]
    usual = {key: settings[key] for key in ("group_size", "bits", "mode")}
    for projection, bits in (("gate_proj", 4), ("down_proj", 8)):
        stack = f"{MOE}.switch_mlp.{projection}"
        own = settings.get(stack, usual)
        assert own["bits"] == bits
        for index in range(4):
            one = {f"{stack}.{part}": stored[f"{stack}.{part}"][index] for part in ("weight", "scales", "biases")}
            expected = open_source(plain).read(f"{MOE}.experts.{index}.{projection}.weight")
            assert torch.equal(decoded(one, stack, **own).to(expected.dtype), expected)
    assert stored["model.layers.0.mlp.switch_mlp.up_proj.weight"].shape[0] == 4  # floats
    model, _ = quantcore.load(tmp_path / "mlx")
    assert measured(model) == pytest.approx(report["summary"]["perplexity_after"], rel=1e-6)


def test_the_proof_sees_two_experts_in_each_others_place(mixture, tmp_path, monkeypatch, proof_in_this_process):
    def swap(task, folder, expected, emit):
        stored = load_file(folder / "model.safetensors")
        for part in ("weight", "scales", "biases"):
            stored[f"{MOE}.switch_mlp.up_proj.{part}"] = stored[f"{MOE}.switch_mlp.up_proj.{part}"][[1, 0, 2, 3]]
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        return proof_in_this_process(task, folder, expected, emit)

    monkeypatch.setattr("quantcore.engine.pipeline.job.prove_in_fresh_process", swap)
    with pytest.raises(ProofError, match=r"model\.layers\.1\.mlp\.experts\.[01]\.up_proj\.weight"):
        quantize(mixture, tmp_path / "out", presets.resolve("w4a16_sym"), "mlx")


def test_unequal_experts_of_a_stack_are_refused_before_any_work(mixture, tmp_path):
    config = parse_config(
        {"global_quant_config": groups("int4"), "layer_quant_config": {"*.experts.2.up_proj": groups("int8")},
         "exclude": ["lm_head"]}
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"experts\.0\.up_proj\.weight and .*experts\.2\.up_proj\.weight are quant"):
        quantize(mixture, tmp_path / "out", config, "mlx")
    assert not (tmp_path / "out").exists()


def damaged(stored: dict[str, torch.Tensor], settings: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    """Return ways to damage a file, each with what is said about it: tensors, or settings in a dict ``config``."""
    scales, words = stored[f"{LAYER}.scales"], stored[f"{LAYER}.weight"]
    return {
        "no biases": ({f"{LAYER}.biases": None}, "missing_tensors"),
        "no weight": ({f"{LAYER}.weight": None}, "missing_tensors"),
        "other shape": ({f"{LAYER}.scales": scales[1:].contiguous()}, "config_implausible"),
        "other words": ({f"{LAYER}.weight": words.view(torch.int32)}, "unsupported_quantization"),
        "a stack": ({f"{LAYER}.weight": words[None].contiguous()}, "unsupported_quantization"),
        "nan": ({f"{LAYER}.scales": torch.full_like(scales, nan)}, "nonfinite_weights"),
        "infinite": ({f"{LAYER}.biases": torch.full_like(scales, inf)}, "nonfinite_weights"),
        "not symmetric": ({f"{LAYER}.biases": torch.zeros_like(scales)}, "config_implausible"),
        "7 bits": ({"config": {**settings, "bits": 7}}, "unsupported_quantization"),
        "no bits": ({"config": {**settings, "bits": None}}, "invalid_quantization_config"),
        "other bits": ({"config": {**settings, "bits": 8}}, "unsupported_quantization"),
        "unknown mode": ({"config": {**settings, "mode": "mxfp9"}}, "unsupported_quantization"),
        "mode of other codes": ({"config": {**settings, "mode": "mxfp4"}}, "unsupported_quantization"),
        "no settings of a layer": ({"config": {**settings, LAYER: "x"}}, "invalid_quantization_config"),
    }


def test_damaged_files_are_refused_by_name(float_model, tmp_path):
    quantize(float_model, tmp_path / "out", presets.resolve("w4a16_sym"), "mlx")
    file, path = tmp_path / "out" / "model.safetensors", tmp_path / "out" / "config.json"
    stored, config = load_file(file), json.loads(path.read_text())
    for what, (changes, code) in damaged(stored, config["quantization_config"]).items():
        own = changes.pop("config", config["quantization_config"])
        path.write_text(json.dumps({**config, "quantization_config": own}))
        save_file({name: each for name, each in {**stored, **changes}.items() if each is not None}, file)
        try:
            model = read_model(tmp_path / "out")
            for name in model.headers.tensors:
                open_source(model).read(name)
            refusal = "none"
        except ModelError as error:
            refusal = error.code
        assert refusal == code, what
