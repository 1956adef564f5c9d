"""Schemes chosen layer by layer: what is reckoned is what is lost, and the config says what was chosen."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from quantcore.cli import main as cli
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec, MixConfig
from quantcore.config.quantization import CalibrationConfig, parse_config
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.data.windows import DocumentTokenizer, token_windows
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.mixed_precision.command import mix
from quantcore.engine.mixed_precision.sensitivity import Sensitivity
from quantcore.engine.pipeline.job import run
from quantcore.errors import ConfigError
from quantcore.importing.model import read_model
from quantcore.plan.mix_schemes import resolve as resolve_schemes
from quantcore.plan.planner import make_plan
from tests.support.models import MIXTURES, tiny_model, tiny_tokenizer

CALIBRATION = CalibrationConfig(num_samples=48, seq_len=32)
SCHEMES = ("w4a16", "int8_weight_only")


def silent(event: object) -> None:
    pass


def mixed(model_dir: Path, schemes: Sequence[str] = SCHEMES, **budget: float) -> dict[str, Any]:
    asked = resolve_schemes(MixConfig(schemes=tuple(schemes), **budget))
    return mix(str(model_dir), asked, CALIBRATION, silent, export="compressed_tensors")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", dtype=torch.float32, rank=8)


def fp8(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A hook that rounds each token of a layer's input to e4m3 by its own scale."""
    scale = inputs[0].abs().amax(-1, keepdim=True) / 448
    return (inputs[0] / scale).to(torch.float8_e4m3fn).to(inputs[0].dtype) * scale


def lost_alone(
    model_dir: Path, rounded: dict[str, torch.Tensor], names: tuple[str, ...], ids_NT: torch.Tensor, *, inputs: bool
) -> float:
    """Half of E[(d log p)^2] a token if these layers alone are ``rounded``, and their ``inputs``: its quadratic form
    in the logits, by Transformers in float64, without any gradient."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    with torch.no_grad():
        before = model(ids_NT).logits
        for name in names:
            model.get_submodule(name).weight.copy_(rounded[f"{name}.weight"])
            if inputs:
                model.get_submodule(name).register_forward_pre_hook(fp8)
        change = model(ids_NT).logits - before
    p = functional.softmax(before, -1)
    variance = (p * change.square()).sum(-1) - (p * change).sum(-1).square()
    return variance.mean().item() / 2


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8_weight_only", "fp8_dynamic"])
def test_what_is_reckoned_is_what_each_layer_loses(
    model_dir: Path, tmp_path: Path, scheme: str, proof_in_this_process: None
) -> None:
    model = read_model(model_dir)
    config = presets.resolve(scheme)
    plan = make_plan(JobSpec(config=config, calibration=CALIBRATION), model.headers)
    plans = {scheme: (config, plan)}
    ids_NT = token_windows(
        CalibrationConfig(num_samples=400, seq_len=16),
        DocumentTokenizer(
            lambda text: tiny_tokenizer()(text, add_special_tokens=False, verbose=False)["input_ids"], separator=0
        ),
        num_held_out=1,
        held_out_len=16,
    ).calibration_NT
    task = Task(model_dir=model_dir, output_dir=tmp_path / "out", config=config, calibration=CALIBRATION,
                export=("fake_quantized",), evaluation=EvaluationConfig(num_windows=0, num_prompts=0))  # fmt: skip
    run(task, silent)
    rounded = load_file(tmp_path / "out" / "model.safetensors")
    sensitivity = Sensitivity(open_model(model), ids_NT, plans, tmp_path, silent)
    draws = [sensitivity.losses(seed) for seed in range(3)]
    assert len(draws[0]) == 3 * 4, "q, k and v are one unit, gate and up another"
    ratios = {
        names: sum(draw[names][scheme] for draw in draws)
        / len(draws)
        / lost_alone(model_dir, rounded, names, ids_NT, inputs=scheme == "fp8_dynamic")
        for names in draws[0]
    }
    assert all(0.7 < ratio < 1.4 for ratio in ratios.values()), ratios
    assert 0.9 < sum(ratios.values()) / len(ratios) < 1.1


def test_the_config_is_what_was_promised(model_dir: Path, tmp_path: Path, proof_in_this_process: None) -> None:
    found = mixed(model_dir, max_bits=5.5)
    assert found["mix"]["bits"] <= 5.5 < found["uniform"]["int8_weight_only"]["bits"]
    chosen = {name: unit["scheme"] for unit in found["units"] for name in unit["layers"]}
    for block in range(3):
        attention = {chosen[f"model.layers.{block}.self_attn.{one}_proj"] for one in "qkv"}
        assert (
            len(attention) == 1
            and chosen[f"model.layers.{block}.mlp.gate_proj"] == chosen[f"model.layers.{block}.mlp.up_proj"]
        )
    task = Task(
        model_dir=model_dir, output_dir=tmp_path / "out", config=parse_config(found["config"]),
        calibration=CALIBRATION, evaluation=EvaluationConfig(num_windows=12, seq_len=32, num_prompts=0),
        export=("compressed_tensors",),
    )  # fmt: skip
    report = run(task, silent).to_dict()
    assert report["quality"]["divergence"] == found["mix"]["measured"]["divergence"]
    assert report["summary"]["size_after_bytes"] == found["mix"]["size_bytes"]
    plain = task.model_copy(update={"config": presets.resolve("w4a16"), "output_dir": tmp_path / "w4"})
    uniform = run(plain, silent).to_dict()
    assert uniform["summary"]["size_after_bytes"] == found["uniform"]["w4a16"]["size_bytes"]
    lost, all_alike = (one["quality"]["divergence"]["kl_mean"]["value"] for one in (report, uniform))
    promised = found["mix"]["loss"] / found["uniform"]["w4a16"]["loss"]
    assert lost / all_alike == pytest.approx(promised, rel=0.5) and promised < 0.7


@pytest.mark.slow
def test_the_smallest_mix_that_is_good_enough(model_dir: Path) -> None:
    best = mixed(model_dir, max_bits=9.0)["mix"]
    worst = mixed(model_dir, max_bits=4.6)["mix"]
    ends = [one["measured"]["divergence"]["kl_mean"]["value"] for one in (best, worst)]
    allowed = ends[1] / 2
    found = mixed(model_dir, max_divergence=allowed)["mix"]
    assert ends[0] < found["measured"]["divergence"]["kl_mean"]["value"] <= allowed
    assert worst["size_bytes"] < found["size_bytes"] < best["size_bytes"]
    with pytest.raises(ConfigError, match="was requested") as refused:
        mixed(model_dir, max_divergence=ends[0] / 100)
    assert refused.value.code == "budget_too_small"


@pytest.mark.slow
def test_layers_may_stay_as_they_are_and_inputs_be_quantized(model_dir: Path) -> None:
    found = mixed(model_dir, ("fp8", "mxfp4", "keep"), max_bits=12.0)
    kept = [name for unit in found["units"] if unit["scheme"] == "keep" for name in unit["layers"]]
    assert kept and set(kept) <= set(found["config"]["exclude"])
    for unit in found["units"]:
        assert 0 == unit["options"]["keep"]["loss"] < unit["options"]["fp8"]["loss"] < unit["options"]["mxfp4"]["loss"]
    everything = sum(found["mix"]["layers"].values())
    assert everything == 3 * 7 and parse_config(found["config"])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3"])
def test_the_experts_of_a_mixture_are_one_unit(model_type: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", model_type=model_type, **MIXTURES[model_type])
    found = mixed(folder, ("uint4_wo_32", "int8_weight_only"), max_bits=6.0)
    experts = [unit["layers"] for unit in found["units"] if any(".experts." in name for name in unit["layers"])]
    assert len(experts) == (3 if model_type == "mixtral" else 2)
    assert all(len(names) == 4 * 3 and all(".experts." in name for name in names) for names in experts)
    assert found["mix"]["bits"] <= 6.0


def test_the_command(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["mix", str(model_dir), "--schemes", *SCHEMES, "--num_calib_data", "8", "--seq_len", "32"]
    file = tmp_path / "mix.json"
    assert cli.main([*asked, "--max_bits", "5.5", "--output", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "q_proj, k_proj, v_proj" in shown and "mean KL" in shown
    assert cli.main([*asked, "--max_bits", "5.5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == json.loads(file.read_text())
    with pytest.raises(SystemExit):
        cli.main([*asked, "--max_bits", "5.5", "--output", str(file)])
    assert "exists already" in capsys.readouterr().err
    for wrong, code in (
        (["--max_size", "plenty"], "invalid_max_size"),
        (["--max_size", "1KB"], "budget_too_small"),
        (["--max_bits", "5", "--schemes", "w4a16"], "invalid_schemes"),
        (["--max_bits", "5", "--schemes", "w4a16", "uint4_wo_32", "--model_export", "awq"], "incompatible_export"),
        (["--max_bits", "5", "--schemes", "w4a16", "w5"], "unknown_preset"),
    ):
        assert cli.main([*asked, *wrong]) == 1, wrong
        assert code in capsys.readouterr().err
