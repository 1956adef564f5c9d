"""AutoRound on a small block: better than rounding, by what the block computes, in every kind of format."""

import pytest
import torch
from torch import nn

from quantcore.config.algorithms import AutoRoundConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import QuantizationConfig
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.calibration.reduction import Span
from quantcore.engine.solvers import autoround
from quantcore.engine.solvers.autoround import AutoRound, _spacing
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.errors import CalibrationError
from quantcore.tensors.qtensor import quantize_weight

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
        return self.tune_and_notes(**options)[0]

    def tune_and_notes(self, **options):
        tuner = AutoRound(AutoRoundConfig(**{"iters": 60, "batch_size": 4, **options}))
        return tuner.tune(self.modules, self.start, self.run, self.targets, Span(len(self.targets))), tuner.notes

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


def test_what_gains_nothing_on_windows_that_it_did_not_see_is_not_kept():
    """The windows to learn from ask for other outputs than the last one."""
    case = Case(SPECS["uint4"])
    case.targets[:-1] = [torch.randn_like(target) for target in case.targets[:-1]]
    tuned, notes = case.tune_and_notes(lr=0.5, minmax_lr=0.5)
    assert all(tuned[layer] is first for layer, first in case.start.items())
    [note] = notes
    assert note.startswith("autoround did not improve block 0 on 1 held-back windows")
    assert case.tune_and_notes()[1] == notes and Case(SPECS["uint4"]).tune_and_notes()[1] == []


def test_no_gradient_is_taken_on_the_windows_that_decide(monkeypatch):
    case, learned, run = Case(SPECS["uint4"]), set(), Case.run

    def noted(case, window):
        learned.update([window] * torch.is_grad_enabled())
        return run(case, window)

    monkeypatch.setattr(Case, "run", noted)
    case.tune()
    assert learned == set(range(7))


def test_the_best_step_by_windows_that_it_did_not_see_is_kept(monkeypatch):
    """Of five checks the second has the least error."""
    errors = iter([1.0, 0.9, 0.5, 0.7, 0.6, 0.8, 0.5])
    monkeypatch.setattr(autoround, "_sum", lambda windows, ranks: next(errors))
    monkeypatch.setattr(autoround, "NUM_CHECKS", 5)
    step, at_steps = autoround._TunedWeight.step, {}

    def noted(weight, *rates):
        step(weight, *rates)
        at_steps.setdefault(weight.layer, []).append(weight.codes())

    monkeypatch.setattr(autoround._TunedWeight, "step", noted)
    tuned = Case(SPECS["uint4"]).tune(lr=0.05)
    for layer, codes in at_steps.items():
        assert len(codes) == 60 and torch.equal(tuned[layer].codes, codes[23].codes)
        assert torch.equal(tuned[layer].params.scale, codes[23].params.scale)
        assert not torch.equal(tuned[layer].codes, codes[-1].codes)


@pytest.mark.parametrize("name", SPECS)
def test_it_starts_from_codes_that_are_not_the_nearest(name):
    """GPTAQ moves weights to other codes, and tuning begins exactly there."""
    case = Case(SPECS[name])
    for layer, module in case.modules.items():
        other = module.weight + 0.05 * torch.randn(layer.shape)
        moved = quantize_weight(other, case.start[layer].params, SPECS[name])
        assert (moved.codes != case.start[layer].codes).float().mean() > 0.1
        weight = autoround._TunedWeight(layer, module, moved)
        assert torch.equal(weight.codes().dequantize(), moved.dequantize())  # the code of 0 may become that of -0
        assert torch.allclose(weight.value(), moved.dequantize(), atol=1e-6)


def test_one_window_is_refused():
    case = Case(SPECS["uint4"])
    case.windows, case.targets = case.windows[:1], case.targets[:1]
    with pytest.raises(CalibrationError, match="there is only one"):
        case.tune()


def test_the_spacing_of_a_grid():
    start = round_to_nearest(torch.eye(4).repeat(1, 8), SPECS["mxfp4"])  # values 0, 0.5, 1, 1.5, 2, 3, 4, 6
    x = torch.tensor([0.2, 0.5, 1.2, 2.5, 5.0, 7.0, -0.7, -5.0, -9.0])
    assert _spacing(x, start).tolist() == [0.5, 0.5, 0.5, 1.0, 2.0, 2.0, 0.5, 2.0, 2.0]
