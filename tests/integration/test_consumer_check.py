"""Transformers reads what we wrote as the model that we meant; a job whose files it reads otherwise fails."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.quantizers.quantizers_utils import should_convert_module

from quantcore.config import presets
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.pipeline import job as pipeline
from quantcore.engine.pipeline import tiny_export
from quantcore.engine.verification import consumer
from quantcore.engine.verification import verify as proof
from quantcore.errors import ConfigError, ProofError
from quantcore.export import EXPORTERS, json_files
from quantcore.plan.planner import Plan
from tests.support.models import MIXTURES, SHAPE, tiny_model
from tests.support.params import with_usual

pytestmark = pytest.mark.usefixtures("proof_in_this_process")

IDS = torch.arange(32)[None] * 7 % 500
MODELS = {  # architectures whose checkpoints and models call layers differently, or that have linear layers beside text
    "gpt_neox": {"tie_word_embeddings": False},
    "fuyu": {"text_config": {**SHAPE, "model_type": "persimmon"}, "image_size": 30, "patch_size": 10},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 32,
        "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64, "topk_group": 1, "chunk_size": 16,
    },
    "mixtral": MIXTURES["mixtral"],
    "gemma3": {
        "text_config": {
            **SHAPE, "query_pre_attn_scalar": 16, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 8,
        },
        "mm_tokens_per_image": 4, "image_token_id": 510, "boi_token_id": 508, "eoi_token_id": 509,
    },
}  # fmt: skip


def model_of(folder, model_type):
    return tiny_model(folder, model_type=model_type, dtype=torch.float32, **MODELS.get(model_type, {}))


def quantized(model_dir, folder, config, *exports, events=None, file2file=True):
    """The report of a job from file to file, without gates."""
    task = Task(
        model_dir=model_dir, output_dir=folder / "out", config=config, export=exports, file2file=file2file, gate="off",
        calibration=CalibrationConfig(num_samples=2, seq_len=32),
        evaluation=EvaluationConfig(num_windows=0),
    )  # fmt: skip
    return pipeline.run(task, (lambda event: None) if events is None else events.append).to_dict()


def said_in(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("preset", ["w4a16_sym", "fp8_dynamic"])
@pytest.mark.parametrize("model_type", MODELS)
def test_transformers_computes_the_same_whatever_it_calls_the_layers(model_type, preset, tmp_path):
    model_dir = model_of(tmp_path / "model", model_type)
    report = quantized(model_dir, tmp_path, presets.resolve(preset), "compressed_tensors")
    check = report["proof"]["compressed_tensors"]["consumer_check"]
    in_bfloat16 = preset == "w4a16_sym" and model_type in ("nemotron_h", "mixtral")  # packed experts; 0.06 was seen
    assert check["logit_difference"] <= (0.15 if in_bfloat16 else 1e-6), check
    assert check["consumer"].startswith("Transformers 5.") and "with compressed-tensors 0." in check["consumer"]
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not found["missing_keys"]


def test_the_tower_of_a_model_that_sees_is_left_alone(tmp_path):
    """It was taken for quantized, its scales at random, as config.json named its layers as the checkpoint does."""
    model_dir = model_of(tmp_path / "model", "gemma3")
    quantized(model_dir, tmp_path, presets.resolve("w4a16_sym"), "compressed_tensors")
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    seen = [
        AutoModelForImageTextToText.from_pretrained(folder).get_image_features(image).pooler_output
        for folder in (model_dir, tmp_path / "out")
    ]
    torch.testing.assert_close(*seen, rtol=0, atol=0)


def test_a_scheme_of_its_own_is_found_under_both_names(tmp_path):
    config = replace(
        presets.resolve("w4a16_sym"),
        exclude=(),
        layer_quant_config={"lm_head": presets.resolve("int8_weight_only").global_quant_config},
    )
    report = quantized(model_of(tmp_path / "model", "gpt_neox"), tmp_path, config, "compressed_tensors")
    assert report["proof"]["compressed_tensors"]["consumer_check"]["logit_difference"] <= 1e-6
    targets = [group["targets"] for group in said_in(tmp_path / "out")["config_groups"].values()]
    assert ["embed_out", "lm_head"] in targets


@pytest.mark.parametrize(
    ("preset", "export", "key"),
    [
        ("w4a16_sym", "awq", "modules_to_not_convert"),
        ("fp8_block", "fp8", "ignored_layers"),
        ("nf4", "bitsandbytes", "llm_int8_skip_modules"),
        ("w4a16_sym", "quark", "exclude"),
    ],
)
def test_every_format_names_what_is_kept_as_the_model_does(preset, export, key, tmp_path):
    wide = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    model_dir = tiny_model(tmp_path / "model", model_type="gpt_neox", tie_word_embeddings=False, **wide)
    quantized(model_dir, tmp_path, presets.resolve(preset), export)
    said = said_in(tmp_path / "out")
    assert set(said[key]) == {"embed_out", "lm_head"}
    assert not should_convert_module("lm_head", said[key])
    assert should_convert_module("gpt_neox.layers.0.attention.dense", said[key])


def test_so_does_gptq(tmp_path):
    quantized(model_of(tmp_path / "model", "gpt_neox"), tmp_path, presets.resolve("w4a16_sym"), "gptq")
    assert set(said_in(tmp_path / "out")["dynamic"]) == {"-:^embed_out$", "-:^lm_head$"}


def test_files_of_an_unknown_class_keep_the_names_of_the_checkpoint(tmp_path):
    model_dir = model_of(tmp_path / "model", "llama")
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"model_type": "of_tomorrow"}))
    report = quantized(model_dir, tmp_path, presets.resolve("w4a16_sym"), "compressed_tensors")
    assert said_in(tmp_path / "out")["ignore"] == ["lm_head"]
    said = report["proof"]["compressed_tensors"]["consumer_check"]["not_checked"]
    assert "of_tomorrow" in said and "not supported by the installed" in said


def damaged(monkeypatch, change):
    """Jobs whose quantization_config is changed after it was written."""
    write_side_files = pipeline.write_side_files

    def write(context):
        write_side_files(context)
        config = json.loads((context.folder / "config.json").read_text())
        change(config["quantization_config"])
        (context.folder / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(pipeline, "write_side_files", write)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_name_that_is_dropped_fails_the_job(streamed, tmp_path, monkeypatch):
    damaged(monkeypatch, lambda said: said["ignore"].remove("lm_head"))
    model_dir = tiny_model(tmp_path / "model", tie_word_embeddings=False)
    with pytest.raises(ProofError, match=r"no values in .* for \d+ tensor.*'lm_head\.weight_packed'") as caught:
        quantized(model_dir, tmp_path, presets.resolve("w4a16_sym"), "compressed_tensors", file2file=not streamed)
    assert caught.value.code == "consumer_reads_otherwise" and not (tmp_path / "out").exists()


def test_a_name_too_many_fails_the_job(tmp_path, monkeypatch):
    """Transformers takes the codes of that layer for its weight."""
    damaged(monkeypatch, lambda said: said["ignore"].append("model.layers.1.mlp.up_proj"))
    with pytest.raises(ProofError, match=r"computes different logits .* relative difference \d") as caught:
        quantized(tiny_model(tmp_path / "model"), tmp_path, presets.resolve("fp8_dynamic"), "compressed_tensors")
    assert caught.value.code == "consumer_reads_otherwise"


def test_what_is_not_checked_says_why(tmp_path, monkeypatch):
    model_dir, events = tiny_model(tmp_path / "model"), []

    def reason(folder, preset, export):
        return quantized(model_dir, tmp_path / folder, presets.resolve(preset), export, events=events)["proof"][export]

    def check(folder, preset, export):
        return reason(folder, preset, export)["consumer_check"]["not_checked"]

    assert check("1", "w4a16_sym", "quark") == "The proof does not run a program that reads quark files."
    assert "packed zero points" in check("2", "w4a16", "compressed_tensors")
    nf4 = EXPORTERS.get("bitsandbytes")
    monkeypatch.setattr(nf4, "readers", replace(nf4.readers, transformers_package="no-such-package"))
    assert check("3", "nf4", "bitsandbytes") == "no-such-package is not installed."
    assert [event for event in events if type(event).__name__ == "Warned"] == []
    monkeypatch.setattr(consumer, "_load", lambda folder, original, **options: 1 / 0)
    assert "cannot load and run these files: division by zero" in check("4", "w4a16_sym", "compressed_tensors")
    assert [event.code for event in events if type(event).__name__ == "Warned"] == ["consumer_check"]
    monkeypatch.setattr(proof, "free_memory_bytes", lambda device: 1000)
    assert "but 0.0 GB are free" in check("5", "w4a16_sym", "compressed_tensors")


@pytest.mark.parametrize(
    ("model_type", "preset"),
    [("mixtral", "int8_dynamic"), ("gpt_oss", "int8_dynamic"), ("gpt_oss", "nvfp4_weight_only")],
)
def test_experts_that_transformers_does_not_load_get_no_line_for_it(model_type, preset, tmp_path):
    """The line stood right below the reason why Transformers does not decode them."""
    model_dir = tiny_model(tmp_path / "model", model_type=model_type, **MIXTURES[model_type])
    report = quantized(model_dir, tmp_path, presets.resolve(preset), "compressed_tensors")
    export = report["summary"]["exports"]["compressed_tensors"]
    assert export["programs"] == {} and export["load"].startswith("import quantcore")
    assert "does not decode" in export["refusals"]["Transformers"]
    for file in ("report.html", "README.md"):
        text = (tmp_path / "out" / file).read_text().replace("\\", "")
        assert "from_pretrained" not in text and export["refusals"]["Transformers"] in text
    try:
        _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    except RuntimeError:
        return
    assert any(".experts." in name for name in found["missing_keys"])  # at random, without an error


@pytest.mark.parametrize("preset", ["mxfp4_weight_only", "nvfp4_weight_only", "w4a16_sym"])
def test_the_line_for_transformers_runs_for_a_model_in_float16(preset, tmp_path, monkeypatch):
    """Transformers decodes some schemes to bfloat16: "expected m1 and m2 to have the same dtype"."""
    model_dir = tiny_model(tmp_path / "model", dtype=torch.float16)
    report = quantized(model_dir, tmp_path, presets.resolve(preset), "compressed_tensors")
    lines = report["summary"]["exports"]["compressed_tensors"]["programs"]["Transformers"]
    assert ("dtype='bfloat16'" in lines) == (preset != "w4a16_sym")
    monkeypatch.chdir(tmp_path / "out")
    names = {}
    exec(lines, names)
    assert names["model"](IDS).logits.isfinite().all()


def test_a_tensor_that_the_float_model_lacks_is_no_fault_of_the_files(tmp_path):
    model_dir = tiny_model(tmp_path / "model")
    tensors = load_file(model_dir / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    report = quantized(model_dir, tmp_path, presets.resolve("w4a16_sym"), "compressed_tensors")
    assert "logits were not compared" in report["proof"]["compressed_tensors"]["consumer_check"]["not_checked"]


def test_code_that_config_json_names_is_not_run(tmp_path, monkeypatch):
    model_dir = tiny_model(tmp_path / "model")
    config = json.loads((model_dir / "config.json").read_text())
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    named = {"auto_map": names, "attn_implementation": "nobody/kernel", "trust_remote_code": True}
    (model_dir / "config.json").write_text(json.dumps(config | named))
    (model_dir / "evil.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    report = quantized(model_dir, tmp_path, presets.resolve("w4a16_sym"), "compressed_tensors")
    assert "consumer" in report["proof"]["compressed_tensors"]["consumer_check"]
    assert not (tmp_path / "was_run").exists()


def test_report_and_card_say_who_read_the_files(tmp_path):
    quantized(tiny_model(tmp_path / "model"), tmp_path, presets.resolve("w4a16_sym"), "quark", "fake_quantized")
    for file in ("report.html", "README.md"):
        text = (tmp_path / "out" / file).read_text().replace("\\", "")
        assert "reads the files; its logits differ by" in text and "not read by another program" in text


@pytest.fixture
def too_large(monkeypatch):
    monkeypatch.setattr(Plan, "allows_check", False)


TWINS = [("gpt_neox", "w4a16_sym"), ("gpt_neox", "int8"), ("gemma3", "w4a16_sym")]


@pytest.mark.parametrize(
    ("model_type", "preset"),
    with_usual(itertools.product(["gpt_neox", "gemma3"], ["w4a16_sym", "int8", "fp8_dynamic"]), TWINS),
)
def test_of_a_model_that_does_not_fit_a_twin_is_read(model_type, preset, tmp_path, too_large):
    model_dir = model_of(tmp_path / "model", model_type)
    report = quantized(model_dir, tmp_path, presets.resolve(preset), "compressed_tensors", file2file=preset != "int8")
    check = report["proof"]["compressed_tensors"]["consumer_check"]
    assert check["of_twin"] and check["logit_difference"] <= 1e-6, check


def test_a_name_that_the_twin_s_files_lack_fails_the_job(tmp_path, too_large, monkeypatch):
    whole = json_files

    def without_kept(export, model_config, config, layers, kept):
        return whole(export, model_config, config, layers, ())

    monkeypatch.setattr("quantcore.engine.pipeline.writer.json_files", without_kept)
    with pytest.raises(ProofError, match="finds no values in"):
        model_dir = model_of(tmp_path / "model", "gpt_neox")
        quantized(model_dir, tmp_path, presets.resolve("w4a16_sym"), "compressed_tensors")


def test_why_no_twin_is_read_is_said(tmp_path, too_large, monkeypatch):
    model_dir = tiny_model(tmp_path / "model")

    def reason(folder, export):
        report = quantized(model_dir, tmp_path / folder, presets.resolve("w4a16_sym"), export)
        return report["proof"][export]["consumer_check"]["not_checked"]

    assert reason("1", "quark") == "The proof does not run a program that reads quark files."
    monkeypatch.setattr(tiny_export, "build_tiny_model", lambda config, kind: 1 / 0)
    assert "with less. A small twin was not checked either: no small twin" in reason("2", "compressed_tensors")


def test_a_twin_that_could_not_exist_is_not_spoken_of(tmp_path, too_large, monkeypatch):
    """A GGUF file holds no int8 with a scale a row, which a twin has if its widths do not fit the scheme."""
    model_dir = tiny_model(tmp_path / "model")
    monkeypatch.setattr(tiny_export, "_export", lambda *_: (_ for _ in ()).throw(ConfigError("cannot", code="x")))
    report = quantized(model_dir, tmp_path / "out", presets.resolve("w4a16_sym"), "compressed_tensors")
    why = report["proof"]["compressed_tensors"]["consumer_check"]["not_checked"]
    assert "this job was planned with less" in why and "twin" not in why
