"""The format of NVIDIA ModelOpt: what is written is ModelOpt's layout, and what cannot be read is refused by name."""

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantcore.config import presets
from quantcore.config.layer_plan import usual_layers
from quantcore.engine.commands.convert import convert
from quantcore.engine.containers.dequantize import open_source
from quantcore.errors import ConfigError, ModelError
from quantcore.export import check_exports
from quantcore.importing.model import read_model
from tests.support.modelopt import STEPS, publish_as_nvfp4
from tests.support.models import MIXTURES, tiny_model
from tests.support.reading import quantize

pytestmark = pytest.mark.usefixtures("proof_in_this_process")

FP8 = presets.resolve("fp8").global_quant_config
FP8_NUMBERS = {"dynamic": False, "num_bits": 8, "type": "float"}
NVFP4_NUMBERS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
MXFP8_NUMBERS = {"dynamic": False, "num_bits": 8, "type": "float", "group_size": 32}
LAYER = "model.layers.0.self_attn.k_proj"


@pytest.fixture(scope="module")
def float_model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def written(float_model, tmp_path_factory):
    """One job in several formats: NVFP4, its first block in fp8, and scales of an fp8 cache."""
    config = presets.resolve("nvfp4", kv_cache="fp8")
    config = replace(config, layer_quant_config={"model.layers.1.*": FP8})
    folder = tmp_path_factory.mktemp("written")
    quantize(float_model, folder, config, "modelopt", "compressed_tensors", "fake_quantized")
    return folder


def decoded(stored, module):
    """Dequantize a weight as ModelOpt's ``NVFP4QTensor.dequantize`` and ``FP8QTensor.dequantize`` do, in float32."""
    codes, scale = stored[f"{module}.weight"], stored[f"{module}.weight_scale"].float()
    if codes.dtype is torch.float8_e4m3fn:
        return codes.float() * scale
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).view(len(codes), -1).long()
    values = torch.cat([STEPS, -STEPS])[nibbles].view(len(codes), -1, 16)
    return (values * (scale * stored[f"{module}.weight_scale_2"]).unsqueeze(-1)).flatten(1)


def modules_in(stored):
    return [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]


def test_weights_are_what_modelopts_formula_makes_of_the_file(written):
    stored = load_file(written / "modelopt" / "model.safetensors")
    plain = load_file(written / "fake_quantized" / "model.safetensors")
    sources = [open_source(read_model(written / export)) for export in ("modelopt", "compressed_tensors")]
    modules = modules_in(stored)
    assert len(modules) == 21
    for module in modules:
        name = f"{module}.weight"
        expected = decoded(stored, module).to(plain[name].dtype)
        assert torch.equal(expected, plain[name]), name
        assert all(torch.equal(source.read(name), expected) for source in sources), name


def test_tensors_have_the_names_and_types_of_a_file_by_modelopt(tmp_path, float_model):
    by_hand = tiny_model(tmp_path / "by_hand")
    publish_as_nvfp4(by_hand, has_own_file=True)
    quantize(float_model, tmp_path / "out", presets.resolve("nvfp4"), "modelopt")
    of_hand, of_ours = (
        {name: (tensor.dtype, tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
        for folder in (by_hand, tmp_path / "out")
    )
    assert of_ours == of_hand


def test_fused_layers_share_the_scale_of_scales(written):
    stored = load_file(written / "modelopt" / "model.safetensors")
    for part in ("weight_scale_2", "input_scale"):
        queries, keys, values = (stored[f"model.layers.0.self_attn.{name}_proj.{part}"] for name in "qkv")
        gate, up = (stored[f"model.layers.0.mlp.{name}_proj.{part}"] for name in ("gate", "up"))
        assert queries == keys == values and gate == up


def described(folder):
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    own = json.loads((folder / "hf_quant_config.json").read_text())
    assert config["quant_method"] == "modelopt" and own["producer"] == config["producer"]
    assert own["quantization"]["exclude_modules"] == config["ignore"]
    assert own["quantization"]["quant_algo"] == config["quant_algo"]
    return config, own["quantization"]


def test_both_files_list_the_layers_of_a_mix(written):
    config, own = described(written / "modelopt")
    layers = own["quantized_layers"]
    assert config["quantized_layers"] == layers and config["quant_algo"] == "MIXED_PRECISION"
    assert layers[LAYER] == {"quant_algo": "NVFP4", "group_size": 16} and len(layers) == 21
    assert layers[LAYER.replace("0", "1")] == {"quant_algo": "FP8"}
    groups = list(config["config_groups"].values())
    assert [group["weights"] for group in groups] == [NVFP4_NUMBERS, FP8_NUMBERS]
    assert sorted(name for group in groups for name in group["targets"]) == sorted(layers)
    assert config["kv_cache_scheme"] == FP8_NUMBERS and own["kv_cache_quant_algo"] == "FP8"


@pytest.mark.parametrize(
    ("preset", "algorithm", "group"),
    [
        ("nvfp4", "NVFP4", {"input_activations": NVFP4_NUMBERS, "weights": NVFP4_NUMBERS}),
        ("nvfp4_weight_only", "W4A16_NVFP4", {"weights": NVFP4_NUMBERS}),
        ("fp8", "FP8", {"input_activations": FP8_NUMBERS, "weights": FP8_NUMBERS}),
        ("mxfp8", "MXFP8", {"input_activations": MXFP8_NUMBERS, "weights": MXFP8_NUMBERS}),
    ],
)
def test_both_files_name_the_one_algorithm(float_model, tmp_path, preset, algorithm, group):
    quantize(float_model, tmp_path / "out", presets.resolve(preset), "modelopt")
    config, own = described(tmp_path / "out")
    assert config["config_groups"] == {"group_0": {**group, "targets": ["Linear"]}}
    assert (config["quant_algo"], own["kv_cache_quant_algo"], config["ignore"]) == (algorithm, None, ["lm_head"])
    assert own.get("group_size") == {"fp8": None, "mxfp8": 32}.get(preset, 16)
    (tmp_path / "out" / "config.json").write_text(  # as before ModelOpt 0.35
        json.dumps({key: value for key, value in json.loads((tmp_path / "out/config.json").read_text()).items()
                    if key != "quantization_config"})
    )  # fmt: skip
    layers = read_model(tmp_path / "out").quantized.layers.values()
    assert {layer.input_tensors is None for layer in layers} == {algorithm == "W4A16_NVFP4"}


def test_a_mixture_stores_each_expert_and_there_and_back_loses_no_code(tmp_path):
    model_dir = tiny_model(tmp_path / "model", model_type="qwen2_moe", **MIXTURES["qwen2_moe"])
    quantize(model_dir, tmp_path / "out", presets.resolve("nvfp4"), "modelopt")
    convert(tmp_path / "out", tmp_path / "other", "compressed_tensors", lambda event: None)
    convert(tmp_path / "other", tmp_path / "back", "modelopt", lambda event: None)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert described(tmp_path / "out") == described(tmp_path / "back")
    experts = {name.rpartition(".")[2] for name in before if ".mlp.experts.1.down_proj." in name}
    assert experts == {"weight", "weight_scale", "weight_scale_2", "input_scale"}
    assert "model.layers.0.mlp.gate" in described(tmp_path / "out")[0]["ignore"]


@pytest.mark.parametrize("preset", ["w4a16_sym", "mxfp4", "fp8_block", "fp8_dynamic", "int8_dynamic"])
def test_other_schemes_are_refused_with_the_presets_that_fit(preset):
    with pytest.raises(ConfigError, match="The modelopt format cannot store") as caught:
        check_exports(usual_layers(presets.resolve(preset)), ("modelopt",))
    assert caught.value.code == "incompatible_export"
    fitting = caught.value.hint.split("Presets that modelopt can store: ")[1].split(".")[0].split(", ")
    assert {*fitting} == {"nvfp4", "nvfp4_weight_only", "fp8", "mxfp8"}


def edit_tensors(folder: Path, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_layers(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def filled(part, value):
    return lambda folder: edit_tensors(folder, lambda t: t[f"{LAYER}.{part}"].fill_(value))


def without(part):
    return lambda folder: edit_tensors(folder, lambda t: t.pop(f"{LAYER}.{part}"))


def transposed(tensors):
    tensors[f"{LAYER}.weight_scale"] = tensors[f"{LAYER}.weight_scale"].T.contiguous()


FP8_LAYER = LAYER.replace("0", "1")
HOSTILE = {
    "no group scales": (without("weight_scale"), f"{LAYER}.weight holds codes"),
    "no scale of scales": (without("weight_scale_2"), f"{LAYER}.weight_scale_2"),
    "no input scale": (without("input_scale"), f"{LAYER}.input_scale"),
    "no codes": (without("weight"), f"{LAYER}.weight'"),
    "scales of another shape": (lambda m: edit_tensors(m, transposed), f"{LAYER}.weight_scale is F8_E4M3"),
    "scales of another type": (
        lambda m: edit_tensors(m, lambda t: t.update({f"{LAYER}.weight_scale": t[f"{LAYER}.weight_scale"].float()})),
        f"{LAYER}.weight_scale is F32",
    ),
    "a scale for each row": (
        lambda m: edit_tensors(m, lambda t: t.update({f"{FP8_LAYER}.weight_scale": torch.ones(32)})),
        f"{FP8_LAYER}.weight_scale' has the shape",
    ),
    "integers for codes": (
        lambda m: edit_tensors(m, lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].view(torch.int8)})),
        f"{LAYER}.weight is I8",
    ),
    "codes of another algorithm": (
        lambda m: edit_layers(m, lambda c: c["quantized_layers"][LAYER].update(quant_algo="FP8")),
        f"{LAYER}.weight is U8, but codes of FP8 are F8_E4M3",
    ),
    "input scales without quantized inputs": (
        lambda m: edit_layers(m, lambda c: c["quantized_layers"][LAYER].update(quant_algo="W4A16_NVFP4")),
        f"there is {LAYER}.input_scale",
    ),
    "a layer that is not listed": (
        lambda m: edit_layers(m, lambda c: c["quantized_layers"].pop(LAYER)), f"does not name {LAYER}",
    ),
    "a name without a layer": (
        lambda m: edit_layers(m, lambda c: c["quantized_layers"].update({"model.layers.9": {"quant_algo": "FP8"}})),
        "there is no model.layers.9.weight_scale",
    ),
    "an unknown algorithm": (
        lambda m: edit_layers(m, lambda c: c["quantized_layers"][LAYER].update(quant_algo="NVFP4_AWQ")), "'NVFP4_AWQ'",
    ),
    "no list": (lambda m: edit_layers(m, lambda c: c.pop("quantized_layers")), "quantized_layers"),
    "another cache": (
        lambda m: edit_layers(m, lambda c: c.update(kv_cache_scheme="NVFP4")), "k_proj.k_scale, but its description",
    ),
    "NaN among group scales": (filled("weight_scale", nan), f"'{LAYER}.weight_scale' has a scale that is NaN"),
    "NaN for the scale of scales": (filled("weight_scale_2", nan), f"'{LAYER}.weight_scale_2' has a scale that is NaN"),
    "an infinite input scale": (filled("input_scale", inf), f"'{LAYER}.input_scale' has a scale that is NaN"),
    "NaN for the cache": (filled("k_scale", nan), f"'{LAYER}.k_scale' has a scale that is NaN"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_damaged_files_are_refused_by_the_name_of_the_tensor(written, tmp_path, case):
    damage, named = HOSTILE[case]
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((written / "modelopt" / name).read_bytes())
    assert open_source(read_model(tmp_path)).read(f"{LAYER}.weight").isfinite().all()
    damage(tmp_path)
    with pytest.raises(ModelError) as caught:
        open_source(read_model(tmp_path)).read(f"{LAYER}.weight")
    assert named in str(caught.value)


def test_a_module_may_stand_for_its_layers(written, tmp_path):
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((written / "modelopt" / name).read_bytes())
    before = read_model(tmp_path).quantized.layers

    def by_module(config):
        names = {name.rpartition(".")[0]: entry for name, entry in config["quantized_layers"].items()}
        config["quantized_layers"] = names

    edit_layers(tmp_path, by_module)
    assert read_model(tmp_path).quantized.layers == before


@pytest.mark.parametrize("has_own_file", [True, False])
def test_nvfp4_of_modelopt_is_read(tmp_path, has_own_file):
    model_dir = tiny_model(tmp_path / "model", dtype=torch.float32)
    expected = publish_as_nvfp4(model_dir, has_own_file=has_own_file)
    model = read_model(model_dir)
    source = open_source(model)
    assert model.quantized.format == "modelopt" and len(expected) == len(model.quantized.layers) == 21
    for name, weight in expected.items():
        torch.testing.assert_close(source.read(name), weight, rtol=1e-6, atol=1e-8)
    assert all(layer.scheme.startswith("fp4 per_group 16 e4m3 + fp4") for layer in model.quantized.layers.values())
    convert(model_dir, tmp_path / "quark", "quark", lambda event: None)
    assert not (tmp_path / "quark" / "hf_quant_config.json").exists()
    again = open_source(read_model(tmp_path / "quark"))
    assert all(torch.equal(again.read(name), source.read(name)) for name in expected)


def test_mxfp8_is_modelopts_formula_there_and_back(float_model, tmp_path):
    """ModelOpt's ``MXFP8QTensor``: fp8 times 2^(byte - 127), a byte for 32 values of a row; nothing of the inputs."""
    quantize(float_model, tmp_path / "out", presets.resolve("mxfp8"), "modelopt", "fake_quantized", file2file=True)
    stored, plain = (
        load_file(tmp_path / "out" / name / "model.safetensors") for name in ("modelopt", "fake_quantized")
    )
    assert {name.rpartition(".")[2] for name in stored if ".q_proj." in name} == {"weight", "weight_scale"}
    for module in modules_in(stored):
        codes, scale = stored[f"{module}.weight"], stored[f"{module}.weight_scale"]
        assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.uint8)
        values = codes.float() * torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)
        assert torch.equal(values.to(torch.bfloat16), plain[f"{module}.weight"])
    convert(tmp_path / "out/modelopt", tmp_path / "ct", "compressed_tensors", lambda event: None)
    convert(tmp_path / "ct", tmp_path / "back", "modelopt", lambda event: None)
    back = load_file(tmp_path / "back/model.safetensors")
    assert all(torch.equal(back[name].view(torch.uint8), stored[name].view(torch.uint8)) for name in stored)
    edit_tensors(tmp_path / "back", lambda tensors: tensors.update({f"{LAYER}.input_scale": torch.ones(())}))
    with pytest.raises(ModelError, match="inputs of MXFP8 have no scale in the files"):
        read_model(tmp_path / "back")


def test_other_algorithms_of_modelopt_are_refused(tmp_path):
    model_dir = tiny_model(tmp_path / "model", dtype=torch.float32)
    publish_as_nvfp4(model_dir, has_own_file=False)
    config = json.loads((model_dir / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "W4A8_AWQ"
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="by ModelOpt, with the algorithm 'W4A8_AWQ'") as caught:
        read_model(model_dir)
    assert caught.value.code == "already_quantized" and "NVFP4, W4A16_NVFP4" in caught.value.hint
