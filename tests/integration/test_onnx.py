"""Language models as ONNX: ONNX Runtime computes from the files what the engine computed, with and without the cache.

The files are made by the whole engine, whose proof reads them back; the models beside them are what ``load`` reads.
"""

import importlib.util
import json
import shutil
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy
import onnx
import onnxruntime
import pytest
import torch
from transformers import AutoTokenizer

from bitfoundry.local import demo_model
from quantcore import load
from quantcore.checkpoint.headers import read_local
from quantcore.checkpoint.onnx_headers import DATA_NAME, FILE_NAME, read_onnx_headers
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import CalibrationConfig, QuantizationConfig, QuantizationSpec
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.containers.dequantize import read_layer
from quantcore.engine.containers.onnx_graph import trace
from quantcore.engine.modules.layers import quantized_layers
from quantcore.engine.pipeline import job as pipeline
from quantcore.errors import ConfigError, ModelError, ProofError
from quantcore.importing.model import read_model
from quantcore.nn.codes import encode_layer
from quantcore.plan.planner import make_plan
from tests.support.models import MIXTURES, tiny_model
from tests.support.onnx_runtime import session_options
from tests.support.params import with_rare

CALIBRATION = CalibrationConfig(num_samples=4, seq_len=64)
WEIGHTS = presets.resolve("int8_weight_only")
QUANTIZED_HEAD = replace(presets.resolve("w4a16_sym", group_size=16), exclude=())
MIXED = replace(
    presets.resolve("w4a16", group_size=32),
    exclude=("lm_head", "*.0.mlp.down_proj"),
    layer_quant_config={
        "*.o_proj": presets.resolve("int4_wo_128", group_size=16).global_quant_config,
        "*.up_proj": presets.resolve("int8_weight_only").global_quant_config,
        "*.1.mlp.down_proj": QuantizationConfig(
            weight=QuantizationSpec(dtype="uint8", qscheme="per_channel"),
            input_tensors=QuantizationSpec(dtype="uint8"),
        ),
        "*.0.mlp.gate_proj": QuantizationConfig(
            weight=QuantizationSpec(dtype="uint8", qscheme="per_group", group_size=32),
        ),
    },
)


def layer(weight, inputs=None):
    return QuantizationConfig(
        weight=QuantizationSpec(**weight), input_tensors=None if inputs is None else QuantizationSpec(**inputs)
    )


GROUPS = {"qscheme": "per_group", "group_size": 32}
INPUTS = replace(
    presets.resolve("int8"),
    layer_quant_config={
        "*.k_proj": layer({"dtype": "fp8_e4m3", **GROUPS}),
        "*.v_proj": layer({"dtype": "fp8_e5m2", "qscheme": "per_channel"}, {"dtype": "fp8_e5m2"}),
        "*.o_proj": layer({"dtype": "int8", "symmetric": False}, {"dtype": "int8", "symmetric": False}),
        "*.gate_proj": layer({"dtype": "int4", "symmetric": False, **GROUPS}, {"dtype": "fp8_e4m3"}),
    },
)
A_TOKEN = {"qscheme": "per_channel", "is_dynamic": True}
INPUTS_BY_TOKEN = replace(
    presets.resolve("int8_dynamic"),
    layer_quant_config={
        "*.q_proj": layer({"dtype": "int4", **GROUPS}, {"dtype": "int8", **A_TOKEN}),
        "*.up_proj": layer({"dtype": "int8"}, {"dtype": "uint8", **A_TOKEN}),
    },
)
TWO = {"num_hidden_layers": 2}  # where one would show less: a trace takes seconds for each
WINDOW = {**TWO, "query_pre_attn_scalar": 16, "sliding_window": 4, "final_logit_softcapping": 5.0}
# name -> (model, its options, config, how far logits may go, as a part of the largest: see test_logits)
FLOAT_NOISE, MOVED_CODES = 1e-5, 0.03
CASES = {
    "4 bits": ("llama", TWO, presets.resolve("w4a16", group_size=32), FLOAT_NOISE),
    "4 bits and the head": ("llama", {"tie_word_embeddings": False}, QUANTIZED_HEAD, FLOAT_NOISE),
    "biases": ("qwen2", {}, presets.resolve("w4a16"), FLOAT_NOISE),
    "mixed": ("qwen2", {**TWO, "tie_word_embeddings": False}, MIXED, MOVED_CODES),
    "inputs": ("llama", {}, INPUTS, MOVED_CODES),
    "inputs by token": ("llama", {}, INPUTS_BY_TOKEN, MOVED_CODES),
    "window": ("gemma2", WINDOW, WEIGHTS, FLOAT_NOISE),
    "norms of heads": ("qwen3", {"head_dim": 32}, presets.resolve("int8_weight_only_per_tensor"), FLOAT_NOISE),
    "alibi": ("bloom", {"n_layer": 1, "n_head": 4, "layer_norm_epsilon": 1e-5}, WEIGHTS, FLOAT_NOISE),
    "int8 static": ("llama", {}, presets.resolve("int8_static"), MOVED_CODES),
    "int8 dynamic": ("phi3", {}, presets.resolve("int8_dynamic"), MOVED_CODES),
    "fp8 with a cache": ("llama", {}, presets.resolve("fp8", kv_cache="fp8"), MOVED_CODES),
    "fp8 dynamic": ("mistral", {}, presets.resolve("fp8_dynamic"), MOVED_CODES),
}
# What each shows, others show in part: biases and several schemes are those of the bfloat16 model below.
STATIC_INPUTS = ("inputs", "int8 static")
RARE = CASES.keys() - {"inputs", "fp8 with a cache"}


def quantized(folder, name, exports=("onnx",), generation_config=None, **options):
    """The artifact of one case, in float32 or whatever ``options`` of the model say; its proof has passed."""
    model_type, own, config, _ = CASES[name]
    model = tiny_model(
        folder / "model", model_type=model_type, **{"dtype": torch.float32, "num_hidden_layers": 1, **own, **options}
    )
    if generation_config is not None:
        (model / "generation_config.json").write_text(json.dumps(generation_config))
    task = Task(
        model_dir=model, output_dir=folder / "out", config=config, export=exports, calibration=CALIBRATION,
        evaluation=EvaluationConfig(num_windows=0, seq_len=64),
    )  # fmt: skip
    pipeline.run(task, lambda event: None)
    return folder / "out"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """``quantized`` in a folder that tests share and leave as it is."""
    return cache(lambda name, **options: quantized(tmp_path_factory.mktemp("case"), name, **options))


GENERATION = {"eos_token_id": [7, 9], "do_sample": True, "temperature": 0.7, "top_k": None, "max_new_tokens": 50}
EXACT = {"session.qdq_matmulnbits_accuracy_level": "1"}


@pytest.mark.parametrize(
    ("name", "options"), [("4 bits", {}), ("window", EXACT), ("int8 static", {"session.x64quantprecision": "1"})]
)
def test_genai_is_told_how_to_run_the_graph(tmp_path, name, options, proof_in_this_process):
    """The stop tokens and the sampling of generation_config.json, and the options with which it computes our numbers.

    ONNX Runtime GenAI itself reads the file in tests/consumers/test_genai.py.
    """
    folder = quantized(tmp_path, name, generation_config=GENERATION)
    config = json.loads((folder / "config.json").read_text())
    told = json.loads((folder / "genai_config.json").read_text())
    model, decoder = told["model"], told["model"]["decoder"]
    assert model["eos_token_id"] == [7, 9] and model["vocab_size"] == config["vocab_size"]
    assert told["search"] == {
        "max_length": model["context_length"], "do_sample": True, "temperature": 0.7, "past_present_share_buffer": False
    }  # fmt: skip
    assert model["context_length"] == config["max_position_embeddings"]
    session = Session(folder, optimized=True, static_inputs=name in STATIC_INPUTS).session
    assert decoder["num_hidden_layers"] * 2 == sum(one.name.startswith("past_") for one in session.get_inputs())
    [cache] = {tuple(one.shape[1::2]) for one in session.get_inputs() if one.name.startswith("past_")}
    assert cache == (decoder["num_key_value_heads"], decoder["head_size"])
    own = {key: value for key, value in decoder["session_options"].items() if key.startswith("session.")}
    assert own == options


class Session:
    """ONNX Runtime on an artifact, called as Optimum calls it."""

    def __init__(self, folder, *, optimized, static_inputs=False):
        self.session = onnxruntime.InferenceSession(
            folder / FILE_NAME, session_options(optimized=optimized, static_inputs=static_inputs)
        )
        self.cache_names = [one.name for one in self.session.get_inputs() if one.name.startswith("past_key_values.")]

    def empty(self, batch):
        shapes = [one.shape for one in self.session.get_inputs() if one.name in self.cache_names]
        return [numpy.zeros((batch, shape[1], 0, shape[3]), numpy.float32) for shape in shapes]

    def __call__(self, ids, mask, past):
        """(logits, cache) for tokens [B, T] after those in the cache; ``mask`` [B, all tokens]."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        feed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        if "position_ids" in [one.name for one in self.session.get_inputs()]:
            feed["position_ids"] = positions.numpy()
        logits, *present = self.session.run(None, feed | dict(zip(self.cache_names, past, strict=True)))
        return torch.from_numpy(logits), present


@pytest.mark.parametrize("name", with_rare(CASES, RARE))
def test_logits(artifact, name, proof_in_this_process):
    """Of a padded batch, at once and token by token.

    Weights are the same numbers, so logits differ by the order of float32 sums alone. Where activations are rounded,
    that noise moves a few of them to the next code.
    """
    folder = artifact(name)
    model, allowed = load(folder).model, CASES[name][3]
    ids, mask = torch.randint(1, 512, (3, 9)), torch.ones(3, 9, dtype=torch.int64)
    mask[1, :4] = 0
    positions = {} if name == "alibi" else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    wanted = model(ids, attention_mask=mask, **positions).logits
    for optimized in (False, True):
        run = Session(folder, optimized=optimized, static_inputs=name in STATIC_INPUTS)
        logits, _ = run(ids, mask, run.empty(3))
        beginning, cache = run(ids[:, :6], mask[:, :6], run.empty(3))
        found = [beginning]
        for end in range(7, 10):
            step, cache = run(ids[:, end - 1 : end], mask[:, :end], cache)
            found.append(step)
        for given in (logits, torch.cat(found, 1)):
            difference = (given - wanted)[mask.bool()].abs()
            assert difference.max() <= allowed * wanted.abs().max(), (optimized, difference.max() / wanted.abs().max())
            assert difference.mean() <= allowed / 5 * wanted.abs().mean()


@pytest.mark.slow
def test_a_bfloat16_model_keeps_its_tensors(artifact, proof_in_this_process):
    """As they are stored, with names of the checkpoint; what is quantized lies there as codes alone."""
    folder = artifact("mixed", dtype=torch.bfloat16)
    graph = onnx.load(folder / FILE_NAME, load_external_data=False).graph
    kinds = Counter(node.op_type for node in graph.node)
    assert kinds["MatMulNBits"] == 2 * 4 + 1 and kinds["QuantizeLinear"] == 1 and kinds["DequantizeLinear"] == 4 + 1
    source, found = read_local(folder.parent / "model").tensors, read_onnx_headers(folder)
    codes = {name.removesuffix("_codes") for name in found if name.endswith(".weight_codes")}
    assert len(codes) == 13 and set(found) & set(source) == set(source) - codes
    assert all(found[name].dtype == "BF16" for name in set(source) - codes)
    assert all(found[f"{name}_codes"].dtype == ("I8" if "up_proj" in name else "U8") for name in codes)
    shapes = {name: found[f"model.layers.0.self_attn.{name}"].shape for name in ("q_proj.weight_codes",
              "q_proj.weight_scale", "q_proj.weight_zero_point", "o_proj.weight_codes")}  # fmt: skip
    assert list(shapes.values()) == [(64, 2, 16), (64, 2), (64, 1), (64, 4, 8)]
    assert "model.layers.0.self_attn.o_proj.weight_zero_point" not in found  # 8 in the middle is what readers take
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "MANIFEST.json", FILE_NAME, DATA_NAME, "plan.json", "report.json",
        "README.md", "genai_config.json", "report.html", "reproduce.sh", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    text = (folder / FILE_NAME).read_bytes()
    assert b".py" not in text, "the graph tells where it was traced"
    model, run = load(folder).model.float(), Session(folder, optimized=True)
    ids = torch.randint(1, 512, (2, 9))
    wanted = model(ids).logits
    logits, _ = run(ids, torch.ones_like(ids), run.empty(2))
    assert (logits - wanted).abs().max() <= MOVED_CODES * wanted.abs().max()


@pytest.mark.slow
def test_inputs_and_outputs_have_the_names_of_optimum(artifact, proof_in_this_process):
    graph = onnx.load(artifact("4 bits") / FILE_NAME, load_external_data=False).graph

    def described(values):
        return {one.name: [axis.dim_param or axis.dim_value for axis in one.type.tensor_type.shape.dim]
                for one in values}  # fmt: skip

    inputs, outputs = described(graph.input), described(graph.output)
    assert list(inputs)[:3] == ["input_ids", "attention_mask", "position_ids"]
    assert inputs["attention_mask"] == ["batch_size", "total_sequence_length"]
    assert inputs["past_key_values.1.value"] == ["batch_size", 2, "past_sequence_length", 16]
    assert outputs["present.1.key"] == ["batch_size", 2, "total_sequence_length", 16]
    kinds = [f"{index}.{kind}" for index in range(2) for kind in ("key", "value")]
    assert list(inputs)[3:] == [f"past_key_values.{kind}" for kind in kinds]
    assert list(outputs) == ["logits", *(f"present.{kind}" for kind in kinds)]


@pytest.mark.slow
def test_it_is_read_as_the_same_codes(tmp_path, proof_in_this_process):
    folder = quantized(tmp_path, "int8 static", ("onnx", "quark"), dtype=torch.bfloat16)
    (model, config), (other, other_config) = load(folder / "onnx"), load(folder / "quark")
    assert config == presets.resolve("int8_static") and other_config.exclude == config.exclude
    pairs = list(zip(quantized_layers(model), quantized_layers(other), strict=True))
    assert len(pairs) == 7
    for (name, layer), (_, wanted) in pairs:
        one, two = encode_layer(layer), encode_layer(wanted)
        assert torch.equal(one.weight.codes, two.weight.codes), name
        assert torch.equal(one.weight.params.scale, two.weight.params.scale), name
        assert torch.equal(one.inputs.scale, two.inputs.scale), name
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids).logits, other(ids).logits)


@pytest.mark.slow
def test_a_damaged_file_does_not_pass(artifact, tmp_path, proof_in_this_process, monkeypatch):
    """Bytes that change after they were written are seen by the proof, and a file that is cut by who reads it."""
    write_side_files = pipeline.write_side_files

    def damaged(context):
        write_side_files(context)
        header = read_onnx_headers(context.folder)["model.layers.0.mlp.up_proj.weight_zero_point"]
        with (context.folder / DATA_NAME).open("r+b") as file:
            file.seek(header.begin + 3)
            file.write(b"\x5a")

    monkeypatch.setattr(pipeline, "write_side_files", damaged)
    with pytest.raises(ProofError, match=r"model\.layers\.0\.mlp\.up_proj\.weight' read back from the onnx files"):
        quantized(tmp_path, "4 bits", num_hidden_layers=1)
    monkeypatch.setattr(pipeline, "write_side_files", write_side_files)
    folder = shutil.copytree(artifact("4 bits"), tmp_path / "again")
    data = (folder / DATA_NAME).read_bytes()
    (folder / DATA_NAME).write_bytes(data[:-4096])
    with pytest.raises(ModelError, match=rf"of {FILE_NAME} does not fit {DATA_NAME}"):
        load(folder)
    (folder / FILE_NAME).write_bytes(b"no graph at all")
    with pytest.raises(ModelError, match=f"{FILE_NAME} cannot be read"):
        load(folder)


def plan(folder, config, model_type="llama", **options):
    headers = read_local(tiny_model(folder / "model", model_type=model_type, **options))
    return headers, make_plan(JobSpec(config=config, calibration=CALIBRATION, export=("onnx",)), headers)


def weight_only(**spec):
    config = QuantizationConfig(weight=QuantizationSpec(**spec))
    return replace(presets.resolve("int8"), global_quant_config=config)


REFUSED = {
    "groups": (presets.resolve("w4a16", group_size=8), "groups of 16, 32, 64, 128, 256 inputs, not 8"),
    "4-bit activations": (presets.resolve("int4_wa_64"), "quantized inputs are one of int8, uint8"),
    "two scales": (presets.resolve("nvfp4"), "its element types are"),
    "two stages": (presets.resolve("int4_fp8"), "one scale per value, not two"),
    "outliers": (presets.resolve("llm_int8"), "cannot store outlier_threshold"),
    "blocks": (weight_only(dtype="fp8_e4m3", qscheme="per_block", block_size=(16, 32)), "not rows and columns"),
    "groups and inputs": (
        replace(
            presets.resolve("int8"),
            global_quant_config=QuantizationConfig(
                weight=QuantizationSpec(dtype="int8", qscheme="per_group", group_size=32),
                input_tensors=QuantizationSpec(dtype="int8"),
            ),
        ),
        "no kernel for 8-bit inputs and 8-bit weights in groups",
    ),
    "16 bits": (
        weight_only(dtype="int16", qscheme="per_channel"),
        "weights are int4 or uint4 in groups, or one of int8, uint8, fp8_e4m3, fp8_e5m2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_hold_is_refused_before_any_work(tmp_path, case):
    config, text = REFUSED[case]
    with pytest.raises(ConfigError, match=text) as caught:
        plan(tmp_path, config)
    assert caught.value.code == "incompatible_export"


@pytest.mark.parametrize("exclude", [("lm_head",), ("lm_head", "*.experts.*")])
def test_experts_are_refused(tmp_path, exclude):
    config = replace(presets.resolve("w4a16"), exclude=exclude)
    with pytest.raises(ConfigError, match="chosen at run time") as caught:
        plan(tmp_path, config, "mixtral", **MIXTURES["mixtral"])
    assert caught.value.code == "incompatible_export"


def test_tensors_that_do_not_fit_the_model_are_named(tmp_path):
    headers, found = plan(tmp_path, presets.resolve("w4a16"))
    layouts = found.layouts["onnx"]
    few = {name: layout for name, layout in layouts.items() if name != "model.norm.weight"}
    with pytest.raises(ModelError, match=r"no tensor for 'model\.norm\.weight'"):
        trace(headers.config, few, found.layers)
    with pytest.raises(ModelError, match=r"no parameter for 'model\.extra\.weight'"):
        trace(headers.config, {**layouts, "model.extra.weight": layouts["model.norm.weight"]}, found.layers)


def test_a_model_without_keys_and_values_is_refused(tmp_path):
    headers, found = plan(tmp_path, presets.resolve("int8_weight_only"), "mamba", num_hidden_layers=2)
    with pytest.raises(ModelError, match="cannot be traced into an ONNX graph with a key-value cache") as caught:
        trace(headers.config, found.layouts["onnx"], found.layers)
    assert caught.value.code == "not_traceable"


@pytest.mark.slow
def test_a_model_without_positions(artifact, proof_in_this_process):
    """ALiBi: positions are what the mask says."""
    folder = artifact("alibi")
    names = [one.name for one in onnxruntime.InferenceSession(folder / FILE_NAME).get_inputs()]
    assert names[:3] == ["input_ids", "attention_mask", "past_key_values.0.key"]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(ConfigError, match=r"needs the package.s. onnxscript\. pip install"):
        quantized(tmp_path, "4 bits")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_config_json_says_how_layers_are_quantized(artifact, proof_in_this_process):
    folder = artifact("mixed", dtype=torch.bfloat16)
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "onnx" and sum(len(group["layers"]) for group in said["groups"]) == 13
    _, config = load(folder)
    assert config.choose("model.layers.1.mlp.down_proj", "Linear")[0] == MIXED.layer_quant_config["*.1.mlp.down_proj"]
    assert config.choose("model.layers.0.mlp.down_proj", "Linear")[0] is None


@pytest.mark.slow
def test_a_real_model_writes_the_same_text(tmp_path):
    """SmolLM2 in 4 bits: the text, the logits and the perplexity of the same codes in the Quark format, in float32."""
    model_dir = demo_model.prepare(print)
    task = Task(
        model_dir=model_dir, output_dir=tmp_path / "out", config=presets.resolve("w4a16"), export=("quark", "onnx"),
        calibration=CALIBRATION, evaluation=EvaluationConfig(num_windows=0, seq_len=512),
    )  # fmt: skip
    pipeline.run(task, lambda event: None)
    model, codes = load(tmp_path / "out/quark").model.float(), read_model(tmp_path / "out/quark").quantized
    for name, layer in codes.layers.items():  # as they are: the model that was loaded has rounded them to its dtype
        model.get_parameter(name).data = read_layer(codes, layer).weight.dequantize()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/onnx")
    run = Session(tmp_path / "out/onnx", optimized=True)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    mask = torch.ones_like(ids)
    wanted = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=-1)
    step, cache, written = ids, run.empty(1), ids
    for _ in range(20):
        logits, cache = run(step, torch.ones_like(written), cache)
        step = logits[:, -1:].argmax(-1)
        written = torch.cat([written, step], 1)
    assert torch.equal(written, wanted) and "Paris" in tokenizer.decode(written[0])
    text = tokenizer((model_dir / "config.json").read_text() + task.model_dump_json(), return_tensors="pt").input_ids
    logits, _ = run(text, torch.ones_like(text), run.empty(1))
    expected = model(text).logits
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()  # 30 blocks of float32 noise: 1e-5
    losses = [torch.nn.functional.cross_entropy(one[0, :-1], text[0, 1:]) for one in (logits, expected)]
    assert abs(losses[0] - losses[1]) < 1e-5
