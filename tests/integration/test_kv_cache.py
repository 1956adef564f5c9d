"""Files with a KV cache beside layers of another scheme."""

import json
from dataclasses import replace

from quantcore.config import presets
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.commands.convert import convert
from quantcore.engine.pipeline.job import run
from quantcore.importing.model import read_model
from tests.support.models import tiny_model

FP8_KV = presets.resolve("fp8", kv_cache="fp8")


def test_files_of_a_combination_say_the_scheme_of_every_layer(tmp_path, proof_in_this_process):
    """As AMD Quark and vLLM read them: names before patterns. Another format has the same layers."""
    config = replace(FP8_KV, layer_quant_config={"*.0.*.k_proj": presets.resolve("int8_static").global_quant_config})
    run(
        Task(
            model_dir=tiny_model(tmp_path / "model"), output_dir=tmp_path / "out", config=config,
            calibration=CalibrationConfig(num_samples=2, seq_len=32), evaluation=EvaluationConfig(num_windows=0),
            export=("quark",),
        ),
        lambda event: None,
    )  # fmt: skip
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    first = "model.layers.0.self_attn.k_proj"
    assert list(said["layer_quant_config"]) == [first, "*k_proj", "*v_proj"]
    for name, dtype in ((first, "int8"), ("*k_proj", "fp8_e4m3"), ("*v_proj", "fp8_e4m3")):
        entry = said["layer_quant_config"][name]
        assert (entry["weight"]["dtype"], entry["output_tensors"]["dtype"]) == (dtype, "fp8_e4m3")
    convert(tmp_path / "out", tmp_path / "other", "compressed_tensors", lambda event: None)
    for folder in (tmp_path / "out", tmp_path / "other"):
        quantized = read_model(folder).quantized
        layers = {layer.name: layer for layer in quantized.layers.values()}
        assert (layers[first].weight.dtype, layers[first].config.output_tensors.dtype) == ("int8", "fp8_e4m3")
        assert sum(layer.config.output_tensors is not None for layer in layers.values()) == 6
        for name, layer in layers.items():
            assert quantized.config.choose(name, "Linear")[0] == layer.config
