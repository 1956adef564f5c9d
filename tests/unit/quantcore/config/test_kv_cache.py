"""The KV cache: which layers hold it in real architectures, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantcore import Config, ConfigError, ModelQuantizer, QuantizationConfig, QuantizationSpec
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.cli.flags import parser
from quantcore.cli.from_flags import task_of
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.config.kv_cache import holds_keys_or_values
from quantcore.config.quantization import CalibrationConfig
from quantcore.engine.modules.layers import quantized_layers
from quantcore.importing.model import read_model
from quantcore.plan.planner import make_plan
from tests.support.models import MIXTURES, SHAPE, tiny_model

INT8 = QuantizationConfig(weight=QuantizationSpec(dtype="int8", qscheme="per_channel"))
FP8_KV = presets.resolve("fp8", kv_cache="fp8")
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4}


def plan(folder, config=FP8_KV, exports=("quark",)):
    headers = read_model(folder).headers
    calibration = CalibrationConfig(num_samples=2, seq_len=32)
    return make_plan(JobSpec(config=config, export=exports, calibration=calibration), headers)


def in_cache(layers):
    return [layer.name for layer in layers if layer.config.output_tensors is not None]


@pytest.mark.parametrize(
    ("model_type", "overrides", "blocks"),
    [
        ("llama", {}, (0, 1, 2)),
        ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}, (0, 1, 2)),
        ("gptj", {"rotary_dim": 8}, (0, 1, 2)),
        ("olmo_hybrid", LINEAR_ATTENTION, (1,)),
    ],
)
def test_keys_and_values_are_those_of_the_attention(tmp_path, model_type, overrides, blocks):
    """OLMo hybrid's linear attention has a k_proj and a v_proj as well, and keeps a state instead of a cache."""
    folder = tiny_model(tmp_path / "model", model_type=model_type, **overrides)
    found = plan(folder)
    assert {layer.block for layer in found.layers if layer.config.output_tensors} == set(blocks)
    names = in_cache(found.layers)
    assert len(names) == 2 * len(blocks) and all("linear_attn" not in name for name in names)


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("model.decoder.layers.0.self_attn.k_proj", True),
        ("model.decoder.layers.0.encoder_attn.v_proj", True),  # what it reads of the encoder is kept, too
        ("model.encoder.layers.0.self_attn.k_proj", False),
        ("text_encoder.layers.0.self_attn.v_proj", False),
        ("model.decoder.layers.0.self_attn.q_proj", False),
    ],
)
def test_an_encoder_keeps_no_cache(name, holds):
    assert holds_keys_or_values(name, [f"{name}.weight"]) is holds


FUSED = {
    "phi3": ({"tie_word_embeddings": False}, "qkv_proj"),
    "gpt_neox": ({"tie_word_embeddings": False}, "query_key_value"),
    "deepseek_v3": (MIXTURES["deepseek_v3"], "kv_b_proj"),
}


@pytest.mark.parametrize("model_type", FUSED)
def test_a_model_without_layers_for_keys_and_values_is_refused_with_what_there_is(tmp_path, model_type):
    overrides, layer = FUSED[model_type]
    folder = tiny_model(tmp_path / "model", model_type=model_type, **overrides)
    with pytest.raises(ConfigError, match=layer) as caught:
        plan(folder)
    assert (caught.value.code, caught.value.field) == ("kv_cache_not_found", "/kv_cache_quant_config")
    named = replace(FP8_KV, kv_cache_quant_config={f"*{layer}": FP8_KV.kv_cache_quant_config["*k_proj"]})
    with pytest.raises(ConfigError, match=layer):
        plan(folder, named)
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ConfigError, match=layer):
        ModelQuantizer(FP8_KV).quantize_model(model, [torch.arange(8)[None]])
    assert not any(quantized_layers(model)) or model_type == "deepseek_v3"
    assert all(torch.equal(parameter, before.get(name, parameter)) for name, parameter in model.named_parameters())


def test_outputs_of_a_fused_layer_are_held_by_no_format(tmp_path):
    """Asked for by layer_quant_config they are quantized in memory; consumers of files know keys and values alone."""
    folder = tiny_model(tmp_path / "model", model_type="phi3", tie_word_embeddings=False)
    layer = FP8_KV.choose("k_proj", "Linear")[0]
    config = replace(presets.resolve("fp8"), layer_quant_config={"*v_proj": layer})
    for export in ("quark", "compressed_tensors", "fp8"):
        with pytest.raises(ConfigError, match=r"outputs (only )?of k_proj"):
            plan(folder, config, (export,))


@pytest.mark.parametrize("change", [{"exclude": ["*.1.self_attn.v_proj"]}, {"kv_cache_quant_config": None}])
def test_a_cache_in_part_is_refused(tmp_path, change):
    folder = tiny_model(tmp_path / "model")
    if "kv_cache_quant_config" in change:
        change = {"kv_cache_quant_config": {"*k_proj": FP8_KV.kv_cache_quant_config["*k_proj"]}}
    with pytest.raises(ConfigError, match="but not in") as caught:
        plan(folder, replace(FP8_KV, **change))
    assert caught.value.code == "kv_cache_in_part"


def test_an_exclusion_of_all_keys_and_values_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no pattern .* matches a quantized layer; .*k_proj exists"):
        plan(tiny_model(tmp_path / "model"), replace(FP8_KV, exclude=("*k_proj", "*v_proj")))


def test_keys_of_another_width_than_the_heads_are_refused(tmp_path):
    folder = tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    headers = read_model(folder).headers
    with pytest.raises(ConfigError, match="k_proj has 32 outputs"):
        make_plan(JobSpec(config=FP8_KV), ModelHeaders({**config, "num_key_value_heads": 1}, headers.tensors))


def task(tmp_path, *flags):
    return task_of(parser().parse_args(["--model_dir", str(tmp_path), "--output_dir", "out", *flags]))


def test_a_kv_cache_and_a_scheme_of_the_same_layer_are_combined(tmp_path):
    config = task(tmp_path, "--kv_cache_dtype", "fp8", "--layer_quant_scheme", "*.0.*.k_proj", "int8_static").config
    layers = {layer.name: layer for layer in plan(tiny_model(tmp_path / "model"), config, ("quark",)).layers}
    first, second = (layers[f"model.layers.{index}.self_attn.k_proj"].config for index in (0, 1))
    assert (first.weight.dtype, first.input_tensors.dtype, first.output_tensors.dtype) == ("int8", "int8", "fp8_e4m3")
    assert (second.weight.dtype, second.output_tensors.dtype) == ("fp8_e4m3", "fp8_e4m3")


@pytest.mark.parametrize("differs", ["weight", "output_tensors"])
def test_two_schemes_for_the_same_tensor_are_refused(tmp_path, differs):
    whole = FP8_KV.choose("k_proj", "Linear")[0]
    other = replace(whole, **{differs: QuantizationSpec(dtype="int8")})
    config = replace(
        FP8_KV,
        kv_cache_quant_config={"*k_proj": whole, "*v_proj": whole},
        layer_quant_config={"*v_proj": other},
    )
    folder = tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=f"Two schemes for {differs} of .*v_proj") as caught:
        plan(folder, config)
    assert caught.value.code == "conflicting_schemes"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE))
    with pytest.raises(ConfigError, match=f"Two schemes for {differs}"):
        ModelQuantizer(config).quantize_model(model, [torch.arange(8)[None]])


def test_a_kv_cache_beside_a_float_weight_is_refused_for_files(tmp_path):
    config = Config(
        global_quant_config=INT8,
        layer_quant_config={"*_proj": QuantizationConfig()},
        kv_cache_quant_config=FP8_KV.kv_cache_quant_config,
    )
    with pytest.raises(ConfigError, match="quantized outputs but a float weight"):
        plan(tiny_model(tmp_path / "model"), config)


def test_a_config_that_says_its_own_cache_takes_no_second_one(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FP8_KV.to_dict()))
    with pytest.raises(ConfigError, match="has its own KV cache") as caught:
        task(tmp_path, "--quant_scheme", str(path), "--kv_cache_dtype", "fp8")
    assert caught.value.code == "conflicting_schemes"
