"""Exports from memory: the same bits as the streaming pipeline writes, and a consumer computes what the model does."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quantcore import (
    Config,
    ConfigError,
    ExporterConfig,
    JsonExporterConfig,
    ModelError,
    ModelExporter,
    ModelQuantizer,
    ProofError,
    QuantizationConfig,
    QuantizationSpec,
)
from quantcore.cli.flags import parser
from quantcore.cli.from_flags import task_of
from quantcore.config.job_spec import JobSpec
from quantcore.config.presets import resolve as preset
from quantcore.config.presets import with_attention
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.blockwise.savepoint import SavePoint
from quantcore.engine.model.module_names import with_module_names
from quantcore.engine.pipeline.context import RunContext
from quantcore.engine.pipeline.job import quantize, read_windows, run
from quantcore.engine.runtime.ranks import ALONE
from quantcore.export import EXPORTERS
from quantcore.importing.model import read_model
from quantcore.plan.planner import make_plan
from tests.support.models import MIXTURES, tiny_model, tiny_tokenizer
from tests.support.params import with_rare

FP8 = QuantizationSpec(dtype="fp8_e4m3")
KV = QuantizationConfig(weight=FP8, input_tensors=FP8, output_tensors=FP8)
CONFIGS = {
    "fp8": preset("fp8"),
    "fp8 with kv cache": replace(preset("fp8"), kv_cache_quant_config={"*k_proj": KV, "*v_proj": KV}),
    "int8_dynamic": preset("int8_dynamic"),
    "int8_static": preset("int8_static"),
    "w4a16": preset("w4a16", group_size=32),
    "w4a16_sym": preset("w4a16_sym", group_size=32, exclude=()),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def float_model(folder, dtype="auto"):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def same_bits(one, other):
    same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same_kind and torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def in_memory(model, config, batches=None):
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(model, batches))


def written_both_ways(model_dir, config, folder, exports):
    """For each export, the tensors that the pipeline wrote and those written from memory."""
    task = Task(
        model_dir=model_dir, output_dir=folder / "stream", config=config, export=exports,
        calibration=CalibrationConfig(num_samples=3, seq_len=32),
        evaluation=EvaluationConfig(num_windows=1, seq_len=32, num_prompts=0),
    )  # fmt: skip
    given = read_model(model_dir)
    headers = given.headers
    plan = make_plan(JobSpec(config=config, calibration=task.calibration, export=exports), headers)
    quantize(RunContext(task, given, plan, task.output_dir, lambda event: None, SavePoint.of(task, ALONE)))
    model = in_memory(float_model(model_dir), config, [window[None] for window in read_windows(task).calibration_NT])
    for export in exports:
        ModelExporter(export_dir=folder / export).export_safetensors_model(model, config, custom_mode=export)
        streamed = task.output_dir / export if len(exports) > 1 else task.output_dir
        named = with_module_names(headers.config, plan.layers, [entry.name for entry in plan.kept])
        expected = EXPORTERS.get(export).quantization_config(config, *named)
        stored = json.loads((folder / export / "config.json").read_text())["quantization_config"]
        assert unordered(stored) == unordered(json.loads(json.dumps(expected)))
        yield load_file(streamed / "model.safetensors"), load_file(folder / export / "model.safetensors")


def unordered(data):
    """JSON data whose lists are in alphabetical order: of names, which may come in any."""
    if isinstance(data, dict):
        return {key: unordered(value) for key, value in data.items()}
    return sorted(data, key=str) if isinstance(data, list) else data


@pytest.mark.parametrize("name", with_rare(CONFIGS, ["fp8", "int8_dynamic", "w4a16_sym"]))
def test_memory_and_stream_write_the_same_bits(name, model_dir, tmp_path):
    exports = ("quark",) if "kv" in name else ("quark", "compressed_tensors")
    for streamed, written in written_both_ways(model_dir, CONFIGS[name], tmp_path, exports):
        assert written.keys() == streamed.keys()
        assert [key for key in written if not same_bits(written[key], streamed[key])] == []


@pytest.mark.parametrize("name", with_rare(["nf4", "fp4_bnb_double_quant"], ["nf4"]))
def test_so_does_bitsandbytes(name, model_dir, tmp_path):
    for streamed, written in written_both_ways(model_dir, preset(name), tmp_path, ("bitsandbytes",)):
        assert written.keys() == streamed.keys() and ("nested_absmax" in str(written.keys())) == ("double" in name)
        assert [key for key in written if not same_bits(written[key], streamed[key])] == []


MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
OTHERS = {
    "mixtral": MOE,
    "qwen3_moe": MOE,
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},  # biases
}


@pytest.mark.parametrize("model_type", with_rare(OTHERS, ["qwen3_moe"]))
def test_so_do_experts_biases_and_other_names(model_type, tmp_path):
    folder = tiny_model(tmp_path / "model", model_type=model_type, **OTHERS[model_type])
    for streamed, written in written_both_ways(folder, CONFIGS["fp8"], tmp_path, ("quark",)):
        assert written.keys() == streamed.keys()
        assert [key for key in written if not same_bits(written[key], streamed[key])] == []


@pytest.mark.parametrize("name", ["fp8", "int8_static", "w4a16_sym"])
def test_transformers_computes_what_the_frozen_model_computes(name, tmp_path):
    ids = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    tiny_model(tmp_path / "model", dtype=torch.float32)  # their fake quantization rounds on the way in two-byte floats
    model = in_memory(float_model(tmp_path / "model"), CONFIGS[name], [ids])
    folder = tmp_path / "out"
    ModelExporter(export_dir=folder).export_safetensors_model(
        model, CONFIGS[name], tokenizer=tiny_tokenizer(), custom_mode="compressed_tensors"
    )
    with torch.no_grad():
        ours, theirs = model(ids).logits.float(), float_model(folder)(ids).logits.float()
    assert (ours - theirs).abs().max() <= 1e-4 * ours.abs().max()
    assert (folder / "tokenizer.json").exists() and (folder / "generation_config.json").exists()


def test_a_stored_config_is_the_models(model_dir, tmp_path):
    config = CONFIGS["fp8"]
    model = in_memory(float_model(model_dir), config, [torch.arange(8)[None]])
    ModelExporter(tmp_path / "out").export_safetensors_model(model, config)
    given, written = (json.loads((folder / "config.json").read_text()) for folder in (model_dir, tmp_path / "out"))
    assert written.pop("quantization_config")["exclude"] == ["lm_head"]
    assert written == given


def test_the_command_and_the_documents_python_write_the_same_bytes(model_dir, tmp_path, proof_in_this_process):
    """``--kv_cache_dtype fp8`` and ``kv_cache_group`` of ModelExporter: the weights, and config.json about them."""
    flags = ["--model_dir", str(model_dir), "--output_dir", str(tmp_path / "command"), "--quant_scheme", "w_fp8_a_fp8",
             "--kv_cache_dtype", "fp8", "--num_calib_data", "3", "--seq_len", "32", "--skip_evaluation",
             "--model_export", "hf_format"]  # fmt: skip
    task = task_of(parser().parse_args(flags))
    run(task, lambda event: None)
    patterns = ["*k_proj", "*v_proj"]
    config = replace(
        preset("fp8"),
        kv_cache_quant_config=dict.fromkeys(patterns, KV),
        layer_quant_config=dict.fromkeys(patterns, KV),
    )
    model = in_memory(float_model(model_dir), config, [window[None] for window in read_windows(task).calibration_NT])
    options = ExporterConfig(json_export_config=JsonExporterConfig(kv_cache_group=patterns))
    ModelExporter(options, tmp_path / "python").export_safetensors_model(model, config)
    command, python = (tmp_path / name for name in ("command", "python"))
    assert (command / "model.safetensors").read_bytes() == (python / "model.safetensors").read_bytes()
    said = [json.loads((folder / "config.json").read_text())["quantization_config"] for folder in (command, python)]
    assert unordered(said[0]) == unordered(said[1])
    assert said[0]["export"]["kv_cache_group"] == patterns
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.output_quantizer.scale != attention.v_proj.output_quantizer.scale


def test_a_kv_cache_group_that_names_nothing_is_refused(model_dir, tmp_path):
    model = in_memory(float_model(model_dir), CONFIGS["int8_dynamic"])
    options = ExporterConfig(json_export_config=JsonExporterConfig(kv_cache_group=["*key"]))
    with pytest.raises(ConfigError, match=r"'\*key', which matches no quantized layer"):
        ModelExporter(options, tmp_path / "out").export_safetensors_model(model, CONFIGS["int8_dynamic"])
    options.json_export_config.kv_cache_group = "*k_proj"
    with pytest.raises(ConfigError, match=r"it must be a list such as \[\.\.\.\]; '\*k_proj' was given"):
        ModelExporter(options, tmp_path / "out").export_safetensors_model(model, CONFIGS["int8_dynamic"])


def test_tensors_that_modules_share_are_stored_once(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.body = nn.Linear(8, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

    config = Config(global_quant_config=QuantizationConfig(weight=QuantizationSpec(dtype="int8")), exclude=["head"])
    model = in_memory(Net(), config)
    ModelExporter(tmp_path / "out").export_safetensors_model(model, config)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == {"embed.weight", "body.weight", "body.weight_scale", "body.weight_zero_point", "body.bias"}
    restored = stored["body.weight"].float() * stored["body.weight_scale"]
    assert torch.equal(restored, model.body.weight)


def net(**kwargs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16, **kwargs))


INT8 = Config(global_quant_config=QuantizationConfig(weight=QuantizationSpec(dtype="int8")))
INT16 = Config(global_quant_config=QuantizationConfig(weight=QuantizationSpec(dtype="int16")))
KV_ONLY = Config(global_quant_config=QuantizationConfig(output_tensors=FP8))


def test_refusals_teach(tmp_path):
    exporter = ModelExporter(tmp_path / "out")
    with pytest.raises(ConfigError, match="The model is not frozen"):
        exporter.export_safetensors_model(ModelQuantizer(INT8).quantize_model(net()), INT8)
    with pytest.raises(ConfigError, match="not frozen"):
        exporter.export_safetensors_model(net(), INT8)
    with pytest.raises(ConfigError, match="not quantized as in quant_config, first '0'"):
        exporter.export_safetensors_model(in_memory(net(), INT8), INT16)
    with pytest.raises(ConfigError, match=r"'marlin'\..*Available: awq"):
        exporter.export_safetensors_model(in_memory(net(), INT8), INT8, custom_mode="marlin")
    with pytest.raises(ConfigError, match="quark format cannot store 0"):
        exporter.export_safetensors_model(in_memory(net(), INT16), INT16)
    with pytest.raises(ConfigError, match="quantized outputs but a float weight, first '0'"):
        exporter.export_safetensors_model(in_memory(net(), KV_ONLY, [torch.ones(1, 16)]), KV_ONLY)
    with pytest.raises(ConfigError, match="no folder to write to"):
        ModelExporter()
    options = ExporterConfig(json_export_config=JsonExporterConfig(kv_cache_group=["0"]))
    with pytest.raises(ConfigError, match="kv_cache_group names 0, whose output has no static"):
        ModelExporter(options, tmp_path / "out").export_safetensors_model(in_memory(net(), INT8), INT8)
    assert not (tmp_path / "out").exists()


def test_a_frozen_weight_that_was_changed_is_not_exported(tmp_path):
    model = in_memory(net(), INT8)
    with torch.no_grad():
        model[0].weight[3, 3] += 1e-4
    with pytest.raises(ProofError, match="codes of 0 do not reproduce its weight"):
        ModelExporter(tmp_path / "out").export_safetensors_model(model, INT8)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint4", "fp8_e4m3", "fp4", "nf4", "int3", "fp6_e2m3"])
@pytest.mark.parametrize("round_method", ["half_even", "floor", "round"])
@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float16])
def test_codes_are_found_again_from_a_weight_of_two_bytes(dtype, round_method, model_dtype):
    from quantcore.engine.solvers.rtn import round_to_nearest
    from quantcore.nn.model_exporter import encode_layer

    spec = QuantizationSpec(dtype=dtype, qscheme="per_group", group_size=32, round_method=round_method)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128).to(model_dtype))
    weight = model[0].weight.detach().clone()
    layer = in_memory(model, Config(global_quant_config=QuantizationConfig(weight=spec)))[0]
    assert torch.equal(encode_layer(layer).weight.codes, round_to_nearest(weight, layer.plan.weight).codes)


def test_a_format_of_one_file_has_its_own_method(tmp_path):
    with pytest.raises(ConfigError, match="Call export_gguf_model"):
        ModelExporter(export_dir=tmp_path / "out").export_safetensors_model(
            in_memory(net(), INT8), INT8, custom_mode="gguf"
        )


UINT4_PER_GROUP_32 = Config(  # as AMD Quark's documents have it: what its export_gguf takes
    global_quant_config=QuantizationConfig(
        weight=QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=32, ch_axis=1, symmetric=False)
    ),
    exclude=("lm_head",),
)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("config", [UINT4_PER_GROUP_32, preset("gguf_q8_0"), preset("int4_wo_32")])
def test_a_gguf_file_holds_what_the_model_computes(model_type, config, tmp_path, caplog):
    """Transformers reads the weights of the model from the file, to the last bit."""
    options = {**MIXTURES.get(model_type, {}), "norm_topk_prob": True}
    model_dir = tiny_model(tmp_path / "model", model_type=model_type, tie_word_embeddings=False, **options)
    before, model = (in_memory(float_model(model_dir, torch.float32), config) for _ in range(2))
    ModelExporter(tmp_path / "out").export_gguf_model(model, tokenizer_path=model_dir, model_type=model_type)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.gguf"]
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", config=AutoConfig.from_pretrained(model_dir), dtype=torch.float32
    )
    ids = torch.arange(24)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
        same = torch.equal(model(ids).logits, before(ids).logits)
    assert same == ("float16 scales" not in caplog.text) == (config == preset("gguf_q8_0"))


def test_what_gguf_cannot_hold_is_refused(model_dir, tmp_path):
    exporter = ModelExporter(tmp_path / "out")
    with pytest.raises(ConfigError, match="groups of 32"):
        exporter.export_gguf_model(in_memory(float_model(model_dir), preset("w4a16")), model_dir)
    model = in_memory(float_model(model_dir), preset("gguf_q4_1"))
    with pytest.raises(ConfigError, match="model_type"):
        exporter.export_gguf_model(model, model_dir, "opt")
    with pytest.raises(ConfigError, match="Transformers language models"):
        exporter.export_gguf_model(in_memory(net(), INT8), model_dir)
    assert not (tmp_path / "out").exists()


FP8_ATTENTION = with_attention(preset("fp8", kv_cache="fp8"), "fp8")
BATCHES = [torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def test_fp8_attention_goes_into_files_of_the_quark_format(model_dir, tmp_path):
    model = in_memory(float_model(model_dir), FP8_ATTENTION, BATCHES)
    attention = model.model.layers[1].self_attn
    assert "query_quantizer" not in attention._modules, "queries are quantized as they leave q_proj, and once"
    ModelExporter(tmp_path / "out").export_safetensors_model(model, FP8_ATTENTION)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    prefix = "model.layers.1.self_attn."
    assert stored[f"{prefix}prob_output_scale"] == attention.softmax_quantizer.scale
    assert stored[f"{prefix}q_proj.output_scale"].float() == attention.q_proj.output_quantizer.scale
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert set(said["layer_quant_config"]) == {"*q_proj", "*k_proj", "*v_proj"}  # vLLM 0.32 knows no other name
    assert said["softmax_quant_spec"]["dtype"] == said["layer_quant_config"]["*q_proj"]["output_tensors"]["dtype"]
    assert said["export"]["kv_cache_group"] == ["*k_proj", "*v_proj"]
    with pytest.raises(ModelError, match="attention probabilities are quantized"):
        read_model(tmp_path / "out")


@pytest.mark.parametrize("export", ["compressed_tensors", "fp8"])
def test_other_formats_cannot_say_fp8_attention(export, model_dir, tmp_path):
    model = in_memory(float_model(model_dir), FP8_ATTENTION, BATCHES)
    with pytest.raises(ConfigError, match=f"The {export} format cannot store softmax_quant_spec"):
        ModelExporter(tmp_path / "out").export_safetensors_model(model, FP8_ATTENTION, custom_mode=export)


def test_queries_that_are_quantized_inside_the_attention_go_into_no_file(model_dir, tmp_path):
    config = replace(FP8_ATTENTION, layer_quant_config={})
    model = in_memory(float_model(model_dir), config, BATCHES)
    with pytest.raises(ConfigError, match="are quantized later") as caught:
        ModelExporter(tmp_path / "out").export_safetensors_model(model, config)
    assert "presets.with_attention" in caught.value.hint
