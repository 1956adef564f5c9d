"""Rows of weights that move each other: the feedback of YAQA along outputs."""

import itertools

import pytest
import torch

from quantcore.config.algorithms import GPTAQConfig, YAQAConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import QuantizationConfig, QuantizationSpec
from quantcore.engine.calibration.stats import Stats
from quantcore.engine.solvers import gptq, rows
from quantcore.engine.solvers.gptq import GPTAQ, YAQA
from quantcore.engine.solvers.hessian import order_of
from quantcore.plan import workload

SPEC = QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=8, symmetric=False)
DAMPING = 0.01


def moments(size: int, seed: int) -> torch.Tensor:
    """Second moments [n, n] of correlated values of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, size, generator=generator) @ torch.randn(size, size, generator=generator) / size**0.5
    x *= 1 + 2 * torch.rand(size, generator=generator)
    return x.T @ x / len(x)


def layer_of(shape: tuple[int, int], name: str = "q_proj", spec: QuantizationSpec = SPEC) -> LayerPlan:
    return LayerPlan(name, 0, shape, QuantizationConfig(weight=spec))


def stats_of(num_inputs: int, outputs: dict[str, tuple[torch.Tensor, ...]]) -> Stats:
    nothing = torch.zeros(num_inputs)
    return Stats(200, nothing, nothing, nothing, moments(num_inputs, 1), outputs=outputs)


def weight_of(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def costs_the_model(error_OI: torch.Tensor, output_gram: torch.Tensor, stats: Stats) -> float:
    """tr(E^T A E H): half of it is the divergence, to second order."""
    error, gram = error_OI.double(), stats.gram_II.double()
    return ((output_gram.double() @ error) * (error @ gram)).sum().item()


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MIN_TILE", 1)
    monkeypatch.setattr(rows, "STEPS", 1000)


@pytest.fixture
def no_descent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "NUM_PASSES", 0)


def test_it_is_the_nearest_plane_of_all_weights_together(row_by_row: None, no_descent: None) -> None:
    """Babai's nearest plane on the Kronecker product of both matrices, weight by weight, in float64: no tile, no
    feedback matrix, no two kinds of feedback."""
    weight = weight_of((6, 16))
    gram_OO = moments(6, 2)
    layer, stats = layer_of((6, 16)), stats_of(16, {"q_proj": (gram_OO,)})
    options = {"static_groups": True, "damp_percent": DAMPING, "output_damp_percent": DAMPING}
    quantized = YAQA(YAQAConfig(**options)).solve({layer: weight}, stats)[layer]
    scale, zero = (
        part.double().repeat_interleave(8, 1) for part in (quantized.params.scale, quantized.params.zero_point)
    )

    def damped(gram: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        gram = gram.double()
        return gram[order][:, order] + DAMPING * gram.diagonal().mean() * torch.eye(len(gram))

    outer, inner = gram_OO.diagonal().argsort(descending=True), order_of(stats.gram_II.diagonal(), None, act_order=True)
    whole = torch.kron(damped(gram_OO, outer), damped(stats.gram_II, inner))
    upper = torch.linalg.cholesky(whole.flip(0, 1)).flip(0, 1)
    places = [(int(o), int(i)) for o in outer for i in inner]
    errors = torch.zeros(len(places), dtype=torch.float64)
    codes = torch.zeros(weight.shape)
    for number, (o, i) in enumerate(places):
        wanted = weight[o, i].double() + errors[:number] @ upper[:number, number] / upper[number, number]
        code = torch.clamp(torch.round(wanted / scale[o, i] + zero[o, i]), 0, 15)
        codes[o, i] = code
        errors[number] = weight[o, i] - (code - zero[o, i]) * scale[o, i]
    assert torch.equal(quantized.codes.float(), codes)
    alone = GPTAQ(GPTAQConfig(static_groups=True, damp_percent=DAMPING)).solve({layer: weight}, stats)[layer]
    assert not torch.equal(alone.codes, quantized.codes)


@pytest.mark.parametrize("static_groups", [True, False])
def test_rows_whose_gradients_are_independent_are_those_of_gptaq(static_groups: bool) -> None:
    weight = weight_of((160, 32))
    weight[7] = 0
    layer, stats = layer_of((160, 32)), stats_of(32, {"q_proj": (torch.diag(torch.rand(160) + 1),)})
    ours = YAQA(YAQAConfig(static_groups=static_groups)).solve({layer: weight}, stats)[layer]
    plain = GPTAQ(GPTAQConfig(static_groups=static_groups)).solve({layer: weight}, stats)[layer]
    assert torch.equal(ours.codes, plain.codes)
    assert torch.equal(ours.params.scale, plain.params.scale)
    assert torch.equal(ours.params.zero_point, plain.params.zero_point)


@pytest.mark.parametrize("static_groups", [True, False])
def test_the_model_loses_less(static_groups: bool) -> None:
    """On average over matrices, and by the same share if every layer is solved together with others."""
    lost = {"yaqa": 0.0, "together": 0.0, "gptaq": 0.0}
    for seed in range(5):
        shapes = {"q_proj": (192, 32), "k_proj": (64, 32), "v_proj": (80, 32)}
        grams = {name: moments(shape[0], 10 * seed + len(name) + shape[0]) for name, shape in shapes.items()}
        weights = {layer_of(shape, name): weight_of(shape, seed) for name, shape in shapes.items()}
        stats = stats_of(32, {name: (gram,) for name, gram in grams.items()})
        yaqa = YAQA(YAQAConfig(static_groups=static_groups, output_damp_percent=0.01))
        alone = {layer: yaqa.solve({layer: weight}, stats)[layer] for layer, weight in weights.items()}
        plain = GPTAQ(GPTAQConfig(static_groups=static_groups)).solve(weights, stats)
        for name, solved in {"yaqa": alone, "together": yaqa.solve(weights, stats), "gptaq": plain}.items():
            for layer, weight in weights.items():
                lost[name] += costs_the_model(weight - solved[layer].dequantize(), grams[layer.name], stats)
    assert lost["yaqa"] < 0.8 * lost["gptaq"]
    assert lost["together"] == pytest.approx(lost["yaqa"], rel=0.02)


def test_it_is_near_the_least_that_any_codes_cost(row_by_row: None) -> None:
    """All codes of 2 bits of a weight of 2 x 4, tried one after the other."""
    spec = QuantizationSpec(dtype="uint2", qscheme="per_group", group_size=4, symmetric=False)
    total = {"yaqa": 0.0, "gptaq": 0.0, "least": 0.0}
    for seed in range(12):
        weight, gram_OO = weight_of((2, 4), seed), moments(2, seed)
        layer, stats = layer_of((2, 4), spec=spec), stats_of(4, {"q_proj": (gram_OO,)})
        common = {"static_groups": True, "damp_percent": 1e-4}
        ours = YAQA(YAQAConfig(**common, output_damp_percent=1e-4)).solve({layer: weight}, stats)[layer]
        plain = GPTAQ(GPTAQConfig(**common)).solve({layer: weight}, stats)[layer]
        codes = torch.tensor(list(itertools.product(range(4), repeat=8)), dtype=torch.float64).view(-1, 2, 4)
        scale, zero = ours.params.scale.double(), ours.params.zero_point.double()
        error = weight.double() - (codes - zero) * scale
        every = ((gram_OO.double() @ error) * (error @ stats.gram_II.double())).sum((1, 2))
        total["least"] += every.min().item()
        for name, solved in {"yaqa": ours, "gptaq": plain}.items():
            total[name] += costs_the_model(weight - solved.dequantize(), gram_OO, stats)
    assert total["least"] <= total["yaqa"] < total["gptaq"]
    assert total["yaqa"] - total["least"] < 0.7 * (total["gptaq"] - total["least"])


def test_many_outputs_are_coupled_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "COUPLED_ROWS", 100)
    blocks = workload.output_blocks(250)
    assert [(block.start, block.stop) for block in blocks] == [(0, 84), (84, 168), (168, 250)]
    grams = tuple(moments(block.stop - block.start, 3) for block in blocks)
    weight, layer, stats = weight_of((250, 32)), layer_of((250, 32)), stats_of(32, {"q_proj": grams})
    whole = YAQA(YAQAConfig()).solve({layer: weight}, stats)[layer].codes
    for block, gram in zip(blocks, grams, strict=True):
        own, part = weight[block], layer_of((len(weight[block]), 32))
        alone = YAQA(YAQAConfig()).solve({part: own}, stats_of(32, {"q_proj": (gram,)}))[part].codes
        assert (alone != whole[block]).double().mean() < 0.01


def test_tiles_of_many_layers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    grams = {name: (moments(128, seed),) for seed, name in enumerate(("q_proj", "k_proj", "v_proj"))}
    weights = {layer_of((128, 32), name): weight_of((128, 32), seed) for seed, name in enumerate(grams)}
    stats = stats_of(32, grams)

    def solved() -> tuple[list[int], list[torch.Tensor]]:
        solver = YAQA(YAQAConfig())
        sizes = [tile.stop - tile.start for tile in solver._rows(weights, stats).tiles]
        return sizes, [quantized.codes for quantized in solver.solve(weights, stats).values()]

    sizes, whole = solved()
    assert sizes == [192, 192]
    monkeypatch.setattr(workload, "SOLVED_ROWS", 130)
    sizes, bounded = solved()
    assert sizes == [128, 64, 128, 64]
    assert all((a != b).double().mean() < 0.01 for a, b in zip(whole, bounded, strict=True))


def test_outputs_that_do_not_count_are_rounded_all_the_same() -> None:
    weight, layer = weight_of((70, 32)), layer_of((70, 32))
    solved = YAQA(YAQAConfig()).solve({layer: weight}, stats_of(32, {"q_proj": (torch.zeros(70, 70),)}))[layer]
    assert torch.equal(solved.codes, GPTAQ(GPTAQConfig()).solve({layer: weight}, stats_of(32, {}))[layer].codes)


def test_rows_of_zeros_stay_zero() -> None:
    weight = weight_of((130, 32))
    weight[3] = 0
    layer, stats = layer_of((130, 32)), stats_of(32, {"q_proj": (moments(130, 3),)})
    assert (YAQA(YAQAConfig()).solve({layer: weight}, stats)[layer].dequantize()[3] == 0).all()


def test_a_layer_without_gradients_is_solved_like_the_others_do_not_exist() -> None:
    weights = {layer_of((70, 32), name): weight_of((70, 32), seed) for seed, name in enumerate(("q_proj", "k_proj"))}
    stats = stats_of(32, {"q_proj": (moments(70, 3),)})
    solved = YAQA(YAQAConfig()).solve(weights, stats)
    k_proj = layer_of((70, 32), "k_proj")
    plain = GPTAQ(GPTAQConfig()).solve({k_proj: weights[k_proj]}, stats)[k_proj]
    assert (solved[k_proj].codes != plain.codes).double().mean() < 0.01
