"""Weights from file to file: the bytes of the pipeline, for any architecture, number of ranks and kill."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaConfig, LlavaForConditionalGeneration

from quantcore.checkpoint.artifact import sha256
from quantcore.cli.main import main
from quantcore.config import presets
from quantcore.config.quantization import CalibrationConfig, parse_config
from quantcore.config.spec import ScaleType
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.blockwise import savepoint
from quantcore.engine.pipeline import file_to_file
from quantcore.engine.pipeline import writer as writing
from quantcore.engine.pipeline.job import run
from quantcore.engine.solvers.global_scale import has_global_scale
from quantcore.errors import ConfigError, ModelError, NumericsError
from tests.support.forks import config, events_of, forked, killed, task_file
from tests.support.models import MIXTURES, tiny_model
from tests.support.params import with_rare

pytestmark = pytest.mark.usefixtures("proof_in_this_process")

NUM_BLOCKS = 4
MODELS = {
    "llama": {"tie_word_embeddings": False},
    "qwen3_moe": MIXTURES["qwen3_moe"],
    "gpt_oss": MIXTURES["gpt_oss"],
    "gpt2": {},
}
NVFP4_WEIGHTS = {
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "ch_axis": -1, "scale_type": "e4m3"}
    },
    "exclude": ["lm_head"],
}  # fmt: skip
CASES = {
    "w4a16 of a dense model": ("llama", config("w4a16"), ("quark", "compressed_tensors", "fake_quantized")),
    "mxfp4 with dynamic inputs": ("llama", config("mxfp4"), ("quark",)),
    "shared global scales": ("llama", NVFP4_WEIGHTS, ("quark",)),
    "head and all": ("llama", {**config("fp8_dynamic"), "exclude": []}, ("quark", "compressed_tensors")),
    "experts": ("qwen3_moe", config("int8_dynamic"), ("quark", "compressed_tensors")),
    "stacked experts": ("gpt_oss", config("mxfp4"), ("quark", "fake_quantized")),
    "transposed weights": ("gpt2", config("int8_weight_only"), ("fake_quantized",)),
    "a file of its own": ("llama", config("gguf_q4_0"), ("gguf",)),
}


def task(model_dir, output_dir, given, exports=("quark",), **more):
    return Task(
        model_dir=model_dir, output_dir=output_dir, config=parse_config(given), export=exports,
        calibration=CalibrationConfig(num_samples=2, seq_len=32),
        evaluation=EvaluationConfig(num_windows=2, seq_len=32, num_prompts=0), **more,
    )  # fmt: skip


def weights_of(folder):
    return {
        path.relative_to(folder).as_posix(): sha256(path)
        for pattern in ("*.safetensors", "*.gguf", "config.json", "*index.json")
        for path in folder.rglob(pattern)
    }


@pytest.mark.parametrize(
    "case", with_rare(CASES, ["mxfp4 with dynamic inputs", "transposed weights", "head and all", "experts"])
)
def test_the_bytes_are_those_of_the_pipeline(tmp_path, case):
    model, given, exports = CASES[case]
    model_dir = tiny_model(tmp_path / "model", model_type=model, max_shard_size="200KB", **MODELS[model])
    reports = {
        name: run(
            task(model_dir, tmp_path / name, given, exports, file2file=name == "files", max_shard_size="100KB"),
            lambda event: None,
        ).to_dict()
        for name in ("blocks", "files")
    }
    assert weights_of(tmp_path / "files") == weights_of(tmp_path / "blocks") != {}
    assert reports["files"]["layers"] == reports["blocks"]["layers"]
    summary, proofs = reports["files"]["summary"], reports["files"]["proof"]
    assert (summary["executor"], summary["perplexity_before"]) == ("file_to_file", None)
    assert {name: proof["num_tensors_equal"] for name, proof in proofs.items()} == {
        name: proof["num_tensors_equal"] for name, proof in reports["blocks"]["proof"].items()
    }
    assert all(proof["max_logit_difference"] is None for proof in proofs.values())


def test_the_case_of_shared_scales_has_some():
    spec = parse_config(NVFP4_WEIGHTS).global_quant_config.weight
    assert spec.scale_type is ScaleType.e4m3 and has_global_scale(spec)


def test_an_architecture_that_transformers_does_not_know(tmp_path):
    """Names and shapes are enough; zero points are written."""
    model_dir = tiny_model(tmp_path / "model")
    tensors = load_file(model_dir / "model.safetensors")
    renamed = {name.replace("model.layers", "net.stages").replace("mlp", "ffn"): one for name, one in tensors.items()}
    save_file(renamed, model_dir / "model.safetensors")
    content = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**content, "model_type": "nobody_knows"}))
    given = config("w4a16")
    with pytest.raises(ModelError, match="'nobody_knows' is not supported") as caught:
        run(task(model_dir, tmp_path / "blocks", given), lambda event: None)
    assert "--file2file_quantization" in caught.value.hint
    (model_dir / "tokenizer.json").unlink()
    report = run(task(model_dir, tmp_path / "files", given, file2file=True), lambda event: None).to_dict()
    written = load_file(tmp_path / "files" / "model.safetensors")
    assert len(report["layers"]) == 21
    zeros = {name for name in written if name.endswith("weight_zero_point")}
    assert zeros == {f"{layer['name']}.weight_zero_point" for layer in report["layers"]}
    assert written["net.stages.0.ffn.up_proj.weight_zero_point"].any()


def test_the_language_model_of_one_that_sees(tmp_path, capfd):
    """LLaVA: the tower has more blocks and the same width. Its weights stay, and that is said wherever one looks."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    torch.manual_seed(0)
    vision = {"model_type": "clip_vision_model", **sizes, "num_hidden_layers": 4, "image_size": 28, "patch_size": 14}
    text = {"model_type": "llama", **sizes, "num_hidden_layers": 3, "vocab_size": 512}
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    flags = ["--model_dir", str(tmp_path / "model"), "--output_dir", str(out), "--file2file_quantization"]
    assert main([*flags, "--quant_scheme", "int8_weight_only"]) == 0
    linears = {
        name for name, module in model.model.language_model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    plan, report = (json.loads((out / name).read_text()) for name in ("plan.json", "report.json"))
    assert {layer["name"] for layer in plan["layers"]} == {f"language_model.model.{name}" for name in linears}
    said = "Only the language model, 'language_model.model.layers.*', is quantized."
    assert [said in text for text in (*plan["warnings"], *report["warnings"])] == [True, True]
    assert said in " ".join(capfd.readouterr().err.split())
    before, after = load_file(tmp_path / "model" / "model.safetensors"), load_file(out / "model.safetensors")
    tower = {name for name in before if name.startswith("vision_tower.")}
    assert tower and all(torch.equal(before[name], after[name]) for name in tower)


LEARNING = {
    "int8_static": "int8_static",
    "rtn": "w4a16",
    "gptq": "w4a16",
}


@pytest.mark.parametrize("what", LEARNING)
def test_what_learns_from_text_is_refused(tmp_path, what):
    steps = [] if what == LEARNING[what] else [{"name": what}]
    given = task(tiny_model(tmp_path / "model"), tmp_path / "out", config(LEARNING[what], *steps), file2file=True)
    with pytest.raises(ConfigError, match="needs calibration data") as caught:
        run(given, lambda event: None)
    assert (caught.value.code, caught.value.field) == ("needs_calibration", "/file2file")


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    model_dir = tiny_model(tmp_path / "model")
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(NumericsError, match=r"model\.layers\.1\.mlp\.up_proj has 1 value"):
        run(task(model_dir, tmp_path / "out", config("w4a16"), file2file=True), lambda event: None)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A mixture's folder, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("mixture")
    model_dir = tiny_model(
        folder / "model", model_type="qwen3_moe", num_hidden_layers=NUM_BLOCKS, **MIXTURES["qwen3_moe"]
    )
    file = task_file(model_dir, folder / "out", config("w4a16"), file2file=True)
    assert forked(lambda _: main(["run", str(file)]), 1, folder) == [0]
    return model_dir, weights_of(folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize("size", with_rare([2, 3], [2]))
def test_ranks_share_the_tensors(undisturbed, tmp_path, size):
    model_dir, expected = undisturbed
    file = task_file(model_dir, tmp_path / "out", config("w4a16"), file2file=True)

    def work(rank):
        seen = []
        whole = file_to_file.rounded

        def counted(layers, weights, owner):
            assert owner == rank
            seen.extend(layers)
            return whole(layers, weights, owner)

        file_to_file.rounded = counted
        status = main(["run", str(file)])
        (tmp_path / f"count.{rank}").write_text(str(len(seen)))
        return status

    assert forked(work, size, tmp_path) == [0] * size, (tmp_path / "err.0").read_text()
    assert weights_of(tmp_path / "out") == expected
    counts = [int((tmp_path / f"count.{rank}").read_text()) for rank in range(size)]
    assert sum(counts) == NUM_BLOCKS * 16 and max(counts) - min(counts) <= 4


KILLS = {
    "in the first step": (writing.ResultWriter, "write", {1: 2, 3: 2}),
    "later": (writing.ResultWriter, "write", {1: 40, 3: 18}),  # three ranks do 48 layers of three blocks at first
    "behind the blocks": (writing.ResultWriter, "finish", {1: 1, 3: 1}),
}
"""By the number of ranks: which call is the last."""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), with_rare([(1, 1), (1, 3), (3, 2)], [(1, 3)]))
@pytest.mark.parametrize("kill", KILLS)
def test_killed_it_goes_on_without_what_is_done(undisturbed, tmp_path, monkeypatch, kill, before, after):
    model_dir, expected = undisturbed
    monkeypatch.setattr(savepoint, "MIN_WORK_PER_SAVE", 0)
    file = task_file(model_dir, tmp_path / "out", config("w4a16"), file2file=True, resume_dir=str(tmp_path / "resume"))
    owner, name, counts = KILLS[kill]

    def first(rank):
        if rank == before - 1:
            monkeypatch.setattr(owner, name, killed(owner, name, counts[before]))
        return main(["run", str(file)])

    assert forked(first, before, tmp_path)[-1] == -signal.SIGKILL
    next_block = max((event["next_block"] for event in events_of(tmp_path) if event["kind"] == "saved"), default=0)
    assert forked(lambda _: main(["run", str(file)]), after, tmp_path) == [0] * after
    assert weights_of(tmp_path / "out") == expected and not (tmp_path / "resume").exists()
    again = {event["block"] for event in events_of(tmp_path) if event["kind"] == "layer_quantized"}
    assert again == set(range(next_block, NUM_BLOCKS)) and (next_block == 0) == (kill == "in the first step")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(report["layers"]) == NUM_BLOCKS * 16


def test_quark_s_flag(tmp_path):
    model_dir = tiny_model(tmp_path / "model")
    flags = ["--model_dir", str(model_dir), "--output_dir", str(tmp_path / "out"), "--file2file_quantization"]
    assert main([*flags, "--quant_scheme", "mxfp4"]) == 0
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["executor"] == "file_to_file"
    assert main([*flags[:3], str(tmp_path / "other"), flags[4], "--quant_scheme", "fp8"]) == 1
    assert presets.PRESETS["fp8"].config.needs_calibration


def test_gates_do_not_speak_of_a_model_that_was_not_run(tmp_path):
    report = run(
        task(tiny_model(tmp_path / "model"), tmp_path / "out", config("w4a16"), file2file=True), lambda _: None
    ).to_dict()
    [row] = [row for row in report["summary"]["gates"] if row["name"] == "round_trip"]
    assert "no model was run" in row["detail"] and row["limit"] == 0
    with pytest.raises(ConfigError, match="which file2file does not do") as caught:
        Task(
            model_dir=tmp_path, output_dir=tmp_path, config=parse_config(config("w4a16")), file2file=True,
            evaluation=EvaluationConfig(tasks=("piqa",)),
        )  # fmt: skip
    assert (caught.value.code, caught.value.field) == ("unsupported_config", "/evaluation/tasks")


def test_weight_after_weight_is_not_in_slices(tmp_path):
    given = task(tiny_model(tmp_path / "model"), tmp_path / "out", config("w4a16"), file2file=True, shard_blocks=True)
    with pytest.raises(ConfigError, match="file2file processes single weights") as caught:
        run(given, lambda event: None)
    assert (caught.value.code, caught.value.field) == ("unsupported_config", "/shard_blocks")
