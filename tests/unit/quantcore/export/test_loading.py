"""The printed lines promise only what a test saw."""

import ast
import json
from dataclasses import replace

import pytest

from quantcore.config import presets
from quantcore.config.layer_plan import LayerPlan, usual_layers
from quantcore.export import EXPORTERS, loading
from quantcore.export.loading import (
    TABLE,
    LoadedModel,
    at_folder,
    kinds_of,
    known_refusals,
    load_lines,
    program_lines,
)

SEEN, UNSEEN = True, False
LLAMA = LoadedModel("llama")


def layers_of(*names):
    """One layer of each preset."""
    return [LayerPlan(name, 0, (4096, 4096), presets.resolve(name).global_quant_config) for name in names]


def lines_of(export, *schemes, is_read, model=LLAMA):
    return program_lines(export, layers_of(*schemes), "./out", model, is_read_by_transformers=is_read)


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
        ("onnx", ["int8_static"], UNSEEN, ["ONNX Runtime", "ONNX Runtime GenAI"]),
    ],
)
def test_every_program_that_was_seen_to_load_it_has_lines(export, schemes, is_read, programs):
    lines = lines_of(export, *schemes, is_read=is_read)
    assert list(lines) == programs and all("'./out" in text for text in lines.values())


@pytest.mark.parametrize(
    ("export", "scheme", "package"),
    [
        ("compressed_tensors", "w4a16_sym", "  # pip install compressed-tensors"),
        ("bitsandbytes", "nf4", "  # pip install bitsandbytes"),
        ("awq", "w4a16", "  # pip install gptqmodel"),
        ("fake_quantized", "w4a16", ""),
    ],
)
def test_the_lines_for_transformers_name_the_package_that_it_needs(export, scheme, package):
    first = lines_of(export, scheme, is_read=UNSEEN)["Transformers"].splitlines()[0]
    assert first == f"from transformers import AutoModelForCausalLM{package}"


@pytest.mark.parametrize("export", ["compressed_tensors", "awq", "fake_quantized"])
def test_the_lines_for_transformers_name_the_class_that_loads_the_model(export):
    llava = LoadedModel("llava", "LlavaForConditionalGeneration")
    lines = lines_of(export, "w4a16_sym", is_read=SEEN, model=llava)["Transformers"]
    assert lines.count("LlavaForConditionalGeneration") == 2 and "Auto" not in lines


@pytest.mark.parametrize(
    ("export", "preset"), [("gptq", "w4a16_sym"), ("awq", "w4a16"), ("gguf", "gguf_q8_0"), ("quark", "int8_dynamic")]
)
def test_an_architecture_that_no_program_was_seen_to_load_has_no_line_for_it(export, preset):
    assert lines_of(export, preset, is_read=UNSEEN) and not lines_of(
        export, preset, is_read=UNSEEN, model=LoadedModel("never_seen")
    )
    read = lines_of(export, preset, is_read=SEEN, model=LoadedModel("never_seen"))
    assert list(read) == ([] if export == "gguf" else ["Transformers"])


def test_an_embedding_model_is_loaded_as_sentence_transformers_needs_it():
    minilm = LoadedModel("bert", "BertModel", has_modules=True)
    lines = lines_of("compressed_tensors", "w4a16_sym", is_read=SEEN, model=minilm)
    assert next(iter(lines)) == "sentence-transformers" and "run_compressed=False" in lines["sentence-transformers"]
    lines = lines_of("fake_quantized", "w4a16_sym", is_read=SEEN, model=minilm)
    assert list(lines) == ["sentence-transformers", "Transformers"]
    assert "run_compressed" not in lines["sentence-transformers"]
    without = lines_of("compressed_tensors", "w4a16_sym", is_read=SEEN, model=LoadedModel("bert", "BertModel"))
    assert "sentence-transformers" not in without
    refused = program_lines(
        "compressed_tensors", layers_of("w4a16_sym"), "out", minilm, is_read_by_transformers=False,
        refusals=["Transformers"],
    )  # fmt: skip
    assert "sentence-transformers" not in refused


def test_the_size_of_groups_makes_no_other_scheme():
    assert kinds_of(presets.resolve("w4a16", group_size=32)) == kinds_of(presets.resolve("w4a16", group_size=128))
    assert kinds_of(presets.resolve("fp8")) != kinds_of(presets.resolve("fp8", kv_cache="fp8"))


def test_the_table_is_of_formats_that_there_are():
    rows = json.loads(TABLE.read_text())
    assert {row["format"] for row in rows} <= set(EXPORTERS) and all(row["agrees"] for row in rows)


def block_of(preset, *, kv_rows=1024, **others):
    """Attention and MLP of a block with one preset for all layers; ``others``: a preset by the last part of a name."""
    shapes = {"q_proj": 4096, "k_proj": kv_rows, "v_proj": kv_rows, "o_proj": 4096, "gate_proj": 4096, "up_proj": 4096}
    return [
        LayerPlan(
            f"model.layers.0.self_attn.{name}", 0, (rows, 4096), presets.resolve(own).global_quant_config,
            chosen_by="layer_quant_config" if name in others else "global_quant_config",
        )
        for name, rows in shapes.items() if (own := others.get(name, preset)) is not None
    ]  # fmt: skip


HEAD = LayerPlan("lm_head", None, (4096, 4096), presets.resolve("w4a16_sym").global_quant_config)
EXPERTS = "model.layers.0.mlp.experts.0.gate_proj"


def vllm_of(export, layers, kept=()):
    """Why vLLM does not load it; without a reason, whether lines for vLLM are printed."""
    refusals = known_refusals(export, layers, kept, None)
    lines = program_lines(export, layers, "out", LLAMA, is_read_by_transformers=False, refusals=refusals)
    assert not ("vLLM" in refusals and "vLLM" in lines)
    return refusals.get("vLLM", "vLLM" in lines)


@pytest.mark.parametrize("export", ["quark", "compressed_tensors", "gptq", "awq"])
def test_layers_that_vllm_fuses_need_one_scheme(export):
    whole = block_of("w4a16_sym")
    assert vllm_of(export, whole) is True
    kept = block_of("w4a16_sym", v_proj=None)
    assert "self_attn.v_proj" in vllm_of(export, kept, ["model.layers.0.self_attn.v_proj"])
    assert vllm_of(export, kept) is True  # a class without such a layer
    assert vllm_of(export, block_of("w4a16_sym", o_proj=None), ["model.layers.0.self_attn.o_proj"]) is True


@pytest.mark.parametrize("other", ["int4_wo_32", "int8_weight_only", "w4a16"])
def test_another_group_size_width_or_symmetry_of_one_part_is_found(other):
    reason = vllm_of("compressed_tensors", block_of("w4a16_sym", up_proj=other))
    assert "gate_proj and model.layers.0.self_attn.up_proj into one layer" in reason


def test_what_chose_the_scales_makes_no_other_scheme():
    layers = block_of("w4a16_sym")
    weight = replace(layers[0].weight, observer_cls="PerGroupMSEObserver")
    layers[0] = replace(layers[0], config=replace(layers[0].config, weight=weight))
    assert layers[0].weight != layers[1].weight and vllm_of("quark", layers) is True


def test_vllm_does_not_find_the_parts_of_a_fused_layer_in_dynamic_of_gptq():
    several = {"q_proj": "int8_weight_only", "k_proj": "int8_weight_only", "v_proj": "int8_weight_only"}
    layers = block_of("w4a16_sym", **several)
    assert "`dynamic`" in vllm_of("gptq", layers) and not vllm_of("compressed_tensors", layers)
    assert vllm_of("gptq", block_of("w4a16_sym", o_proj="int8_weight_only")) is False  # never seen


@pytest.mark.parametrize(("kv_rows", "is_refused"), [(64, True), (192, True), (128, False), (1024, False)])
def test_only_the_last_part_of_a_fused_layer_may_end_within_a_block(kv_rows, is_refused):
    reason = vllm_of("fp8", block_of("fp8_block", kv_rows=kv_rows))
    assert f"k_proj with other layers, but its {kv_rows} rows" in reason if is_refused else reason is True
    shorter = [layer for layer in block_of("fp8_block") if "v_proj" not in layer.name]
    last = replace(block_of("fp8_block", kv_rows=64)[2], block=0)
    assert vllm_of("fp8", [*shorter, last]) is True


def test_vllm_reads_no_quantized_head_but_in_gptq():
    layers = [*block_of("w4a16_sym"), HEAD]
    for export in ("quark", "compressed_tensors", "awq"):
        assert "a quantized lm_head" in vllm_of(export, layers)
    assert vllm_of("gptq", layers) is True


@pytest.mark.parametrize("preset", ["nvfp4_weight_only", "int8_dynamic"])
def test_experts_that_transformers_does_not_decode_get_no_line_for_it(preset):
    layers = [*block_of(preset), replace(block_of(preset)[0], name=EXPERTS)]
    refusals = known_refusals("compressed_tensors", layers, [], None)
    assert "does not decode" in refusals["Transformers"]
    assert lines_for(layers, refusals, model=LoadedModel("mixtral")) == {}
    assert "Transformers" in lines_for(
        block_of(preset), known_refusals("compressed_tensors", block_of(preset), [], None)
    )


def test_experts_have_lines_for_transformers_once_it_has_read_the_files():
    layers = [*block_of("w4a16_sym"), replace(block_of("w4a16_sym")[0], name=EXPERTS)]
    model = LoadedModel("jetmoe")
    assert lines_for(layers, {}, model=model) == {}
    assert list(lines_for(layers, {}, is_read=True, model=model)) == ["Transformers"]


def test_experts_need_a_row_of_their_scheme_and_architecture_at_once(monkeypatch):
    kinds = frozenset(map(loading._kind, block_of("w4a16_sym")))
    others = frozenset(map(loading._kind, block_of("int8_dynamic")))
    rows = [
        ("vLLM (CPU)", "compressed_tensors", "mixtral", kinds),
        ("vLLM (CPU)", "compressed_tensors", "llama", others),
    ]
    monkeypatch.setattr(loading, "_rows", lambda: rows)
    for preset, has_experts, is_seen in (
        ("w4a16_sym", True, True), ("int8_dynamic", True, False), ("int8_dynamic", False, True),
    ):  # fmt: skip
        experts = [replace(block_of(preset)[0], name=EXPERTS)] if has_experts else []
        lines = lines_for([*block_of(preset), *experts], {}, model=LoadedModel("mixtral"))
        assert ("vLLM" in lines) is is_seen


def test_scales_of_a_cache_need_such_a_row_too():
    layers, opt = usual_layers(presets.resolve("int8_dynamic", kv_cache="fp8")), LoadedModel("opt")
    assert "vLLM" in lines_for(layers, {}, export="quark")
    assert "vLLM" in lines_for(block_of("int8_dynamic"), {}, export="quark", model=opt)
    assert "vLLM" not in lines_for(layers, {}, export="quark", model=opt)


@pytest.mark.parametrize("export", ["compressed_tensors", "fake_quantized"])
def test_files_that_transformers_did_not_load_get_no_line_for_it(export):
    layers = block_of("w4a16_sym")
    refusals = known_refusals(export, layers, [], "Transformers cannot load and run these files: no.")
    assert "Transformers" in refusals and "Transformers" not in lines_for(layers, refusals, export=export)


def lines_for(layers, refusals, *, export="compressed_tensors", is_read=False, model=LLAMA):
    return program_lines(export, layers, "out", model, is_read_by_transformers=is_read, refusals=refusals)


def test_no_line_of_ours_is_given_for_a_file_that_we_do_not_read():
    assert "quantcore" in load_lines({}, "./out")
    assert load_lines({}, "./out", is_ours=False).startswith("#")
    assert "Llama(" in load_lines({"llama.cpp": "llm = Llama('./out')"}, "./out", is_ours=False)


@pytest.mark.parametrize("folder", ["it's", 'a "model"', 'it\'s "so"', r"C:\new\table", "\n"])
@pytest.mark.parametrize("export", [*EXPORTERS])
def test_a_path_with_quotes_or_backslashes_stays_a_path(export, folder):
    def strings_in(lines):
        return {node.value for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Constant)}

    def is_named(lines):
        return any(
            str(text).removesuffix("/model.gguf").removesuffix("/model.onnx") == folder for text in strings_in(lines)
        )

    hint = EXPORTERS.get(export).load_hint(folder)
    assert is_named(hint) and is_named(load_lines({}, folder))
    for path in (".", export):
        assert is_named(at_folder(EXPORTERS.get(export).load_hint(path), path, folder))
        several = program_lines(export, layers_of("w4a16"), path, LLAMA, is_read_by_transformers=True)
        assert all(is_named(at_folder(lines, path, folder)) for lines in several.values())
