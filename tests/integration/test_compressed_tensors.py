"""Tiny models in every layout of compressed-tensors, from the engine to Transformers.

Transformers decompresses them on a CPU: the weights that it then multiplies with must be those of ``fake_quantized``,
which the same job wrote. Not here: asymmetric integers, at which Transformers 5.23 fails (it makes room for zero
points that are not packed); tests/consumers has vLLM read those of four bits.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantcore.config import presets
from quantcore.config.quantization import Config, QuantizationConfig, QuantizationSpec, parse_config
from quantcore.engine.pipeline.job import run
from quantcore.errors import ConfigError
from tests.support.jobs import math_close, perplexity_of, task
from tests.support.models import tiny_model
from tests.support.params import with_rare

ODD = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 1}
BLOCKED = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "num_key_value_heads": 4}


def weight_only(**spec):
    return QuantizationConfig(weight=QuantizationSpec(**spec))


LAYER_CONFIGS = {
    **{name: presets.PRESETS[name].layer_config for name in (
        "nvfp4_weight_only", "nvfp4", "mxfp4_weight_only", "mxfp4", "mxfp6_e2m3", "mxfp8",
    )},
    "mxfp8_weight_only": QuantizationConfig(weight=presets.PRESETS["mxfp8"].layer_config.weight),
    "int2": weight_only(dtype="int2", qscheme="per_group", group_size=32),
    "int3": weight_only(dtype="int3", qscheme="per_group", group_size=32),
    "int8_groups": weight_only(dtype="int8", qscheme="per_group", group_size=32),
    "fp8_weight_only": weight_only(dtype="fp8_e4m3", qscheme="per_channel"),
    "fp8_block_weight_only": weight_only(dtype="fp8_e4m3", qscheme="per_block", block_size=(64, 32)),
}  # fmt: skip


def export(model_dir, folder, config, formats=("compressed_tensors", "fake_quantized")):
    return run(task(model_dir, folder, config=config, export=formats), lambda event: None).to_dict()


def assert_loads_as(folder, path, expected_perplexity, tolerance, nvfp4=()):
    """Load ``path`` in Transformers: its weights are those of ``folder``/fake_quantized.

    Layers whose names end in one of ``nvfp4`` may be a unit in the last place away: their scales are divided by a
    reciprocal there.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    assert math_close(perplexity_of(model), expected_perplexity, tolerance)  # and weights are decompressed now
    expected = load_file(folder / "fake_quantized" / "model.safetensors")
    layers = {name: module for name, module in model.named_modules() if name.endswith("_proj")}
    assert len(layers) == 21
    for name, module in layers.items():
        ours, theirs = expected[f"{name}.weight"], module.weight.detach()
        if name.endswith(nvfp4):
            assert torch.isclose(theirs, ours, rtol=2.0**-7, atol=0).all(), name
            assert (theirs != ours).float().mean() < 0.01, name
        else:
            assert torch.equal(theirs, ours), name


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("odd") / "model", **ODD)


RARE = (
    "nvfp4_weight_only",
    "mxfp4_weight_only",
    "mxfp8",
    "mxfp8_weight_only",
    "int2",
    "int8_groups",
    "fp8_weight_only",
    "mxfp6_e2m3",
)


@pytest.mark.parametrize("name", with_rare(LAYER_CONFIGS, RARE))
def test_transformers_reads_every_layout(odd_model, tmp_path, proof_in_this_process, name):
    """Perplexity: to rounding where inputs are not quantized; others are quantized in bfloat16 there, in float32 here,
    and a random model makes much of it."""
    layer = LAYER_CONFIGS[name]
    report = export(odd_model, tmp_path / "out", Config(global_quant_config=layer, exclude=("lm_head",)))
    assert_loads_as(
        tmp_path / "out", tmp_path / "out" / "compressed_tensors", report["summary"]["perplexity_after"],
        tolerance=1e-4 if layer.input_tensors is None else 0.2, nvfp4=("_proj",) if name.startswith("nvfp4") else (),
    )  # fmt: skip


def test_transformers_reads_blocks_of_fp8_in_both_formats(tmp_path, proof_in_this_process):
    model_dir = tiny_model(tmp_path / "model", **BLOCKED)
    formats = ("compressed_tensors", "fp8", "fake_quantized")
    report = export(model_dir, tmp_path / "out", presets.resolve("fp8_block"), formats)
    for name in formats[:2]:
        assert_loads_as(tmp_path / "out", tmp_path / "out" / name, report["summary"]["perplexity_after"], 0.05)
    fp8 = load_file(tmp_path / "out" / "fp8" / "model.safetensors")
    foreign = load_file(tmp_path / "out" / "compressed_tensors" / "model.safetensors")
    scale = fp8["model.layers.0.mlp.down_proj.weight_scale_inv"]
    assert scale.dtype == torch.float32 and scale.shape == (1, 3)
    assert torch.equal(foreign["model.layers.0.mlp.down_proj.weight_scale"].float(), scale)
    said = json.loads((tmp_path / "out" / "fp8" / "config.json").read_text())["quantization_config"]
    assert (said["activation_scheme"], said["weight_block_size"]) == ("dynamic", [128, 128])


def test_blocks_that_do_not_fill_a_weight_are_refused_where_a_reader_would_take_them_for_smaller_ones(tmp_path):
    """Transformers reads 192 rows in 2 blocks as two of 96. compressed-tensors says how long a block is."""
    model_dir = tiny_model(tmp_path / "model", **{**BLOCKED, "num_key_value_heads": 2})
    with pytest.raises(ConfigError, match=r"k_proj .*blocks of 128 output channels must fill all 64"):
        export(model_dir, tmp_path / "out", presets.resolve("fp8_block"), ("fp8",))
    with pytest.raises(ConfigError, match="The fp8 format has one block_size of weights for all layers"):
        config = Config(
            global_quant_config=presets.PRESETS["fp8"].layer_config,
            layer_quant_config={"*.down_proj": presets.PRESETS["fp8_block"].layer_config},
        )
        export(model_dir, tmp_path / "out", config, ("fp8",))


def test_schemes_side_by_side_with_a_cache_and_a_layer_left_out(odd_model, tmp_path, proof_in_this_process):
    config = Config(
        global_quant_config=presets.PRESETS["mxfp4_weight_only"].layer_config,
        layer_quant_config={
            "*.down_proj": presets.PRESETS["int4_wo_32"].layer_config,
            "*.0.*.o_proj": LAYER_CONFIGS["fp8_weight_only"],
            "*.gate_proj": presets.PRESETS["nvfp4_weight_only"].layer_config,
            "*.up_proj": presets.PRESETS["nvfp4_weight_only"].layer_config,
        },
        exclude=("lm_head", "*.1.*.down_proj"),
    )
    report = export(odd_model, tmp_path / "out", presets.with_kv_cache(config, "fp8"))
    path = tmp_path / "out" / "compressed_tensors"
    said = json.loads((path / "config.json").read_text())["quantization_config"]
    assert said["format"] == "mixed-precision"
    assert {group["format"]: len(group["targets"]) for group in said["config_groups"].values()} == {
        "mxfp4-pack-quantized": 11, "pack-quantized": 2, "float-quantized": 1, "nvfp4-pack-quantized": 6,
    }  # fmt: skip
    assert sorted(said["ignore"]) == ["lm_head", "model.layers.1.mlp.down_proj"]
    stored = load_file(path / "model.safetensors")
    assert {name for name in stored if name.endswith(("k_scale", "v_scale"))} == {
        f"model.layers.{block}.self_attn.{part}_scale" for block in range(3) for part in "kv"
    }
    assert "model.layers.1.mlp.down_proj.weight" in stored
    nvfp4 = ("gate_proj", "up_proj")
    assert_loads_as(tmp_path / "out", path, report["summary"]["perplexity_after"], 0.05, nvfp4)


@pytest.mark.parametrize("algorithm", with_rare(["rtn", "gptq", "awq+gptq"], ["gptq"]))
def test_layers_that_vllm_computes_in_one_product_have_one_global_scale(
    odd_model, tmp_path, proof_in_this_process, algorithm
):
    steps = [] if algorithm == "rtn" else [{"name": name} for name in algorithm.split("+")]
    config = parse_config({**presets.resolve("nvfp4_weight_only").to_dict(), "algo_config": steps})
    export(odd_model, tmp_path / "out", config)
    stored = load_file(tmp_path / "out" / "compressed_tensors" / "model.safetensors")
    for block in range(3):
        for module, names in {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}.items():
            scales = [stored[f"model.layers.{block}.{module}.{name}.weight_global_scale"] for name in names]
            assert all(torch.equal(scale, scales[0]) for scale in scales), (block, module, scales)
    down = {stored[f"model.layers.{block}.mlp.down_proj.weight_global_scale"].item() for block in range(3)}
    assert len(down) == 3
