"""Experts that see few tokens learn from tokens of the others: which ones, how many, and that nothing else changes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from quantcore.config import presets
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.blockwise.running_block import CalibrationStreams, RunningBlock
from quantcore.engine.calibration.collector import StatsCollector
from quantcore.engine.calibration.expert_token_topup import EXPERT_SHARE, MIN_TOKENS
from quantcore.engine.calibration.ranges import collect_ranges
from quantcore.engine.calibration.reduction import Span
from quantcore.engine.calibration.stats import Needs
from quantcore.engine.model.experts import ProjectionNames, SplitExperts
from quantcore.engine.runtime.arguments import Arguments
from quantcore.engine.runtime.hidden import Hidden

HIDDEN, INNER, EXPERTS, T, WINDOWS = 6, 5, 4, 40, 4
NUM_OWN = 3  # tokens of expert 2


class Mixture(nn.Module):
    """Sends the first tokens of the first window to expert 2, and all others to expert 0."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        fused = nn.Module()
        fused.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN))
        fused.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))
        flags = SimpleNamespace(
            has_gate=True, is_concatenated=True, has_bias=False, is_transposed=False, has_post_expert_norm=False,
            _apply_gate=lambda both: nn.functional.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],
        )  # fmt: skip
        for name, value in vars(flags).items():
            setattr(fused, name, value)
        self.experts = SplitExperts(fused, ProjectionNames())
        self.keeps_windows = False  # as DBRX: the experts get states [N, T, H]

    def forward(self, x):
        flat = x.flatten(0, -2)
        index_TK = torch.zeros(len(flat), 1, dtype=torch.long)
        index_TK[:NUM_OWN] = 2 * (x[0, 0, 0] == 7)  # the first window begins with a 7
        states = x if self.keeps_windows else flat
        return x + self.experts(states, index_TK, torch.full((len(flat), 1), 0.5)).view_as(x)


@pytest.fixture
def windows():
    torch.manual_seed(1)
    states = [torch.randn(1, T, HIDDEN) for _ in range(WINDOWS)]
    states[0][0, 0, 0] = 7
    return states


def hidden_of(states):
    hidden = Hidden([state.clone() for state in states])
    for _ in states:
        hidden.arguments.add([Arguments()])
    return hidden


def collected(block, states, num_windows=WINDOWS):
    modules = {name: part for name, part in block.named_modules() if isinstance(part, nn.Linear)}
    span = Span(num_windows)
    collector = StatsCollector(modules, Needs(gram=True, sample=1000), span)
    hidden = hidden_of(states)
    with collector.watching():
        RunningBlock(block, 0, CalibrationStreams(hidden, span)).run(collector=collector, advance=True)
    return collector.stats(), hidden.states


def test_an_expert_without_tokens_gets_some_of_all_windows(windows):
    block = Mixture()
    stats, _ = collected(block, windows)
    assert EXPERT_SHARE * T * WINDOWS < MIN_TOKENS  # so that this is the number wanted
    tokens = torch.cat(windows, dim=1)[0]
    for index in (1, 3):
        gate, up, down = (stats[f"experts.{index}.{name}_proj"] for name in ("gate", "up", "down"))
        assert gate is up and gate.num_tokens == gate.num_lent == down.num_tokens == MIN_TOKENS
        lent = gate.sample_TI
        places = [(tokens == row).all(1).nonzero().item() for row in lent]
        assert places == sorted(set(places))
        assert [place // T for place in places] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
        assert torch.allclose(gate.gram_II, (lent.T @ lent) / MIN_TOKENS, atol=1e-5)
        expert = block.experts.get_submodule(str(index))
        inner = nn.functional.silu(lent @ expert["gate_proj"].weight.T) * (lent @ expert["up_proj"].weight.T)
        assert torch.allclose(down.gram_II, (inner.T @ inner) / MIN_TOKENS, rtol=1e-4, atol=1e-4)


def test_an_expert_with_few_tokens_keeps_them_and_gets_those_it_lacks(windows):
    stats, _ = collected(Mixture(), windows)
    some = stats["experts.2.gate_proj"]
    assert (some.num_tokens, some.num_lent) == (MIN_TOKENS, MIN_TOKENS - NUM_OWN)
    own, lent = windows[0][0, :NUM_OWN], some.sample_TI[NUM_OWN:]
    assert torch.equal(some.sample_TI[:NUM_OWN], own)
    assert torch.allclose(some.gram_II, (own.T @ own + lent.T @ lent) / MIN_TOKENS, atol=1e-5)


def test_an_expert_with_enough_tokens_and_the_block_itself_are_left_alone(windows):
    block = Mixture()
    stats, after = collected(block, windows)
    assert (
        stats["experts.0.gate_proj"].num_tokens == T * WINDOWS - NUM_OWN and stats["experts.0.gate_proj"].num_lent == 0
    )
    with torch.no_grad():
        assert all(torch.equal(block(before), state) for before, state in zip(windows, after, strict=True))


def test_batches_lend_the_same_tokens(windows):
    one_by_one, _ = collected(Mixture(), windows)
    in_batches, _ = collected(Mixture(), [torch.cat(windows[:2]), torch.cat(windows[2:])])
    for name in ("experts.1.up_proj", "experts.3.down_proj"):
        assert torch.allclose(one_by_one[name].gram_II, in_batches[name].gram_II, atol=1e-5)


def test_experts_that_get_whole_windows_lend_the_same_tokens(windows, monkeypatch):
    monkeypatch.setattr(
        "quantcore.engine.calibration.expert_token_topup.EXPERT_SHARE", 0.25
    )  # a share of all tokens is wanted
    block = Mixture()
    block.keeps_windows = True
    expected, _ = collected(Mixture(), windows)
    got, after = collected(block, windows)
    for name in ("experts.1.up_proj", "experts.2.gate_proj"):
        assert torch.equal(got[name].gram_II, expected[name].gram_II) and got[name].num_lent == expected[name].num_lent
    assert got["experts.1.up_proj"].num_lent == T * WINDOWS // 4
    assert all(state.shape == (1, T, HIDDEN) for state in after)


def test_ranges_do_not_see_what_is_lent(windows):
    """An expert that saw too few takes the range of all its siblings, which is wider than that of some tokens."""
    block, fp8 = Mixture(), presets.PRESETS["fp8"].layer_config
    layers = {
        LayerPlan(f"mlp.experts.{index}.up_proj", 0, (INNER, HIDDEN), fp8): expert["up_proj"]
        for index in range(EXPERTS)
        if (expert := block.experts.get_submodule(str(index)))
    }
    with collect_ranges(layers, block) as watched:
        RunningBlock(block, 0, CalibrationStreams(hidden_of(windows), Span(WINDOWS))).run()
    assert [seen.inputs.num_values // HIDDEN for seen in watched.values()] == [T * WINDOWS - NUM_OWN, 0, NUM_OWN, 0]
