"""Algorithms through the whole engine: what is written computes what the float model does, but for the rounding."""

import itertools
import json
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantcore.config.quantization import CalibrationConfig, parse_config
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.pipeline import streams
from quantcore.engine.pipeline.job import read_windows, run
from quantcore.engine.runtime.states import StatesOnDisk
from quantcore.errors import ConfigError, ModelError
from tests.support.models import MIXTURES, tiny_model
from tests.support.params import with_rare, with_usual

INT16 = {"weight": {"dtype": "int16", "qscheme": "per_channel", "ch_axis": 0}}  # next to no rounding
UINT4 = {"weight": {"dtype": "uint4", "qscheme": "per_group", "group_size": 64, "symmetric": False}}
TEXT = CalibrationConfig(num_samples=4, seq_len=128)
OPT = {"ffn_dim": 128, "word_embed_proj_dim": 64}
SMOOTHINGS = {"smoothquant": [{"name": "smoothquant", "alpha": 0.5}], "awq": [{"name": "awq"}]}
ROTATIONS = {
    "r1": [{"name": "rotation"}],
    "r1 r2 smooth": [{"name": "rotation", "r2": True, "random_r1": True}, {"name": "smooth"}],
}
ROTATED = list(itertools.product(["llama", "mixtral", "qwen2"], ROTATIONS, [True, False]))
FEW = [("llama", "r1", False), ("mixtral", "r1 r2 smooth", True), ("qwen2", "r1 r2 smooth", False)]
AUTOROUND = {"name": "autoround", "iters": 50, "batch_size": 4}
AWQ_GPTQ = [{"name": "awq"}, {"name": "gptq", "desc_act": False}]
MODELS = {"llama": {}, "gemma2": {}, "mixtral": MIXTURES["mixtral"], "opt": OPT, "qwen2": {}}


def quantize(tmp_path, layer, algorithms, *, model_type="llama", export="fake_quantized", **overrides):
    """Returns the folder of the float model, that of the result, and the report."""
    folder = tmp_path / "model"
    if not folder.exists():
        tiny_model(folder, model_type=model_type, dtype=torch.float32, **overrides)
    out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    config = {"global_quant_config": layer, "exclude": ["lm_head"], "algo_config": algorithms}
    report = run(
        Task(
            model_dir=folder,
            output_dir=out,
            config=parse_config(config),
            calibration=TEXT,
            evaluation=EvaluationConfig(num_windows=2, seq_len=64, num_prompts=0),
            export=(export,),
        ),
        lambda event: None,
    ).to_dict()
    return folder, out, report


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
    with torch.no_grad():
        return model(torch.arange(3, 67)[None]).logits


def mean_queries(folder, ids_NT):
    """The mean over tokens of what the first layer of all gives."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
    seen = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.no_grad():
        model(ids_NT)
    return seen[0].mean((0, 1))


def check_function(tmp_path, algorithms, model_type, tolerance):
    folder, out, report = quantize(tmp_path, INT16, algorithms, model_type=model_type, **MODELS[model_type])
    before, after = logits(folder), logits(out)
    assert ((after - before).norm() / before.norm()).item() < tolerance
    return folder, out, report


@pytest.mark.parametrize("model_type", with_usual(MODELS, ["mixtral"]))
@pytest.mark.parametrize("name", SMOOTHINGS)
def test_moved_scales_are_written(tmp_path, name, model_type, proof_in_this_process):
    folder, out, report = check_function(tmp_path, SMOOTHINGS[name], model_type, 5e-3)
    [kind] = report["edges"]
    assert kind["blocks"] == [0, 1, 2] and kind["found"]
    assert kind["largest_change_by_folding"] < 1e-5
    assert (folder / "config.json").read_text() == (out / "config.json").read_text()


@pytest.mark.parametrize(
    ("model_type", "name", "tied"),
    with_usual(ROTATED, FEW),
)
def test_rotations_are_written(tmp_path, model_type, name, tied, proof_in_this_process):
    overrides = {**MODELS[model_type], "tie_word_embeddings": tied}
    folder, out, _ = quantize(tmp_path, INT16, ROTATIONS[name], model_type=model_type, **overrides)
    before, after = logits(folder), logits(out)
    assert ((after - before).norm() / before.norm()).item() < 5e-3
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("model_type", ["opt", "gemma2"])
def test_a_stream_that_cannot_be_rotated_is_refused(tmp_path, model_type):
    with pytest.raises(ModelError, match="cannot be rotated") as caught:
        quantize(tmp_path, INT16, ROTATIONS["r1"], model_type=model_type, **MODELS[model_type])
    assert caught.value.code == "cannot_rotate"
    assert not [entry for entry in tmp_path.iterdir() if entry.name != "model"]


def test_rotations_that_no_file_can_hold_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="rotation r4, which is not available"):
        quantize(tmp_path, INT16, [{"name": "rotation", "r4": True}])


def test_listed_edges_are_checked(tmp_path, proof_in_this_process):
    """As AMD Quark's files list them: what is an edge is used, what is none is said once, and nothing else moves."""
    listed = [
        {"prev_op": "mlp.gate_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj"},
        {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj", "module2inspect": None},
    ]
    folder, out, report = quantize(tmp_path, UINT4, [{"name": "smooth", "alpha": 0.5, "scaling_layers": listed}])
    [warning] = report["warnings"]
    assert warning.startswith("No scale can move from mlp.gate_proj to mlp.down_proj, as scaling_layers requires: ")
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, out))
    norms = [name for name in before if "norm" in name]
    assert norms and all(torch.equal(before[name], after[name]) for name in norms)


def test_no_expert_is_rounded_by_its_weights_alone(tmp_path, proof_in_this_process):
    *_, report = quantize(
        tmp_path, UINT4, [{"name": "rtn"}], model_type="mixtral",
        **{**MIXTURES["mixtral"], "num_local_experts": 32, "num_experts": 32, "num_experts_per_tok": 1},
        num_hidden_layers=1,
    )  # fmt: skip
    [warning] = [text for text in report["warnings"] if "expert(s)" in text]
    assert warning.endswith("their codes are also chosen for tokens of the other experts of that block.")
    assert all(layer["output_error"] is not None for layer in report["layers"])
    of_experts = [layer["weight_spread"] for layer in report["layers"] if ".experts." in layer["name"]]
    others = [layer["input_range"] for layer in report["layers"] if ".experts." not in layer["name"]]
    assert not any(of_experts) and all(inputs["largest"] >= inputs["median"] > 0 for inputs in others) and others
    coverage = report["experts"]
    assert coverage["num_experts"] == 32 and coverage["share_covered"] < 1
    assert coverage["fewest_tokens"] == min(layer["num_tokens"] for layer in report["layers"])


def test_corrected_biases_are_written(tmp_path, proof_in_this_process):
    """Rounding down adds to the mean output of every layer; the biases take it back, where there are some."""
    down = {"weight": {**UINT4["weight"], "round_method": "floor"}}
    folder, plain, _ = quantize(tmp_path, down, [], model_type="qwen2")
    _, out, _ = quantize(tmp_path, down, [{"name": "bias_correction"}], model_type="qwen2")
    before, uncorrected, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, plain, out)
    )
    changed = {name for name in before if not torch.equal(uncorrected[name], after[name])}
    assert changed == {name for name in before if name.endswith("_proj.bias")}  # of q, k and v
    task = Task(model_dir=folder, output_dir=out, config=parse_config({"global_quant_config": down}), calibration=TEXT)
    means = [mean_queries(path, read_windows(task).calibration_NT) for path in (folder, plain, out)]
    assert (means[2] - means[0]).norm() < 0.01 * (means[1] - means[0]).norm()


@pytest.mark.parametrize("algorithms", with_rare([[{"name": "gptq"}], AWQ_GPTQ], [[{"name": "gptq"}]]))
def test_the_same_seed_gives_the_same_bytes(tmp_path, algorithms, proof_in_this_process):
    outs = [quantize(tmp_path, UINT4, algorithms, export="quark")[1] for _ in range(2)]
    first, second = ((out / "model.safetensors").read_bytes() for out in outs)
    assert first == second


@pytest.fixture(scope="module")
def distance(tmp_path_factory):
    """``distance(solver)``: how far the result is from the float model, as a part of its logits."""
    folder = tmp_path_factory.mktemp("solvers")

    def measure(*solvers):
        model, out, _ = quantize(folder, UINT4, list(solvers), rank=8)
        before, after = logits(model), logits(out)
        return ((after - before).norm() / before.norm()).item()

    rounded = cache(measure)
    return lambda *solvers: measure(*solvers) if solvers else rounded()


@pytest.mark.parametrize(
    "solver",
    with_rare(
        [{"name": "rtn"}, {"name": "gptq"}, {"name": "gptq", "true_sequential": True}, {"name": "gptaq"},
         {"name": "yaqa"}, {"name": "qronos"}, AUTOROUND],
        [{"name": "gptq", "true_sequential": True}, AUTOROUND],
    ),
    ids=lambda one: one["name"],
)  # fmt: skip
def test_solvers_lose_less_than_rounding(distance, solver, proof_in_this_process):
    assert distance(solver) < 0.8 * distance()


ON_DISK = ([{"name": "gptaq"}], [{"name": "rotation"}, {"name": "gptq"}])


@pytest.mark.parametrize("algorithms", with_rare(ON_DISK, ON_DISK[1:]))
def test_hidden_states_on_disk_give_the_same_files(tmp_path, monkeypatch, algorithms, proof_in_this_process):
    _, in_memory, _ = quantize(tmp_path, UINT4, algorithms)
    kept = []
    monkeypatch.setattr(
        streams, "states_kept", lambda num, _, __, folder: kept.append(StatesOnDisk(num, folder)) or kept[-1]
    )
    _, on_disk, _ = quantize(tmp_path, UINT4, algorithms)
    assert len(kept) == 1 and len(kept[0]) == TEXT.num_samples
    assert {file.name for file in on_disk.iterdir()} == {file.name for file in in_memory.iterdir()}
    assert (on_disk / "model.safetensors").read_bytes() == (in_memory / "model.safetensors").read_bytes()
