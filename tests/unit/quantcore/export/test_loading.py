"""The printed lines promise only what a test saw."""

import json

import pytest

from quantcore.config import presets
from quantcore.config.layer_plan import LayerPlan
from quantcore.export import EXPORTERS
from quantcore.export.loading import AUTO_CLASS, TABLE, kinds_of, load_lines, program_lines

SEEN, UNSEEN = True, False


def layers_of(*names):
    """One layer of each preset."""
    return [LayerPlan(name, 0, (4096, 4096), presets.resolve(name).global_quant_config) for name in names]


def lines_of(export, *schemes, is_read, model_class=AUTO_CLASS):
    layers = layers_of(*schemes)
    return program_lines(export, layers, "./out", is_read_by_transformers=is_read, model_class=model_class)


@pytest.mark.parametrize(
    ("export", "schemes", "is_read", "program"),
    [
        ("quark", ["w4a16"], UNSEEN, "vllm"),
        ("quark", ["int8_dynamic"], UNSEEN, "vllm"),
        ("quark", ["fp8"], UNSEEN, "quark.torch"),
        ("quark", ["int8_weight_only"], UNSEEN, "quantcore"),
        ("quark", ["w4a16", "int8_dynamic"], UNSEEN, "quantcore"),
        ("compressed_tensors", ["w4a16_sym"], UNSEEN, "transformers"),
        ("compressed_tensors", ["w4a16"], UNSEEN, "vllm"),
        ("compressed_tensors", ["int8_static", "w4a16_sym"], SEEN, "transformers"),
        ("compressed_tensors", ["int8_static", "w4a16_sym"], UNSEEN, "quantcore"),
        ("gptq", ["int4_wo_128", "int8_weight_only"], UNSEEN, "gptqmodel"),
        ("awq", ["w4a16"], UNSEEN, "vllm"),
        ("fp8", ["fp8"], UNSEEN, "quantcore"),
        ("gguf", ["gguf_q4_k"], UNSEEN, "llama_cpp"),
        ("gguf", ["gguf_q4_k", "gguf_q5_0", "gguf_q8_0"], UNSEEN, "llama_cpp"),
        ("gguf", ["gguf_q4_k", "int8_weight_only"], UNSEEN, "quantcore"),
        ("onnx", ["int8_static"], UNSEEN, "onnxruntime"),
        ("fake_quantized", ["int8_weight_only", "w4a16"], UNSEEN, "transformers"),
    ],
)
def test_a_line_names_a_program_that_was_seen_to_load_it(export, schemes, is_read, program):
    lines = load_lines(lines_of(export, *schemes, is_read=is_read), "./out")
    assert lines.split()[1] == program and "'./out" in lines


@pytest.mark.parametrize(
    ("export", "schemes", "is_read", "programs"),
    [
        ("quark", ["int8_dynamic"], UNSEEN, ["vLLM", "AMD Quark"]),
        ("compressed_tensors", ["w4a16_sym"], SEEN, ["Transformers", "vLLM"]),
        ("compressed_tensors", ["int8_static", "w4a16_sym"], UNSEEN, []),
        ("awq", ["w4a16"], UNSEEN, ["vLLM", "Transformers"]),
        ("gguf", ["gguf_q4_k"], SEEN, ["llama.cpp"]),
        ("onnx", ["int8_static"], UNSEEN, ["ONNX Runtime"]),
    ],
)
def test_every_program_that_was_seen_to_load_it_has_lines(export, schemes, is_read, programs):
    lines = lines_of(export, *schemes, is_read=is_read)
    assert list(lines) == programs and all("'./out" in text for text in lines.values())


@pytest.mark.parametrize("export", ["compressed_tensors", "awq", "fake_quantized"])
def test_the_lines_for_transformers_name_the_class_that_loads_the_model(export):
    lines = lines_of(export, "w4a16_sym", is_read=SEEN, model_class="LlavaForConditionalGeneration")["Transformers"]
    assert lines.count("LlavaForConditionalGeneration") == 2 and "Auto" not in lines


def test_the_size_of_groups_makes_no_other_scheme():
    assert kinds_of(presets.resolve("w4a16", group_size=32)) == kinds_of(presets.resolve("w4a16", group_size=128))
    assert kinds_of(presets.resolve("fp8")) != kinds_of(presets.resolve("fp8", kv_cache="fp8"))


def test_the_table_is_of_formats_that_there_are():
    rows = json.loads(TABLE.read_text())
    assert {row["format"] for row in rows} <= set(EXPORTERS) and all(row["agrees"] for row in rows)
