"""AutoRound on a small block: better than rounding, by what the block computes, in every kind of format."""

import pytest
import torch
from torch import nn

from quantcore.config.algorithms import AutoRoundConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import QuantizationConfig
from quantcore.config.spec import QuantizationSpec
from quantcore.solvers.autoround import AutoRound, _spacing
from quantcore.solvers.rtn import round_to_nearest

SPECS = {
    "uint4": QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=16, symmetric=False),
    "int3": QuantizationSpec(dtype="int3", qscheme="per_channel", ch_axis=0),
    "mxfp4": QuantizationSpec(dtype="fp4", qscheme="per_group", group_size=32, scale_type="e8m0"),
    "nvfp4": QuantizationSpec(dtype="fp4", qscheme="per_group", group_size=16, scale_type="e4m3"),
    "nf4": QuantizationSpec(dtype="nf4", qscheme="per_group", group_size=32),
}


class Case:
    """A block of two layers, eight windows of inputs that lie near a plane, and rounding as the start."""

    def __init__(self, spec, dtype=torch.float32):
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32)).to(dtype)
        self.block.requires_grad_(False)
        mixing = torch.randn(4, 32)
        self.windows = [(torch.randn(1, 24, 4) @ mixing + 0.1 * torch.randn(1, 24, 32)).to(dtype) for _ in range(8)]
        self.modules = {
            LayerPlan(name, 0, tuple(self.block[int(name)].weight.shape), QuantizationConfig(weight=spec)): self.block[
                int(name)
            ]
            for name in ("0", "2")
        }
        self.start = {layer: round_to_nearest(module.weight, spec) for layer, module in self.modules.items()}
        self.targets = [self.block(window) for window in self.windows]

    def run(self, window):
        return self.block(self.windows[window])

    def tune(self, **options):
        return AutoRound(AutoRoundConfig(**{"iters": 60, "batch_size": 4, **options})).tune(
            self.modules, self.start, self.run, self.targets
        )

    def loss(self, codes):
        """Mean squared error of the block with these codes."""
        before = {layer: module.weight for layer, module in self.modules.items()}
        for layer, module in self.modules.items():
            module.weight = nn.Parameter(codes[layer].dequantize().to(before[layer].dtype), requires_grad=False)
        losses = [(self.run(window) - target).square().mean().item() for window, target in enumerate(self.targets)]
        for layer, module in self.modules.items():
            module.weight = before[layer]
        return sum(losses) / len(losses)


@pytest.mark.parametrize("name", SPECS)
def test_it_beats_rounding(name):
    case = Case(SPECS[name])
    assert case.loss(case.tune()) < 0.75 * case.loss(case.start)


def test_a_model_in_bfloat16():
    case = Case(SPECS["uint4"], torch.bfloat16)
    assert case.loss(case.tune()) < 0.75 * case.loss(case.start)


def test_no_weight_moves_by_more_than_half_a_step():
    """With scales held, every code is one of the two next to the weight."""
    case = Case(SPECS["int3"])
    tuned = case.tune(minmax_lr=1e-12)
    for layer, module in case.modules.items():
        scaled = module.weight / case.start[layer].params.scale
        assert torch.equal(tuned[layer].params.scale, case.start[layer].params.scale)
        distance = (tuned[layer].codes - scaled.clamp(-4, 3)).abs()
        assert distance.max() <= 1 and (distance > 0.5).any()


def test_the_block_is_left_as_it_was():
    case = Case(SPECS["uint4"])
    weights = {name: (parameter, parameter.clone()) for name, parameter in case.block.named_parameters()}
    case.tune(iters=3)
    for name, parameter in case.block.named_parameters():
        assert parameter is weights[name][0] and torch.equal(parameter, weights[name][1])
        assert parameter.grad is None and not parameter.requires_grad


def test_a_block_that_fails_is_left_as_it_was():
    case = Case(SPECS["uint4"])
    case.targets[3] = torch.zeros(5)
    with pytest.raises(RuntimeError):
        case.tune()
    assert all(isinstance(module.weight, nn.Parameter) for module in case.modules.values())


def test_the_seed_decides():
    codes = [[one.codes for one in Case(SPECS["uint4"]).tune(seed=seed).values()] for seed in (1, 1, 2)]
    assert all(map(torch.equal, codes[0], codes[1]))
    assert not all(map(torch.equal, codes[0], codes[2]))


def test_never_worse_than_the_start():
    case = Case(SPECS["uint4"])
    case.targets = [case.block(window) for window in case.windows]
    good = case.tune()
    case.start = good
    worse = case.tune(iters=2, lr=0.5, minmax_lr=0.5)
    assert case.loss(worse) <= case.loss(good)


def test_the_spacing_of_a_grid():
    start = round_to_nearest(torch.eye(4).repeat(1, 8), SPECS["mxfp4"])  # values 0, 0.5, 1, 1.5, 2, 3, 4, 6
    x = torch.tensor([0.2, 0.5, 1.2, 2.5, 5.0, 7.0, -0.7, -5.0, -9.0])
    assert _spacing(x, start).tolist() == [0.5, 0.5, 0.5, 1.0, 2.0, 2.0, 0.5, 2.0, 2.0]
