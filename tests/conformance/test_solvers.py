"""Every solver with every scheme that an exporter is tested with."""

from dataclasses import replace

import pytest
import torch

from quantcore.config.algorithms import GPTAQConfig, GPTQConfig, QronosConfig, RTNConfig, YAQAConfig, config_of
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import SUPER_BLOCK
from quantcore.engine.calibration.stats import Stats
from quantcore.engine.solvers import SOLVERS
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.tensors.qtensor import QTensor
from tests.support.exporting import CONFIGS
from tests.support.params import with_usual

SOLVER_CONFIGS = {
    "rtn": [RTNConfig(), RTNConfig(range_search=False)],
    "gptq": [GPTQConfig(), GPTQConfig(static_groups=True), GPTQConfig(desc_act=False, range_search=False)],
    "gptaq": [GPTAQConfig(), GPTAQConfig(static_groups=True, hessian_dtype="float64")],
    "yaqa": [YAQAConfig(), YAQAConfig(static_groups=True)],
    "qronos": [QronosConfig(), QronosConfig(static_groups=True)],
}


def problem(config_name: str) -> tuple[LayerPlan, torch.Tensor]:
    config = CONFIGS[config_name]
    in_super_blocks = config.weight.scale_type.is_whole or config.weight.group_size == SUPER_BLOCK
    width = SUPER_BLOCK if in_super_blocks else 128
    layer = LayerPlan("model.layers.0.self_attn.k_proj", 0, (64, width), config)
    weight = torch.randn(64, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3] = 0  # a dead row
    weight[5, 7] = 30  # an outlier
    return layer, weight


def stats(solver: str, width: int) -> Stats:
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(300, 40, generator=generator) @ torch.randn(40, width, generator=generator) / 6
    y += 0.3 * torch.randn(300, width, generator=generator) + 0.5
    y[:, 9] = 0  # a dead input
    x = y + 0.05 * y.flip(1)
    shift = (y - x).T @ x / 300 if solver in ("gptaq", "yaqa", "qronos") else None
    return Stats(300, x.abs().amax(0), x.mean(0), x.abs().mean(0), gram_II=x.T @ x / 300, shift_II=shift)


def cost(quantized: QTensor, weight: torch.Tensor, given: Stats) -> torch.Tensor:
    """What the layer's output is wrong by, for a constant: with a shift, against the weights that are best for x."""
    target = weight.float()
    if given.shift_II is not None:
        damped = given.gram_II + 1e-3 * given.hessian_diagonal_I.mean() * torch.eye(len(given.gram_II))
        target = target + torch.linalg.solve(damped, (target @ given.shift_II).T).T
    error = target - quantized.dequantize()
    return ((error @ given.gram_II) * error).sum()


def largest_of_zeros(layer: LayerPlan) -> float:
    """What a row of zeros may become: iq4_nl and vectors have no zero, so that it has the smallest scale."""
    return 1e-4 if 0.0 not in layer.weight.format.grid() else 0.0


USUAL = {config.weight: name for name, config in reversed(CONFIGS.items())}.values()
"""One name for every scheme of weights: a solver sees nothing else of a config."""


@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("config_name", with_usual(CONFIGS, USUAL))
def test_every_solver_with_every_scheme(config_name: str, solver: str) -> None:
    layer, weight = problem(config_name)
    given = stats(solver, weight.shape[1])
    plain = round_to_nearest(weight, layer.weight)
    for config in SOLVER_CONFIGS.get(solver) or [config_of(solver)]:
        quantized = SOLVERS.get(solver)(config).solve({layer: weight}, given)[layer]
        restored = quantized.dequantize()
        assert restored.shape == weight.shape and torch.isfinite(restored).all()
        assert (restored[3].abs() <= largest_of_zeros(layer)).all()
        assert quantized.params.scale.shape == layer.num_scales
        assert quantized.codes.shape == weight.shape and quantized.codes.dtype == plain.codes.dtype
        if solver in SOLVER_CONFIGS and layer.weight.format.scaled:  # an installed package's may be worse than rounding
            assert cost(quantized, weight, given) < cost(plain, weight, given)


@pytest.mark.parametrize("config_name", with_usual(CONFIGS, USUAL))
def test_yaqa_costs_the_predictions_less_with_every_scheme(config_name: str) -> None:
    """tr(E^T A E H), with the gradients of outputs that go together."""
    layer, weight = problem(config_name)
    g = torch.randn(300, 8, generator=torch.Generator().manual_seed(2)) @ torch.randn(8, 64) + torch.randn(300, 64)
    given = replace(stats("gptq", weight.shape[1]), outputs={layer.name: (g.T @ g,)})
    for options in ({}, {"static_groups": True}):
        solved = {
            solver: SOLVERS.get(solver)(config).solve({layer: weight}, given)[layer]
            for solver, config in (("yaqa", YAQAConfig(**options)), ("gptq", GPTQConfig(**options)))
        }
        assert solved["yaqa"].params.scale.shape == layer.num_scales
        errors = {solver: weight.float() - quantized.dequantize() for solver, quantized in solved.items()}
        costs = {solver: ((g @ error) @ given.gram_II * (g @ error)).sum() for solver, error in errors.items()}
        assert (errors["yaqa"][3].abs() <= largest_of_zeros(layer)).all() and costs["yaqa"] <= costs["gptq"]


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_without_statistics_every_scheme_is_rounded_to_nearest(solver: str) -> None:
    other = []
    for config_name in CONFIGS:
        layer, weight = problem(config_name)
        plain = round_to_nearest(weight, layer.weight)
        for config in SOLVER_CONFIGS.get(solver, ()):
            quantized = SOLVERS.get(solver)(config).solve({layer: weight}, None)[layer]
            same_codes = quantized.codes.dtype == plain.codes.dtype and quantized.codes.shape == plain.codes.shape
            same_values = torch.equal(quantized.dequantize(), plain.dequantize())
            if not (same_codes and same_values and quantized.params.scale.shape == layer.num_scales):
                other.append((config_name, config))
    assert not other
