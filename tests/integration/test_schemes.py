"""Schemes beyond 8-bit integers, through the whole engine: MX, NVFP4, two stages, and quantized KV caches."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantcore.config import presets
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.data.windows import DocumentTokenizer, token_windows
from quantcore.engine.pipeline.job import run
from quantcore.errors import ConfigError
from tests.support.models import tiny_model, tiny_tokenizer
from tests.support.params import with_rare
from tests.support.proofs import proving_here

CALIBRATION = CalibrationConfig(num_samples=4, seq_len=64)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def quantize(model_dir, output_dir, preset, export=("quark",), **changes):
    task = Task(
        model_dir=model_dir,
        output_dir=output_dir,
        config=presets.resolve(preset, **changes),
        calibration=CALIBRATION,
        evaluation=EvaluationConfig(num_windows=3, seq_len=64, num_prompts=0),
        export=export,
    )
    return run(task, lambda event: None).to_dict()


@pytest.mark.parametrize(
    "preset", with_rare(["mxfp4", "mxfp6_e3m2", "mxfp8", "mxfp4_fp8", "nvfp4", "int4_fp8"], ["mxfp6_e3m2", "mxfp8"])
)
def test_blocks_and_stages_are_written_proven_and_near_the_float_model(model_dir, tmp_path, preset, request):
    request.getfixturevalue("proof_in_this_process")
    report = quantize(model_dir, tmp_path / "out", preset)
    bits = presets.PRESETS[preset].layer_config.weight.format.bits
    limit = {8: 1.05, 6: 1.1, 4: 1.6}[bits]
    assert 0.8 < report["summary"]["perplexity_ratio"] < limit
    assert report["proof"]["quark"]["max_logit_difference"] == 0
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    weight = stored["global_quant_config"]["weight"]
    assert (weight[-1] if isinstance(weight, list) else weight)["qscheme"] in ("per_group", "per_channel", "per_tensor")


@pytest.fixture(scope="module")
def with_kv_cache(model_dir, tmp_path_factory):
    """fp8 with an fp8 KV cache in the three formats that know one."""
    folder = tmp_path_factory.mktemp("kv") / "out"
    with proving_here():
        quantize(model_dir, folder, "fp8", ("quark", "compressed_tensors", "fp8"), kv_cache="fp8")
    return folder


def test_cache_scales_are_the_ranges_of_keys_and_values(with_kv_cache, model_dir):
    """max|cached| / 448 over the calibration windows, in the cache of the whole float model."""
    whole = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    largest = {}
    tokenizer = tiny_tokenizer()
    windows = token_windows(
        CALIBRATION,
        DocumentTokenizer(
            lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            separator=tokenizer.eos_token_id,
        ),
        num_held_out=3,
        held_out_len=64,
    )
    with torch.no_grad():
        for window in windows.calibration_NT:
            for index, layer in enumerate(whole(window[None], use_cache=True).past_key_values.layers):
                for projection, cached in (("k_proj", layer.keys), ("v_proj", layer.values)):
                    name = f"model.layers.{index}.self_attn.{projection}"
                    largest[name] = max(largest.get(name, 0.0), cached.abs().max().item())
    assert len(largest) == 6
    quark = load_file(with_kv_cache / "quark" / "model.safetensors")
    fp8 = load_file(with_kv_cache / "fp8" / "model.safetensors")
    foreign = load_file(with_kv_cache / "compressed_tensors" / "model.safetensors")
    for name, value in largest.items():
        attention, _, projection = name.rpartition(".")
        scale = quark[f"{name}.output_scale"]
        torch.testing.assert_close(scale, torch.tensor(value / 448).bfloat16(), rtol=0.01, atol=0)
        assert fp8[f"{attention}.{projection[0]}_scale"] == scale
        assert foreign[f"{attention}.{projection[0]}_scale"].shape == (1,)
        assert foreign[f"{attention}.{projection[0]}_scale"] == scale


def test_every_format_describes_its_cache(with_kv_cache):
    def quantization(export):
        return json.loads((with_kv_cache / export / "config.json").read_text())["quantization_config"]

    quark = quantization("quark")
    assert quark["export"]["kv_cache_group"] == ["*k_proj", "*v_proj"]
    assert set(quark["layer_quant_config"]) == {"*k_proj", "*v_proj"}
    assert quark["layer_quant_config"]["*k_proj"]["output_tensors"]["dtype"] == "fp8_e4m3"
    foreign = quantization("compressed_tensors")
    assert (foreign["kv_cache_scheme"]["num_bits"], foreign["kv_cache_scheme"]["type"]) == (8, "float")
    assert list(foreign["config_groups"]) == ["group_0"]  # keys and values are quantized like the rest
    fp8 = quantization("fp8")
    assert (fp8["quant_method"], fp8["activation_scheme"], fp8["kv_cache_scheme"]) == ("fp8", "static", "static")
    assert fp8["ignored_layers"] == ["lm_head"]


def test_a_cache_that_a_format_cannot_hold_is_refused_before_anything_runs(model_dir, tmp_path):
    with pytest.raises(ConfigError, match="one static scale per tensor"):
        quantize(model_dir, tmp_path / "out", "fp8", kv_cache="int8_per_token_dynamic")
    assert not (tmp_path / "out").exists()
