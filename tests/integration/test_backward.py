"""Gradients of the model's predictions, block by block, beside those of the whole model by autograd."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import CalibrationConfig, parse_config
from quantcore.engine.blockwise.algorithms import BlockAlgorithms
from quantcore.engine.blockwise.backward import BackwardPass, log_p_of_drawn
from quantcore.engine.blockwise.results import Prepared
from quantcore.engine.blockwise.running_block import CalibrationStreams, RunningBlock
from quantcore.engine.calibration.reduction import Span
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.runtime.hidden import Hidden
from quantcore.importing.model import read_model
from quantcore.plan import workload
from quantcore.plan.planner import make_plan
from tests.support.models import MIXTURES, tiny_model

SEED, NUM_WINDOWS, LENGTH = 3, 5, 24
MODELS = {"dense": {}, "mixture": {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}}
IDS_NT = torch.randint(1, 500, (NUM_WINDOWS, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=list(MODELS))
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model", dtype=torch.float32, rank=8, **MODELS[request.param])


def of_whole_model(model_dir: Path, window: int, seed: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The states behind each block and all inputs and outputs of linear layers, with gradients, by plain autograd."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    kept: dict[str, torch.Tensor] = {}

    def keeping(name: str):  # type: ignore[no-untyped-def]
        def keep(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            whole = output[0] if isinstance(output, tuple) else output
            whole.retain_grad()
            kept[name], kept[f"{name} in"] = whole, inputs[0].detach()

        return keep

    for name, module in model.model.layers.named_modules():
        if name.isdigit() or isinstance(module, nn.Linear):
            module.register_forward_hook(keeping(name))
    logits = model(IDS_NT[window : window + 1]).logits[0]
    log_p_of_drawn(logits, torch.Generator().manual_seed(seed + window)).backward()
    return [kept[str(index)].grad for index in range(len(model.model.layers))], kept


def passed_back(model_dir: Path, tmp_path: Path, first: int = 0) -> BackwardPass:
    model = open_model(read_model(model_dir)).streamed
    return BackwardPass(model, model.embed(IDS_NT[first:]), tmp_path, lambda done, total: None, first)


def near(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(ours, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_states_have_the_gradients_of_the_whole_model(model_dir: Path, tmp_path: Path) -> None:
    gradients = passed_back(model_dir, tmp_path).gradients(SEED)
    for window in (0, NUM_WINDOWS - 1):
        for index, expected in enumerate(of_whole_model(model_dir, window, SEED)[0]):
            assert near(gradients.behind(index, window), expected), (window, index)
            assert not near(gradients.behind(index, 1), expected)


def test_a_part_of_the_windows_has_the_same_gradients(model_dir: Path, tmp_path: Path) -> None:
    whole, part = passed_back(model_dir, tmp_path).gradients(SEED), passed_back(model_dir, tmp_path, 3).gradients(SEED)
    assert torch.equal(whole.behind(1, 4), part.behind(1, 1))


def test_progress_is_told_block_by_block(model_dir: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    model = open_model(read_model(model_dir)).streamed
    BackwardPass(model, model.embed(IDS_NT), tmp_path, lambda *done: told.append(done)).gradients(SEED)
    assert told == [(done, 6) for done in range(1, 7)]


@contextmanager
def prepared_block(model_dir: Path, tmp_path: Path, *chain: str) -> Iterator[tuple[Prepared, nn.Module]]:
    """The second block with what calibration gives the solver; both streams are those of the float model."""
    config = parse_config(presets.resolve("w4a16").to_dict() | {"algo_config": [{"name": name} for name in chain]})
    model = read_model(model_dir)
    calibration = CalibrationConfig(num_samples=NUM_WINDOWS, seq_len=LENGTH)
    plan = make_plan(JobSpec(config=config, calibration=calibration), model.headers)
    gradients = passed_back(model_dir, tmp_path).gradients(SEED)
    algorithms = BlockAlgorithms(config, torch.float32)
    streamed = open_model(model).streamed
    hidden = streamed.embed(IDS_NT)
    with streamed.block(0) as block:
        streamed.run_block(block, 0, hidden)
    for rotated in (hidden, Hidden(gradients.states)):
        algorithms.rotate_states(rotated)
    streams = CalibrationStreams(
        hidden, Span(NUM_WINDOWS), probe=hidden.copy(), reference=hidden.copy(), gradients=gradients
    )
    with streamed.block(1) as block:
        layers = {layer: streamed.find_module(layer.name) for layer in plan.layers_of(1)}
        yield algorithms.prepare(RunningBlock(block, 1, streams), layers), block


def test_statistics_are_those_of_the_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Second moments of the outputs' gradients, and tokens weighted by their squares, summed over q, k and v."""
    monkeypatch.setattr(workload, "COUPLED_ROWS", 48)
    model_dir = tiny_model(tmp_path / "model", dtype=torch.float32, rank=8)
    with prepared_block(model_dir, tmp_path, "yaqa") as (prepared, _):
        by_name = {layer.name: stats for layer, stats in prepared.stats.items()}
    kept = [of_whole_model(model_dir, window, SEED)[1] for window in range(NUM_WINDOWS)]
    attention = [f"model.layers.1.self_attn.{one}_proj" for one in "qkv"]
    stats = by_name[attention[0]]
    assert sorted(stats.outputs) == sorted(attention)
    for name in (*attention, "model.layers.1.mlp.down_proj"):
        inner = name.removeprefix("model.layers.")
        g = torch.cat([window[inner].grad[0] for window in kept])
        blocks = workload.output_blocks(g.shape[1])
        assert len(blocks) == -(-g.shape[1] // 48)
        for gram, rows in zip(by_name[name].outputs[name], blocks, strict=True):
            assert near(gram, g[:, rows].T @ g[:, rows])
    gram_II = torch.zeros(64, 64)
    for window in kept:
        weights = sum(window[f"1.self_attn.{one}_proj"].grad[0].square().sum(-1) for one in "qkv")
        x = window["1.self_attn.q_proj in"][0]
        gram_II += x.T @ (x * (weights / weights.mean())[:, None])
    assert near(stats.gram_II, gram_II / (NUM_WINDOWS * LENGTH))


def test_experts_learn_from_the_tokens_that_they_get(tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path / "model", dtype=torch.float32, rank=8, **MODELS["mixture"])
    with prepared_block(model_dir, tmp_path, "yaqa") as (prepared, _):
        experts = {layer: stats for layer, stats in prepared.stats.items() if ".experts." in layer.name}
    assert experts
    for layer, stats in experts.items():
        [gram] = stats.outputs[layer.name]
        assert gram.shape == (layer.out_features, layer.out_features) and gram.diagonal().sum() > 0


@pytest.mark.parametrize("transform", ["rotation", "smoothquant", "awq"])
def test_gradients_follow_what_transforms_do_to_the_outputs(tmp_path: Path, transform: str) -> None:
    """What a layer weighs in the loss does not depend on the coordinates: tr(W^T A W H) stays when W becomes T W S."""
    model_dir = tiny_model(tmp_path / "model", dtype=torch.float32, rank=8)

    def weighed(*chain: str) -> dict[str, float]:
        with prepared_block(model_dir, tmp_path, *chain) as (prepared, block):
            found = {}
            for layer, stats in prepared.stats.items():
                weight = block.get_submodule(prepared.names[layer]).get_parameter("weight").detach().double()
                [gram_OO] = stats.outputs[layer.name]
                found[layer.name] = ((gram_OO.double() @ weight) * (weight @ stats.gram_II.double())).sum().item()
            return found

    assert weighed(transform, "yaqa") == pytest.approx(weighed("yaqa"), rel=1e-3)
