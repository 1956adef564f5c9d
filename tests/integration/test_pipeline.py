"""The whole engine on tiny models: what it writes loads in Transformers and computes what the engine computed."""

import json
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig as ForeignConfig
from gguf import GGUFReader
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from api.store import manifest as store
from quantcore.checkpoint.artifact import sha256
from quantcore.checkpoint.headers import read_local
from quantcore.cli.main import main
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import CalibrationConfig, Config, QuantizationConfig
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.pipeline.job import read_windows, run
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.engine.verification import verify as proof
from quantcore.engine.verification.expectation import ExpectedDigests
from quantcore.engine.verification.fresh_process import prove_in_fresh_process
from quantcore.errors import ModelError, NumericsError, ProofError, QuantError
from quantcore.events import Completed, LayerQuantized, Progress
from quantcore.export.quark import QuarkExporter
from quantcore.plan.planner import make_plan
from tests.support.jobs import BOTH, CPU, math_close, perplexity_of, task, token_windows_of_jobs
from tests.support.models import MIXTURES, tiny_model
from tests.support.params import with_rare
from tests.support.proofs import proving_here


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def artifacts(model_dir, tmp_path_factory):
    """One run of each demo preset, both formats: (folder, report, events) by preset. The first is proven as users' are,
    in a fresh process."""
    results = {}
    for preset in ("int8_dynamic", "fp8", "w4a16", "int8_static"):
        folder, events = tmp_path_factory.mktemp("out") / preset, []
        with proving_here() if results else nullcontext():
            num_prompts = 0 if results else 4
            report = run(task(model_dir, folder, preset, BOTH, num_prompts=num_prompts), events.append).to_dict()
            results[preset] = (folder, report, events)
    return results


@pytest.mark.parametrize("preset", ["int8_dynamic", "fp8", "w4a16", "int8_static"])
def test_report_events_and_manifest(artifacts, model_dir, preset):
    folder, report, events = artifacts[preset]
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(report))
    summary = report["summary"]
    assert [event.name for event in events if isinstance(event, LayerQuantized)] == [
        layer["name"] for layer in report["layers"]
    ]
    assert len(report["layers"]) == summary["num_layers_quantized"] == 21
    for layer in report["layers"]:
        assert sum(layer["weight_spread"]["counts"]) == layer["num_weights"]
        assert layer["input_range"] is None  # no algorithm saw the inputs
    assert summary["worst_layer"]["relative_error"] == max(layer["relative_error"] for layer in report["layers"])
    assert 0.8 < summary["perplexity_ratio"] < 1.5 and summary["perplexity_before"] > 1
    ratio = {"value": summary["perplexity_ratio"], "stderr": summary["perplexity_ratio_stderr"]}
    assert ratio == report["quality"]["ratio"]
    divergence = report["quality"]["divergence"]["kl_mean"]
    assert {"value": summary["kl_mean"], "stderr": summary["kl_stderr"]} == divergence
    assert isinstance(events[-1], Completed) and events[-1].summary == summary
    blocks = [event.done for event in events if isinstance(event, Progress) and event.phase == "quantize"]
    assert blocks == [1, 2, 3]
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert manifest["format"] == 1 and manifest["files"] == sorted(manifest["files"], key=lambda entry: entry["path"])
    assert {entry["path"] for entry in manifest["files"]} == {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    } - {"MANIFEST.json"}
    for entry in manifest["files"]:
        assert entry.keys() == {"path", "size", "sha256"}
        assert entry["sha256"] == sha256(folder / entry["path"])
        assert entry["size"] == (folder / entry["path"]).stat().st_size
    store.check(folder, store.read(folder))  # what the service holds the files against
    for export in BOTH:
        written = sum(path.stat().st_size for path in (folder / export).glob("*.safetensors"))
        assert 0 < written - summary["exports"][export]["bytes"] < 60_000  # the header
        assert (folder / export / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()
    assert report["proof"]["quark"]["perplexity"] == summary["perplexity_after"]
    assert [proof["max_logit_difference"] for proof in report["proof"].values()] == [0, None]
    counts = [proof["num_tensors_equal"] for proof in report["proof"].values()]
    assert counts == [counts[0]] * 2 and counts[0] > summary["num_layers_quantized"]


@pytest.mark.parametrize("preset", ["int8_dynamic", "fp8", "int8_static"])
def test_transformers_loads_the_compressed_tensors_files_and_agrees(artifacts, preset):
    folder, report, _ = artifacts[preset]
    path = folder / "compressed_tensors"
    stored = json.loads((path / "config.json").read_text())["quantization_config"]
    ForeignConfig.model_validate(stored)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    assert math_close(perplexity_of(loaded), report["summary"]["perplexity_after"], 0.05)


def test_the_float_perplexity_is_that_of_transformers(artifacts, model_dir):
    whole = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    assert math_close(perplexity_of(whole), artifacts["fp8"][1]["summary"]["perplexity_before"], 1e-3)


def test_static_scales_are_the_ranges_of_the_float_model(artifacts, model_dir):
    """The input scale of every layer is max|x| / 448 over the calibration windows, seen by hooks on the whole model."""
    whole = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    largest = {}

    def watch(name):
        return lambda _, inputs: largest.update({name: max(largest.get(name, 0.0), inputs[0].abs().max().item())})

    for name, module in whole.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(watch(name))
    with torch.no_grad(), matmul_precision(CPU):
        for window in token_windows_of_jobs().calibration_NT:
            whole(window[None])
    stored = load_file(artifacts["fp8"][0] / "quark" / "model.safetensors")
    for name, value in largest.items():
        expected = torch.tensor(value / 448).bfloat16()
        torch.testing.assert_close(stored[f"{name}.input_scale"], expected, rtol=0.01, atol=0)


def test_same_inputs_give_the_same_files(artifacts, model_dir, tmp_path, proof_in_this_process):
    folder, _, _ = artifacts["fp8"]
    run(task(model_dir, tmp_path / "again", "fp8", BOTH), lambda event: None)
    for export in BOTH:
        assert sha256(tmp_path / "again" / export / "model.safetensors") == sha256(
            folder / export / "model.safetensors"
        )


@pytest.mark.parametrize(
    "overrides",
    [
        {"model_type": "qwen2"},
        {"model_type": "llama", "tie_word_embeddings": False, "attention_bias": True, "dtype": torch.float32},
        {"model_type": "gemma2", "query_pre_attn_scalar": 16, "sliding_window": 8, "dtype": torch.float16},
        {"model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64},
        {"model_type": "mixtral", **MIXTURES["mixtral"]},
    ],
    ids=["qwen2", "llama_untied_bias_float32", "gemma2_float16", "opt", "mixtral"],
)
def test_other_architectures_and_dtypes(tmp_path, overrides, proof_in_this_process):
    model_dir = tiny_model(tmp_path / "model", **overrides)
    report = run(task(model_dir, tmp_path / "out", "fp8", BOTH, num_prompts=1), lambda event: None).to_dict()
    assert report["proof"]["quark"]["max_logit_difference"] == 0 and len(report["samples"]) == 1
    assert not [warning for warning in report["warnings"] if "failed" in warning]


def test_an_untied_lm_head_can_be_quantized(tmp_path, proof_in_this_process):
    model_dir = tiny_model(tmp_path / "model", tie_word_embeddings=False)
    config = Config(global_quant_config=presets.PRESETS["fp8"].layer_config)
    report = run(task(model_dir, tmp_path / "out", config=config), lambda event: None).to_dict()
    assert report["layers"][-1]["name"] == "lm_head" and report["layers"][-1]["block"] == -1
    assert report["summary"]["num_layers_kept"] == 0


def test_mixed_layers_and_shards(tmp_path, proof_in_this_process):
    model_dir = tiny_model(tmp_path / "model", max_shard_size="60KB")
    assert len(list(model_dir.glob("*.safetensors"))) > 2
    config = Config(
        global_quant_config=presets.PRESETS["int8_dynamic"].layer_config,
        layer_quant_config={
            "*.down_proj": presets.PRESETS["int8_weight_only"].layer_config,
            "*.1.*.o_proj": QuantizationConfig(),
        },
        exclude=("lm_head", "*.0.*.gate_proj"),
    )
    run(task(model_dir, tmp_path / "out", config=config, export=BOTH), lambda event: None)
    quark = json.loads((tmp_path / "out/quark/config.json").read_text())["quantization_config"]
    kept = {"lm_head", "model.layers.0.mlp.gate_proj", "model.layers.1.self_attn.o_proj"}
    assert set(quark["exclude"]) == kept
    assert set(quark["layer_quant_config"]) == {f"model.layers.{i}.mlp.down_proj" for i in range(3)}
    foreign = json.loads((tmp_path / "out/compressed_tensors/config.json").read_text())["quantization_config"]
    assert set(foreign["ignore"]) == kept
    assert foreign["format"] == "mixed-precision"


def test_shards_are_as_large_as_they_may_be(tmp_path, proof_in_this_process):
    """Each tensor in the file that the index names; GGUF files are split as llama.cpp does."""
    model_dir = tiny_model(tmp_path / "model")
    asked = task(model_dir, tmp_path / "out", "gguf_q8_0", ("gguf", "compressed_tensors"))
    report = run(asked.model_copy(update={"max_shard_size": "90KB"}), lambda event: None).to_dict()
    files = sorted((tmp_path / "out/compressed_tensors").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 90_000 + 10_000 for file in files)  # and a header
    index = json.loads((tmp_path / "out/compressed_tensors/model.safetensors.index.json").read_text())
    held = {name: file.name for file in files for name in load_file(file)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in files for t in load_file(file).values())
    parts = sorted((tmp_path / "out/gguf").glob("*.gguf"))
    assert [part.name for part in parts] == [f"model-{n:05}-of-{len(parts):05}.gguf" for n in range(1, len(parts) + 1)]
    assert len(parts) > 2 and all(part.stat().st_size < 90_000 + 10_000 for part in parts[1:])
    assert not [line for line in report["warnings"] if "max_shard_size" in line]
    # gguf's own reader finds what is in the file of a job that splits nothing
    run(asked.model_copy(update={"output_dir": tmp_path / "one", "export": ("gguf",)}), lambda event: None)
    whole = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "one/model.gguf").tensors}
    found = {tensor.name: tensor for part in parts for tensor in GGUFReader(part).tensors}
    assert found.keys() == whole.keys()
    assert all((found[name].data == whole[name].data).all() for name in whole)


def test_nothing_is_left_behind_after_a_failure(model_dir, tmp_path):
    broken = tmp_path / "broken"
    subprocess.run(["cp", "-r", str(model_dir), str(broken)], check=True)
    poison(broken, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(NumericsError, match=r"model\.layers\.1\.mlp\.up_proj has 1 value"):
        run(task(broken, tmp_path / "out"), lambda event: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def poison(model_dir: Path, name: str) -> None:
    """Put one NaN into a stored bfloat16 tensor."""
    header = read_local(model_dir).tensors[name]
    with (model_dir / header.file).open("r+b") as file:
        file.seek(header.begin)
        file.write(b"\xc0\x7f")


def test_a_layer_of_another_class_than_its_weight_looks_like_is_refused_by_name(tmp_path, proof_in_this_process):
    """Mixtral's router, asked for by its name: a class of its own that holds a matrix."""
    model_dir = tiny_model(tmp_path / "model", model_type="mixtral", **MIXTURES["mixtral"])
    layer_config = presets.PRESETS["int8_weight_only"].layer_config
    config = Config(
        global_quant_config=layer_config,
        layer_quant_config={"model.layers.0.block_sparse_moe.gate": layer_config},
    )
    with pytest.raises(ModelError, match="gate is a MixtralTopKRouter") as caught:
        run(task(model_dir, tmp_path / "out", config=config), lambda event: None)
    assert caught.value.code == "unsupported_layer"


def test_a_folder_with_something_in_it_is_never_overwritten(model_dir, tmp_path):
    (tmp_path / "keep.txt").write_text("mine")
    with pytest.raises(QuantError, match="not empty"):
        run(task(model_dir, tmp_path), lambda event: None)
    assert [path.name for path in tmp_path.iterdir()] == ["keep.txt"]


def test_a_model_without_tokenizer_is_said(model_dir, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model_dir / name).read_bytes())
    with pytest.raises(ModelError) as caught:
        run(task(bare, tmp_path / "out"), lambda event: None)
    assert caught.value.code == "no_tokenizer"


TAMPERED = {
    "a code": ("model.layers.1.mlp.up_proj.weight", "proof_tensor_differs"),
    "a scale": ("model.layers.2.self_attn.q_proj.weight_scale", "proof_tensor_differs"),
    "an input scale": ("model.layers.0.mlp.down_proj.input_scale", "proof_tensor_differs"),
    "a norm": ("model.norm.weight", "proof_tensor_differs"),
}


@pytest.mark.parametrize("export", with_rare(BOTH, ["compressed_tensors"]))
@pytest.mark.parametrize("case", TAMPERED)
def test_the_proof_sees_one_changed_byte(model_dir, tmp_path, monkeypatch, proof_in_this_process, case, export):
    name, code = TAMPERED[case]

    def tamper(task, folder, expected, emit):
        header = proof.read_tensor_headers(folder / export)[name]
        with (folder / export / header.file).open("r+b") as file:
            file.seek(header.begin)
            byte = file.read(1)[0]
            file.seek(header.begin)
            file.write(bytes([byte ^ 1]))
        return proof_in_this_process(task, folder, expected, emit)

    monkeypatch.setattr("quantcore.engine.pipeline.job.prove_in_fresh_process", tamper)
    with pytest.raises(ProofError) as caught:
        run(task(model_dir, tmp_path / "out", export=BOTH), lambda event: None)
    assert caught.value.code == code and name.rpartition(".")[0] in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_what_runs_is_what_was_compared(model_dir, tmp_path, monkeypatch, proof_in_this_process):
    """Each weight of the main export is decoded once: the run hashes what it reads."""
    decoded, decode = Counter(), QuarkExporter.decode

    def counted(self, layer, stored):
        decoded[layer.name] += 1
        return decode(self, layer, stored)

    monkeypatch.setattr(QuarkExporter, "decode", counted)
    report = run(task(model_dir, tmp_path / "out", "w4a16", num_prompts=0), lambda event: None)
    assert report.quality is not None and decoded == {layer.name: 1 for layer in report.layers}


@pytest.mark.slow
def test_the_proof_sees_other_logits(model_dir, tmp_path, monkeypatch):
    def tamper(task, folder, expected: ExpectedDigests, emit):
        expected.probe_logits[0, 3, 7] += 0.01 * expected.probe_logits.abs().max()
        return prove_in_fresh_process(task, folder, expected, emit)

    monkeypatch.setattr("quantcore.engine.pipeline.job.prove_in_fresh_process", tamper)
    with pytest.raises(ProofError, match="different logits"):
        run(task(model_dir, tmp_path / "out", "int8_dynamic"), lambda event: None)


def test_the_plan_of_the_report_is_the_plan(artifacts, model_dir):
    folder, report, _ = artifacts["w4a16"]
    headers = read_local(model_dir)
    config = presets.resolve("w4a16", group_size=32)
    plan = make_plan(
        JobSpec(
            config=config,
            calibration=CalibrationConfig(num_samples=4, seq_len=64),
            export=BOTH,
            evaluation=EvaluationConfig(num_windows=3, seq_len=64, num_prompts=0),
        ),
        headers,
    )
    assert json.loads((folder / "plan.json").read_text()) == json.loads(json.dumps(plan.to_dict()))
    assert report["summary"]["size_after_bytes"] == plan.size_after_bytes


@pytest.mark.slow
def test_command_line_runs_a_task_with_json_lines(model_dir, tmp_path, capfd):
    """In a process of its own; what it refuses is the same in this one."""
    file = tmp_path / "task.json"
    file.write_text(task(model_dir, tmp_path / "out", "int8_dynamic").model_dump_json())
    command = [sys.executable, "-m", "quantcore", "run", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, result.stderr
    phases = [line["phase"] for line in lines if line["kind"] == "phase_started"]
    assert phases == ["resolve", "plan", "quantize", "export", "verify"]
    assert lines[-1]["kind"] == "completed" and (tmp_path / "out/MANIFEST.json").exists()
    assert main(["run", str(file)]) == 1
    again = capfd.readouterr()
    last = json.loads(again.out.splitlines()[-1])
    assert (last["kind"], last["code"]) == ("failed", "output_exists")
    assert "Traceback" not in again.err


def test_command_line_with_the_flags_of_the_quark_script(model_dir, tmp_path, capfd, proof_in_this_process):
    status = main([
        "--model_dir", str(model_dir), "--output_dir", str(tmp_path / "out"),
        "--quant_scheme", "w_uint4_per_group_asym",
        "--group_size", "32", "--num_calib_data", "4", "--seq_len", "64", "--dataset", "builtin",
        "--model_export", "hf_format", "--custom_mode", "quark",
        "--exclude_layers", "lm_head", "*.o_proj", "--skip_evaluation", "--seed", "1",
    ])  # fmt: skip
    said = capfd.readouterr()
    assert status == 0, said.err
    assert "LLM(" in said.out and "Traceback" not in said.err
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["summary"]["perplexity_before"] is None and len(report["layers"]) == 18


@pytest.mark.parametrize(
    ("num_windows", "seq_len", "shape"), [(0, 256, (2, 128)), (0, 64, (2, 64)), (3, 256, (3, 256))]
)
def test_a_proof_without_measurements_reads_short_windows(model_dir, tmp_path, num_windows, seq_len, shape):
    evaluation = EvaluationConfig(num_windows=num_windows, seq_len=seq_len)
    job_task = Task(
        model_dir=model_dir, output_dir=tmp_path / "out", config=presets.resolve("fp8"), evaluation=evaluation
    )
    assert tuple(read_windows(job_task).held_out_NT.shape) == shape


REFUSED_FLAGS = {
    "unknown_preset": ["--quant_scheme", "w_fp9"],
    "unknown_quant_algo": ["--quant_algo", "magic"],
    "unknown_pre_quantization_optimization": ["--pre_quantization_optimization", "magic"],
    "unknown_export_weight_format": ["--export_weight_format", "awq"],
    "unknown_kv_cache_scheme": ["--kv_cache_dtype", "fp9"],
    "unknown_tower_scheme": ["--quantize_towers", "int4"],
    "no_towers": ["--quantize_towers", "int8"],
    "unknown_draft_scheme": ["--quantize_drafts", "int3"],
    "no_drafts": ["--quantize_drafts", "int4"],
    "unknown_custom_mode": ["--custom_mode", "marlin"],
    "unknown_model_export": ["--model_export", "openvino"],
    "unknown_tasks": ["--tasks", "gsm8k_of_nobody"],
    "invalid_config": ["--quant_scheme", "fp8", "--group_size", "64"],
    "group_size_not_dividing": ["--quant_scheme", "w4a16", "--group_size", "48"],
    "seq_len_too_long": ["--seq_len", "100000"],
    "not_enough_samples": ["--num_calib_data", "60000"],
    "calibration_not_found": ["--dataset", "./nowhere.txt"],
    "model_not_found": ["--model_dir", "/nowhere"],
}


@pytest.mark.parametrize("code", with_rare(REFUSED_FLAGS, ["unknown_tasks"]))  # lists the tasks of lm_eval
def test_command_line_refuses_with_a_code_and_no_traceback(model_dir, tmp_path, code, capfd):
    arguments = ["--model_dir", str(model_dir), "--output_dir", str(tmp_path / "out"), "--seq_len", "64"]
    arguments += [*REFUSED_FLAGS[code], "--json"]
    assert main(arguments) == 1
    last = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert last["kind"] == "failed" and last["code"] == code and last["message"]
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    """More tokens than embeddings: it would read beyond the table."""
    model = tiny_model(tmp_path / "model", vocab_size=300)
    task = Task(
        model_dir=model, output_dir=tmp_path / "out", config=presets.resolve("int8_dynamic"),
        calibration=CalibrationConfig(num_samples=2, seq_len=32),
    )  # fmt: skip
    with pytest.raises(ModelError, match="embeddings for 300 tokens") as caught:
        run(task, lambda event: None)
    assert caught.value.code == "tokenizer_mismatch" and not task.output_dir.exists()
