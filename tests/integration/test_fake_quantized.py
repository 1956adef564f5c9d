"""Checkpoints of rounded weights in the float model's own format: plain Transformers computes the quantized model."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantcore import ExporterConfig, JsonExporterConfig, ModelExporter, ModelQuantizer
from quantcore.checkpoint.headers import read_local, read_tensor_headers
from quantcore.config import presets
from quantcore.config.algorithms import config_of
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import CalibrationConfig, Config, QuantizationConfig, QuantizationSpec
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.data.windows import DocumentTokenizer, token_windows
from quantcore.engine.pipeline.job import run
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.errors import ConfigError, ModelError, ProofError
from quantcore.events import Warned
from quantcore.plan.planner import make_plan
from quantcore.tensors.source import Source
from tests.support.models import MIXTURES, tiny_model, tiny_tokenizer
from tests.support.params import with_rare

W4 = presets.resolve("w4a16", group_size=32)
MODELS = {
    "llama": {},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_positions": 256},  # Conv1D: [in, out], and biases
    "mixtral": MIXTURES["mixtral"],
    "granitemoe": MIXTURES["granitemoe"],  # experts stacked in the file
    "gpt_oss": MIXTURES["gpt_oss"],  # stacked, transposed, with biases
}
IDS = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
CALIBRATION = CalibrationConfig(num_samples=4, seq_len=64)


def task(model_dir, output_dir, config=W4, export=("fake_quantized",)):
    return Task(
        model_dir=model_dir, output_dir=output_dir, config=config, export=export, calibration=CALIBRATION,
        evaluation=EvaluationConfig(num_windows=3, seq_len=64, num_prompts=0),
    )  # fmt: skip


def plain(folder):
    """The model as anybody loads it. Every tensor of the files has its place, and every parameter its tensor."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def frozen(model_dir, config=W4):
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(plain(model_dir)))


def difference(one, other):
    return ((one - other).abs().max() / other.abs().max()).item()


@pytest.fixture(
    scope="module", params=with_rare([torch.float32, torch.bfloat16], [torch.float32]), ids=["float32", "bfloat16"]
)
def dtype(request):
    return request.param


@pytest.mark.parametrize("name", with_rare(MODELS, ["mixtral", "granitemoe"]))
def test_plain_transformers_computes_the_quantized_model(tmp_path, name, dtype, proof_in_this_process):
    model_dir = tiny_model(tmp_path / "model", model_type=name, dtype=dtype, **MODELS[name])
    report = run(task(model_dir, tmp_path / "out"), lambda event: None).to_dict()
    model = plain(tmp_path / "out")
    assert model.dtype == dtype and report["proof"]["fake_quantized"]["max_logit_difference"] == 0
    assert difference(logits(model), logits(plain(model_dir))) > 0.02  # it is not the float model
    if (name, dtype) != ("gpt_oss", torch.bfloat16):  # whose routers decide otherwise after bfloat16's other roundings
        assert difference(logits(model), logits(frozen(model_dir))) < 1e-6
    given, written = (read_tensor_headers(folder) for folder in (model_dir, tmp_path / "out"))
    assert {key: (one.dtype, one.shape) for key, one in written.items()} == {
        key: (one.dtype, one.shape) for key, one in given.items()
    }
    assert (tmp_path / "out/config.json").read_text() == (model_dir / "config.json").read_text()


def test_the_weights_are_the_rounded_ones_and_all_else_is_as_it_was(tmp_path, proof_in_this_process):
    model_dir = tiny_model(tmp_path / "model", model_type="gpt2", **MODELS["gpt2"])
    report = run(task(model_dir, tmp_path / "out"), lambda event: None).to_dict()
    given, written = (load_file(folder / "model.safetensors") for folder in (model_dir, tmp_path / "out"))
    layers = {f"{layer['name']}.weight" for layer in report["layers"]}
    assert len(layers) == 3 * 4
    for name, tensor in given.items():
        expected = tensor
        if name in layers:
            expected = round_to_nearest(tensor.T, W4.global_quant_config.weight).dequantize().T.bfloat16()
            assert len(written[name].T[0, :32].unique()) <= 16
        assert torch.equal(written[name], expected), name


@pytest.mark.parametrize("algorithm", with_rare([None, "smoothquant", "rotation"], [None]))
def test_the_perplexity_of_the_report_is_that_of_plain_transformers(tmp_path, algorithm, proof_in_this_process):
    """Also where an algorithm changed tensors that are not quantized."""
    model_dir = tiny_model(tmp_path / "model", dtype=torch.float32)
    config = replace(W4, algo_config=() if algorithm is None else (config_of(algorithm),))
    report = run(task(model_dir, tmp_path / "out", config), lambda event: None).to_dict()
    norms = [load_file(folder / "model.safetensors")["model.layers.1.input_layernorm.weight"]
             for folder in (model_dir, tmp_path / "out")]  # fmt: skip
    assert torch.equal(*norms) == (algorithm is None)
    tokenizer = tiny_tokenizer()
    windows = token_windows(
        CALIBRATION,
        DocumentTokenizer(
            lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            separator=tokenizer.eos_token_id,
        ),
        num_held_out=3,
        held_out_len=64,
    ).held_out_NT
    model = plain(tmp_path / "out")
    with torch.no_grad():
        losses = [model(window[None], labels=window[None]).loss for window in windows]
    assert torch.stack(losses).mean().exp().item() == pytest.approx(report["summary"]["perplexity_after"], rel=1e-5)


def test_shards_and_stacks_that_are_not_quantized_are_the_bytes_of_the_model(tmp_path, proof_in_this_process):
    """Experts go through one by one, and stand again where they stood."""
    model_dir = tiny_model(tmp_path / "model", model_type="gpt_oss", max_shard_size="100KB", **MIXTURES["gpt_oss"])
    config = replace(W4, exclude=("*.experts.*", "lm_head"))
    run(task(model_dir, tmp_path / "out", config), lambda event: None)
    given, written = (read_tensor_headers(folder) for folder in (model_dir, tmp_path / "out"))
    stacks = [name for name in given if ".experts." in name]
    assert len(stacks) == 3 * 4 and len({header.file for header in given.values()}) > 2
    assert given.keys() == written.keys()
    for name in stacks:
        one, other = ((folder / h[name].file).read_bytes()[h[name].begin : h[name].end]
                      for folder, h in ((model_dir, given), (tmp_path / "out", written)))  # fmt: skip
        assert one == other


TAMPERED = {
    "a weight": ("llama", "model.layers.1.mlp.up_proj.weight"),
    "a norm": ("llama", "model.norm.weight"),
    "the embedding": ("llama", "model.embed_tokens.weight"),
    "a Conv1D": ("gpt2", "transformer.h.1.mlp.c_fc.weight"),
    "a bias": ("gpt2", "transformer.h.0.attn.c_attn.bias"),
    "an expert": ("mixtral", "model.layers.2.block_sparse_moe.experts.3.w2.weight"),
    "a stack": ("gpt_oss", "model.layers.2.mlp.experts.down_proj"),
    "a stack of biases": ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias"),
}


ALONE, BESIDE = ("fake_quantized",), ("quark", "fake_quantized")
CHANGES = [(case, ALONE) for case in TAMPERED] + [
    (case, BESIDE)
    for case, (model_type, _) in TAMPERED.items()
    if model_type != "gpt2"  # no other format holds a Conv1D
]


@pytest.mark.parametrize(
    ("case", "export"),
    with_rare(
        CHANGES,
        [("the embedding", ALONE), ("a stack of biases", ALONE)] + [(case, BESIDE) for case in list(TAMPERED)[1:]],
    ),
    ids=lambda one: one if isinstance(one, str) else "+".join(one),
)
def test_the_proof_sees_one_changed_bit(tmp_path, monkeypatch, proof_in_this_process, case, export):
    model_type, name = TAMPERED[case]
    model_dir = tiny_model(tmp_path / "model", model_type=model_type, **MODELS[model_type])

    def tamper(task, folder, expected, emit):
        folder = folder / "fake_quantized" if len(export) > 1 else folder
        header = read_tensor_headers(folder)[name]
        with (folder / header.file).open("r+b") as file:
            file.seek(header.end - 2)  # the lowest bit of the last bfloat16
            byte = file.read(1)[0]
            file.seek(header.end - 2)
            file.write(bytes([byte ^ 1]))
        return proof_in_this_process(task, folder.parent if len(export) > 1 else folder, expected, emit)

    monkeypatch.setattr("quantcore.engine.pipeline.job.prove_in_fresh_process", tamper)
    with pytest.raises(ProofError) as caught:
        run(task(model_dir, tmp_path / "out", export=export), lambda event: None)
    assert caught.value.code == "proof_tensor_differs" and "fake_quantized" in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("llama") / "model")


@pytest.mark.slow
def test_alone_it_is_a_measure_of_the_weights(llama, tmp_path, proof_in_this_process):
    """fp8 with static activations and a quantized cache: nothing is calibrated, and what is measured is the files."""
    events = []
    config = presets.resolve("fp8", kv_cache="fp8")
    without_gates = {"gate": "off"}  # their limits are those of trained models
    report = run(task(llama, tmp_path / "out", config).model_copy(update=without_gates), events.append).to_dict()
    assert {layer["scheme"] for layer in report["layers"]} == {"fp8_e4m3 per_tensor"}
    said = ["fake_quantized stores only weights: the activations of 21 layer(s) are not quantized."]
    assert report["warnings"] == [event.message for event in events if isinstance(event, Warned)] == said
    weights = presets.resolve("fp8").global_quant_config.weight
    weight_only = Config(global_quant_config=QuantizationConfig(weight=weights), exclude=("lm_head",))
    given = task(llama, tmp_path / "weights", weight_only).model_copy(update=without_gates)
    other = run(given, lambda event: None).to_dict()
    assert report["summary"]["perplexity_after"] == other["summary"]["perplexity_after"] and other["warnings"] == []
    headers = read_local(llama)
    plan = make_plan(JobSpec(config=config, calibration=CALIBRATION, export=("fake_quantized",)), headers)
    assert not plan.needs_calibration and plan.size_after_bytes == plan.size_before_bytes


@pytest.mark.parametrize(
    "export", [("quark", "fake_quantized"), pytest.param(("fake_quantized", "quark"), marks=pytest.mark.slow)]
)
def test_beside_another_format_that_one_is_measured(llama, tmp_path, export, proof_in_this_process):
    config = presets.resolve("fp8")
    report = run(task(llama, tmp_path / "out", config, export), lambda event: None).to_dict()
    alone = run(task(llama, tmp_path / "quark", config, ("quark",)), lambda event: None).to_dict()
    assert {layer["scheme"] for layer in report["layers"]} == {"fp8_e4m3 per_tensor + fp8_e4m3 per_tensor static"}
    assert report["proof"]["fake_quantized"]["max_logit_difference"] is None
    for key in ("perplexity_after", "size_after_bytes"):
        assert report["summary"][key] == alone["summary"][key]
    plain(tmp_path / "out" / "fake_quantized")
    assert "quantization_config" in json.loads((tmp_path / "out" / "quark" / "config.json").read_text())


UNIQUE = ("fp8_block", "int4_fp8", "mxint8", "nf4", "nvfp4", "int4_wa_64")


@pytest.mark.parametrize("preset", with_rare(UNIQUE, ["int4_fp8", "mxint8", "nf4", "int4_wa_64"]))
def test_schemes_that_no_other_format_holds(llama, tmp_path, preset, proof_in_this_process):
    report = run(task(llama, tmp_path / "out", presets.resolve(preset)), lambda event: None).to_dict()
    assert 0.5 < report["summary"]["perplexity_ratio"] < 2
    assert difference(logits(plain(tmp_path / "out")), logits(plain(llama))) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["awq", "rotation"])
def test_norms_stay_in_the_dtype_that_they_are_stored_in(tmp_path, algorithm, proof_in_this_process):
    """Some checkpoints keep them in float32 beside bfloat16 weights; folding changes them."""
    model_dir = tiny_model(tmp_path / "model")
    tensors = load_file(model_dir / "model.safetensors")
    tensors = {name: tensor.float() if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    config = replace(W4, algo_config=(config_of(algorithm),))
    report = run(task(model_dir, tmp_path / "out", config), lambda event: None).to_dict()
    assert report["proof"]["fake_quantized"]["max_logit_difference"] == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    changed = [name for name in tensors if "norm" in name and not torch.equal(written[name], tensors[name])]
    assert changed and all(written[name].dtype == tensors[name].dtype for name in tensors)


BIASES = {"gpt2": 3 * 4, "gpt_oss": 3 * (4 + 4 * 2), "gptj": 3 * 2 + 1}


@pytest.mark.parametrize("model_type", with_rare(BIASES, ["gptj"]))
def test_biases_are_rounded_where_the_config_says_so(tmp_path, model_type, proof_in_this_process):
    """That of GPT-J's head, too."""
    overrides = {"rotary_dim": 8, "tie_word_embeddings": False} if model_type == "gptj" else MODELS[model_type]
    model_dir = tiny_model(tmp_path / "model", model_type=model_type, **overrides)
    layer = replace(W4.global_quant_config, bias=QuantizationSpec(dtype="int4"))
    config = replace(W4, global_quant_config=layer, exclude=())
    report = run(task(model_dir, tmp_path / "out", config), lambda event: None).to_dict()
    assert report["proof"]["fake_quantized"]["max_logit_difference"] == 0
    given, written = (Source(folder, read_local(folder).tensors) for folder in (model_dir, tmp_path / "out"))
    biases = [f"{layer['name']}.bias" for layer in report["layers"] if f"{layer['name']}.bias" in given]
    assert len(biases) == BIASES[model_type]
    for name in biases:
        before, after = given.read(name), written.read(name)
        assert torch.equal(after, round_to_nearest(before, layer.bias).dequantize().bfloat16()), name
        assert not torch.equal(before, after)
    if model_type == "gpt2":
        ModelExporter(tmp_path / "memory").export_safetensors_model(
            frozen(model_dir, config), config, custom_mode="fake_quantized"
        )
        both = [load_file(tmp_path / way / "model.safetensors") for way in ("out", "memory")]
        assert all(torch.equal(tensor, both[1][name]) for name, tensor in both[0].items())


def test_a_bias_that_took_a_scale_is_rounded_afterwards(tmp_path, proof_in_this_process):
    """Of the values in OPT: SmoothQuant divides their weights and biases by what the output layer takes over."""
    model_dir = tiny_model(
        tmp_path / "model", model_type="opt", ffn_dim=128, word_embed_proj_dim=64, dtype=torch.float32
    )
    layer = replace(W4.global_quant_config, bias=QuantizationSpec(dtype="int4"))
    config = replace(W4, global_quant_config=layer, algo_config=(config_of("smoothquant"),))
    run(task(model_dir, tmp_path / "out", config), lambda event: None)
    given, written = (
        load_file(folder / "model.safetensors")["model.decoder.layers.1.self_attn.v_proj.bias"]
        for folder in (model_dir, tmp_path / "out")
    )
    assert len(written.unique()) <= 16 < len(given.unique())
    assert not torch.equal(written, round_to_nearest(given, layer.bias).dequantize())


class TestFromMemory:
    @pytest.mark.parametrize("name", with_rare(["llama", "gpt2", "mixtral"], ["gpt2"]))
    def test_the_files_are_those_of_the_engine(self, tmp_path, name, dtype, proof_in_this_process):
        model_dir = tiny_model(tmp_path / "model", model_type=name, dtype=dtype, **MODELS[name])
        run(task(model_dir, tmp_path / "stream"), lambda event: None)
        options = ExporterConfig(json_export_config=JsonExporterConfig(weight_format="fake_quantized"))
        model = frozen(model_dir)
        ModelExporter(options, tmp_path / "memory").export_safetensors_model(model, W4)
        streamed, written = (load_file(tmp_path / way / "model.safetensors") for way in ("stream", "memory"))
        assert streamed.keys() == written.keys()
        assert [key for key in written if not torch.equal(written[key], streamed[key])] == []
        assert torch.equal(logits(plain(tmp_path / "memory")), logits(plain(tmp_path / "stream")))

    def test_stacked_experts_are_left_to_the_engine(self, tmp_path):
        model_dir = tiny_model(tmp_path / "model", model_type="granitemoe", **MODELS["granitemoe"])
        with pytest.raises(ModelError, match=r"experts in stacks.*--model_export fake_quantized"):
            ModelExporter(tmp_path / "out").export_safetensors_model(
                frozen(model_dir), W4, custom_mode="fake_quantized"
            )
        assert not (tmp_path / "out").exists()

    def test_an_unknown_weight_format_is_answered_with_the_list(self, llama, tmp_path):
        options = ExporterConfig(json_export_config=JsonExporterConfig(weight_format="fake"))
        with pytest.raises(ConfigError, match="real_quantized, fake_quantized"):
            ModelExporter(options, tmp_path / "out").export_safetensors_model(frozen(llama), W4)
