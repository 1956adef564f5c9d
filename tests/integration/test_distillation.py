"""Scale-only distillation: its gradients beside autograd's, what a job keeps of it, and what it refuses."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from quantcore.cli.main import main
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import CalibrationConfig, parse_config
from quantcore.config.task import Task
from quantcore.engine.blockwise import savepoint
from quantcore.engine.blockwise.distillation import CodeFiles, Student, last_states
from quantcore.engine.blockwise.results import Solved
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.model.kinds import declared_class
from quantcore.engine.model.tiny_model import build_tiny_model
from quantcore.engine.pipeline import distill as step
from quantcore.engine.pipeline import writer as writing
from quantcore.engine.pipeline.job import run
from quantcore.engine.runtime.ranks import ALONE
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.errors import ConfigError
from quantcore.formats.weight_layout import canonical
from quantcore.importing.model import read_model
from quantcore.plan.planner import make_plan
from tests.support.forks import config, events_of, forked, killed, seen_of, task_file
from tests.support.models import MIXTURES, tiny_model

pytestmark = pytest.mark.usefixtures("proof_in_this_process")

MODELS = {"dense": {}, "mixture": {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}, "gpt2": {"model_type": "gpt2"}}
IDS_NT = torch.randint(1, 500, (3, 24), generator=torch.Generator().manual_seed(0))
EXPORTS = ("compressed_tensors", "fake_quantized")
DISTILL = {"name": "distill", "num_windows": 4}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_whole_model(tmp_path: Path, name: str) -> None:
    folder = tiny_model(tmp_path / "model", dtype=torch.float32, rank=8, **MODELS[name])
    model, streamed = read_model(folder), open_model(read_model(folder)).streamed
    plan = make_plan(
        JobSpec(config=presets.resolve("w2a16"), export=("fake_quantized",), calibration=CalibrationConfig(seq_len=24)),
        model.headers,
    )
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
    teacher = list(last_states(streamed, streamed.embed(IDS_NT)))
    log_p = functional.log_softmax(whole(IDS_NT).logits.detach(), -1)
    codes, source = CodeFiles(tmp_path / "codes", torch.device("cpu")), streamed._read
    kind_of = {layer.name: layer for layer in plan.layers}
    for layer in plan.layers:
        weight_OI = canonical(source(f"{layer.name}.weight"), layer.kind).float()
        codes.write(Solved(layer, weight_OI, round_to_nearest(weight_OI, layer.weight), None))
    student = Student(streamed, plan.layers, codes, source)
    for number, factors in enumerate(student.log_factors.values()):
        factors.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    loss, gradients = student.gradients(IDS_NT, teacher, tmp_path)

    logs = {name: factors.clone().requires_grad_() for name, factors in student.log_factors.items()}
    stacks: dict[str, torch.Tensor] = {}
    for name, layer in kind_of.items():
        solved = codes.read(layer)
        shape = solved.codes.shape
        scale_RG = solved.params.scale * logs[name].exp()
        zero = solved.params.zero_point
        values = solved.codes.float().reshape(*scale_RG.shape, -1) - (0 if zero is None else zero[..., None])
        stacks[name] = canonical((values * scale_RG[..., None]).reshape(shape), layer.kind)
    logits = torch.func.functional_call(whole, _placed(whole, stacks), (IDS_NT,)).logits
    expected = (
        functional.kl_div(functional.log_softmax(logits, -1), log_p, reduction="sum", log_target=True) / IDS_NT.numel()
    )
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    for name, log in logs.items():
        assert torch.allclose(gradients[name], log.grad, rtol=1e-3, atol=1e-4 * log.grad.abs().max().item()), name


def _placed(whole: torch.nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights by their parameters' names; those of experts in the stacks that Transformers holds them in."""
    placed = {f"{name}.weight": weight for name, weight in weights.items() if ".experts." not in name}
    prefix = "" if placed.keys() <= dict(whole.named_parameters()).keys() else "transformer."
    placed = {f"{prefix}{name}": weight for name, weight in placed.items()}
    for name in dict(whole.named_parameters()):
        start, _, last = name.rpartition(".")
        if last in ("gate_up_proj", "down_proj") and start.endswith(".experts"):
            parts = ["gate_proj", "up_proj"] if last == "gate_up_proj" else ["down_proj"]
            numbers = sorted(
                {int(key.removeprefix(f"{start}.").split(".")[0]) for key in weights if key.startswith(start)}
            )
            placed[name] = torch.stack([torch.cat([weights[f"{start}.{n}.{part}"] for part in parts]) for n in numbers])
    return placed


def job(tmp_path: Path, preset: str = "w2a16", *steps: dict, export: str = "compressed_tensors", **more):  # type: ignore[no-untyped-def]
    folder = tmp_path / "model"
    if not folder.exists():
        tiny_model(folder, dtype=torch.float32, rank=8)
    out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    task = Task(
        model_dir=folder, output_dir=out, config=parse_config(config(preset, *steps)), export=(export,),
        calibration={"num_samples": 4, "seq_len": 64}, evaluation={"num_windows": 2, "seq_len": 64, "num_prompts": 0},
        **more,
    )  # fmt: skip
    report = run(task, lambda event: None)
    assert report is not None
    return report.to_dict(), load_file(out / "model.safetensors")


def test_scales_move_and_codes_stay(tmp_path: Path) -> None:
    """The job's own proof compares the files with the model in memory, their logits included."""
    report, tuned = job(tmp_path, "w2a16", {"name": "gptq"}, DISTILL | {"lr": 0.003, "num_windows": 32})
    result = report["distillation"]
    assert result["is_kept"] and result["kl_after"] < result["kl_before"]
    assert report["summary"]["seconds_by_phase"]["distill"] > 0
    _, ruined = job(tmp_path, "w2a16", {"name": "gptq"}, DISTILL | {"lr": 3.0, "num_windows": 32})
    differing = {name.rpartition(".")[2] for name in tuned if not torch.equal(tuned[name], ruined[name])}
    assert differing == {"weight_scale"}


def test_what_gains_nothing_is_not_kept(tmp_path: Path) -> None:
    """With a learning rate that ruins the model, the files have the scales of the solver."""
    report, files = job(tmp_path, "w2a16", {"name": "rtn", "range_search": False}, DISTILL | {"lr": 3.0})
    assert report["distillation"]["is_kept"] is False
    assert any("distill gained nothing" in warning for warning in report["warnings"])
    _, untuned = job(tmp_path, "w2a16")
    assert files.keys() == untuned.keys()
    assert all(torch.equal(files[name], untuned[name]) for name in files)


KILLS = {
    "in a step": (Student, "gradients", 2, 1),
    "while files are rewritten": (writing.ResultWriter, "rewrite", 5, 2),
}
"""What is called for which time at the kill, and how many of the two steps are done then."""


@pytest.mark.parametrize("place", KILLS)
def test_a_killed_job_goes_on_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner, name, count, num_done = KILLS[place]
    model_dir = tiny_model(tmp_path / "model", num_hidden_layers=3)
    given = config("w2a16", {"name": "gptaq"}, DISTILL)
    windows = {"num_samples": 8, "seq_len": 32}
    file = task_file(model_dir, tmp_path / "whole", given, EXPORTS, calibration=windows)
    assert forked(lambda _: main(["run", str(file)]), 1, tmp_path) == [0]
    expected = seen_of(tmp_path, tmp_path / "whole")
    whole = json.loads((tmp_path / "whole" / "report.json").read_text())
    monkeypatch.setattr(savepoint, "MIN_WORK_PER_SAVE", 0)
    file = task_file(
        model_dir, tmp_path / "out", given, EXPORTS, calibration=windows, resume_dir=str(tmp_path / "resume")
    )

    def first(_: int) -> int:
        monkeypatch.setattr(owner, name, killed(owner, name, count))
        return main(["run", str(file)])

    assert forked(first, 1, tmp_path) == [-signal.SIGKILL]
    assert forked(lambda _: main(["run", str(file)]), 1, tmp_path) == [0], (tmp_path / "err.0").read_text()
    steps = [event for event in events_of(tmp_path) if event["kind"] == "progress" and event["phase"] == "distill"]
    assert [event["done"] for event in steps] == list(range(num_done, 3))
    assert seen_of(tmp_path, tmp_path / "out")[0] == expected[0]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["distillation"] == whole["distillation"]
    assert not (tmp_path / "resume").exists()


def test_a_damaged_state_of_the_tuning_is_not_used(tmp_path: Path) -> None:
    point = savepoint.SavePoint(tmp_path, "fingerprint", ALONE)
    kept, found = [torch.arange(6.0).reshape(2, 3), torch.ones(1)], [torch.zeros(2, 3), torch.zeros(1)]
    assert point.kept("tuning", found) == 0
    point.keep("tuning", 9, kept)
    point.keep("tuning", 10, kept)  # too soon
    assert point.kept("tuning", found) == 9 and all(map(torch.equal, kept, found))
    [file] = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    assert point.kept("tuning", [torch.zeros(2, 3), torch.zeros(1)]) == 0


REFUSED = {
    "real zero points": (
        ("gguf_q4_1", {"name": "gptq"}, DISTILL),
        "has real zero points, which are stored as a product with the scale",
    ),
    "corrected biases": (
        ("w2a16", {"name": "gptq"}, {"name": "bias_correction"}, DISTILL),
        "bias_correction changes tensors",
    ),
    "another transform": (("w2a16", {"name": "awq"}, DISTILL), "awq changes tensors other than the codes"),
    "activations": (("int8_static", DISTILL), "has quantized activations"),
    "powers of two": (("mxfp4_weight_only", DISTILL), "has scales of type e8m0"),
    "two levels": (("nf4_double_quant", DISTILL), "has scales of type double_quant"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_tune_is_refused(tmp_path: Path, name: str) -> None:
    given, message = REFUSED[name]
    exports = {"two levels": "bitsandbytes", "activations": "quark", "powers of two": "quark"}
    with pytest.raises(ConfigError, match=message):
        job(tmp_path, *given, export=exports.get(name, "fake_quantized"))


def test_several_processes_are_refused(tmp_path: Path) -> None:
    file = task_file(
        tiny_model(tmp_path / "model"), tmp_path / "out", config("w2a16", {"name": "gptq"}, DISTILL), EXPORTS
    )
    assert forked(lambda _: main(["run", str(file)]), 2, tmp_path) == [1, 1]
    failure = events_of(tmp_path)[-1]
    assert failure["code"] == "unsupported_config"
    assert "distill tunes on all windows together, which does not yet work with 2 processes." in failure["message"]


def test_a_model_that_predicts_no_next_token_is_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    given = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 512, **shape}
    build_tiny_model(given, 0, declared_class(given)).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="a model of the kind 'masked' does not make"):
        job(tmp_path, "w2a16", {"name": "gptq"}, DISTILL)


def test_images_in_the_calibration_data_are_refused() -> None:
    windows = step.Windows(torch.arange(20).reshape(10, 2), ({"pixel_values": torch.zeros(1)},) * 10)
    with pytest.raises(ConfigError, match="the calibration data have images or sound"):
        step.divided(windows, 4)
    assert step.divided(windows, 0)[0].media == windows.media


def test_a_container_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="written in one pass"):
        job(tmp_path, "gguf_q4_0", DISTILL, export="gguf")


def test_windows_are_all_different() -> None:
    windows = step.Windows(torch.arange(20).reshape(10, 2))
    solver, more = step.divided(windows, 4)
    assert torch.equal(torch.cat([solver.ids_NT, more]), windows.ids_NT) and len(more) == 4
