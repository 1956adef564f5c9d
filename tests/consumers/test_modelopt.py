"""vLLM on a CPU reads ModelOpt's format: its config classes choose the methods, and its emulation computes NVFP4.

vLLM has no kernel on a CPU for NVFP4, and none that rounds inputs to fp8 with a fixed scale: so no loading line is
printed.
"""

import json
from dataclasses import replace

import pytest

from quantcore.config import presets
from tests.support.consumers import TOLERANCE, check, export_all, run_in
from tests.support.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FP8 = ["torch.float8_e4m3fn", "torch.float8_e4m3fn"]
NVFP4 = ["torch.uint8", "torch.uint8"]
"""Two fp4 codes in a byte."""
METHODS = {
    "fp8": ["modelopt", None, [FP8, FP8, FP8, None]],
    "mxfp8": ["modelopt_mxfp8", None, [FP8, FP8, FP8, None]],
    "nvfp4": ["modelopt_fp4", None, [NVFP4, NVFP4, NVFP4, None]],
    "nvfp4_weight_only": ["modelopt_fp4", None, [["torch.uint8", None]] * 3 + [None]],
    "mixed": ["modelopt_mixed", "FP8", [NVFP4, NVFP4, FP8, None]],
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modelopt")
    model = tiny_model(
        folder / "model", hidden_size=128, intermediate_size=384, head_dim=32, num_key_value_heads=4, rank=8,
        max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    configs = {name: presets.resolve(name) for name in METHODS if name != "mixed"}
    in_fp8 = {"model.layers.1.*": configs["fp8"].global_quant_config}
    configs["mixed"] = replace(presets.resolve("nvfp4", kv_cache="fp8"), layer_quant_config=in_fp8)
    configs["nvfp4_head"] = presets.resolve("nvfp4", exclude=())
    return export_all(model, configs, ("modelopt",), folder)


def test_vllm_chooses_the_method_of_each_layer_from_both_files(exports, tmp_path):
    results, _ = exports
    names = ["0.self_attn.qkv_proj", "0.mlp.gate_up_proj", "1.mlp.down_proj"]
    (tmp_path / "names.json").write_text(json.dumps([*(f"model.layers.{name}" for name in names), "lm_head"]))
    folders = {name: str(folder) for name, (folder, _) in results.items() if name in METHODS}
    found = check("vllm", "check_modelopt.py", tmp_path / "names.json", *folders.values())
    assert {name: found[folder] for name, folder in folders.items()} == METHODS


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_head"])
def test_vllms_emulation_of_nvfp4_computes_what_we_do(exports, name):
    results, windows = exports
    folder, summary = results[name]
    assert (summary["num_layers_quantized"] == 22) == (name == "nvfp4_head")
    result = check("vllm", "check_modelopt.py", "--run", folder, windows)
    assert result["perplexity"] == pytest.approx(summary["perplexity_after"], rel=TOLERANCE)


@pytest.mark.parametrize("name", ["fp8", "mixed"])
def test_vllm_loads_fp8_and_stops_at_the_kernel_that_a_cpu_lacks(exports, name):
    results, windows = exports
    result, printed = run_in("vllm", "check_modelopt.py", "--run", results[name][0], windows)
    assert result is None and "static_scaled_fp8_quant() expected at most 0" in printed, printed[-6000:]
    assert "Loading weights took" in printed
