"""Statistics of inputs: against plain float64 sums, whatever the batches; one object for modules that read the same."""

import queue
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import nn

from quantcore.engine.calibration.collector import StatsCollector, token_weights
from quantcore.engine.calibration.reduction import Span, Sums, Tree, root_at
from quantcore.engine.calibration.stats import Needs
from quantcore.engine.model.experts import ProjectionNames, SplitExperts
from quantcore.engine.runtime.ranks import Ranks
from tests.support.accelerator import on_accelerator
from tests.support.params import with_rare

ALL = Needs(gram=True, sample=24, shift=True)


class Block(nn.Module):
    """q and k read the same tensor, o reads another, gate reads the first one again, after o."""

    def __init__(self, width=10):
        super().__init__()
        self.q, self.k, self.o, self.gate = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        return self.o(self.q(x) * self.k(x)) + self.gate(x)


def collected(block, batches, needs=ALL, references=None):
    modules = dict(block.named_children())
    collector = StatsCollector(modules, needs, Span(len(batches)))
    with torch.no_grad(), collector.watching():
        for number, batch in enumerate(batches):
            if references is not None:
                with collector.reference():
                    block(references[number])
            block(batch)
    assert not any(module._forward_pre_hooks for module in modules.values())
    return collector.stats()


def test_sums_are_those_of_float64():
    torch.manual_seed(0)
    windows = [torch.randn(1, 16, 10) * torch.arange(1, 11) for _ in range(6)]
    stats = collected(Block(), windows)["q"]
    x = torch.cat(windows, dim=1)[0].double()
    assert stats.num_tokens == 96
    assert torch.allclose(stats.gram_II.double(), x.T @ x / 96, rtol=1e-5, atol=1e-5)
    assert torch.equal(stats.gram_II, stats.gram_II.T)
    assert torch.equal(stats.largest_I, x.abs().amax(0).float())
    assert torch.allclose(stats.mean_I, x.mean(0).float()) and torch.allclose(stats.mean_abs_I, x.abs().mean(0).float())
    assert torch.equal(stats.hessian_diagonal_I, stats.gram_II.diagonal())


def test_tokens_count_as_their_hidden_states_are_long():
    """In the sums of products; the others are those of the inputs as they are."""
    torch.manual_seed(4)
    block, windows, others = Block(), *(list(torch.randn(3, 1, 16, 10)) for _ in range(2))
    states = [torch.randn(1, 16, 7) * torch.arange(1, 17).view(16, 1) ** 2 for _ in windows]
    collector = StatsCollector(dict(block.named_children()), ALL, Span(3))
    with torch.no_grad(), collector.watching():
        for state, window, other in zip(states, windows, others, strict=True):
            collector.begin(state)
            with collector.reference():
                block(other)
            block(window)
    stats = collector.stats()["q"]
    x, y, h = torch.cat(windows).double(), torch.cat(others).double(), torch.cat(states).double()
    weight = h.norm(dim=-1) / h.norm(dim=-1).mean(1, keepdim=True)
    assert weight.max() > 2 and torch.allclose(weight.mean(1), torch.ones(3).double())
    gram = torch.einsum("nt,nti,ntj->ij", weight, x, x) / 48
    shift = torch.einsum("nt,nti,ntj->ij", weight, y - x, x) / 48
    assert torch.allclose(stats.gram_II.double(), gram, rtol=1e-5, atol=1e-6)
    assert torch.allclose(stats.shift_II.double(), shift, rtol=1e-5, atol=1e-6)
    assert torch.allclose(stats.mean_I.double(), x.mean((0, 1)), atol=1e-6)
    assert stats.num_tokens == 48 and torch.equal(stats.largest_I, x.abs().amax((0, 1)).float())


def test_some_of_the_tokens_count_alike_and_so_do_states_of_zero():
    block, window = Block(), torch.randn(1, 16, 10)
    for state, given in ((torch.randn(1, 17, 7), window), (torch.zeros(1, 16, 7), window[0])):
        collector = StatsCollector(dict(block.named_children()), ALL, Span(1))
        with torch.no_grad(), collector.watching():
            collector.begin(state)
            block(given)
        plain = collected(block, [given])["q"].gram_II
        assert torch.equal(collector.stats()["q"].gram_II, plain)
    assert torch.isfinite(token_weights(torch.zeros(1, 16, 7))).all()


@pytest.mark.parametrize("width", [1, 3, 10, 64])  # fewer inputs than panels, widths that panels do not divide
def test_a_gram_matrix_of_any_width(width):
    x = torch.randn(1, 40, width)
    gram = collected(nn.Sequential(nn.Linear(width, 2)), [x], Needs(gram=True, float64=True))["0"].gram_II
    assert gram.dtype == torch.float64
    assert torch.allclose(gram, x[0].double().T @ x[0].double() / 40, rtol=1e-12)


def test_modules_that_read_one_tensor_share_one_object():
    stats = collected(Block(), [torch.randn(1, 8, 10)] * 2)
    assert stats["q"] is stats["k"] is stats["gate"]
    assert stats["o"] is not stats["q"]
    assert list(stats) == ["q", "k", "o", "gate"]  # the order in which they run


def test_how_the_text_is_cut_into_batches_changes_no_bit():
    torch.manual_seed(1)
    block, windows = Block(), [torch.randn(1, 16, 10) for _ in range(8)]
    one_by_one, together = collected(block, windows), collected(block, [torch.cat(windows[:5]), torch.cat(windows[5:])])
    for name in ("gram_II", "largest_I", "mean_I", "mean_abs_I"):
        assert torch.equal(getattr(one_by_one["q"], name), getattr(together["q"], name)), name


def test_samples_are_tokens_spread_over_the_text():
    windows = [torch.full((1, 16, 10), float(number)) for number in range(6)]
    sample = collected(Block(), windows)["q"].sample_TI
    assert sample[:, 0].tolist() == [float(number) for number in range(6) for _ in range(4)]
    assert collected(Block(), windows, Needs())["q"].sample_TI is None
    places = [torch.arange(16.0).view(1, 16, 1).expand(1, 16, 10) for _ in range(6)]
    seen = collected(Block(), places)["q"].sample_TI[:, 0].tolist()
    assert seen[:4] == [0, 4, 8, 12] and set(seen) > {0, 1, 2}  # the first token of a text is one of them


def test_the_shift_is_what_the_quantized_layers_before_have_changed():
    torch.manual_seed(2)
    windows = [torch.randn(1, 16, 10) for _ in range(4)]
    floats = [window + 0.1 * torch.randn_like(window) for window in windows]
    x, y = (torch.cat(states, dim=1)[0].double() for states in (windows, floats))
    shift = collected(Block(), windows, references=floats)["q"].shift_II
    assert torch.allclose(shift.double(), (y - x).T @ x / 64, rtol=1e-4, atol=1e-6)
    other_tokens = [states[:, :7] for states in floats]  # an expert that the two models give other tokens
    assert collected(Block(), windows, references=other_tokens)["q"].shift_II is None


def test_dividing_the_input_divides_all_that_is_known_of_it():
    torch.manual_seed(3)
    windows, scale = [torch.randn(1, 16, 10) for _ in range(4)], 2.0 ** torch.arange(-4, 6)
    floats = [window + 0.1 for window in windows]
    block = Block()
    before = collected(block, windows, references=floats)["q"].divided(scale)
    after = collected(block, [window / scale for window in windows], references=[window / scale for window in floats])[
        "q"
    ]
    for name in ("gram_II", "largest_I", "mean_I", "mean_abs_I", "sample_TI", "shift_II"):
        assert torch.allclose(getattr(before, name), getattr(after, name), rtol=1e-5), name


def test_inputs_of_no_token_are_no_input():
    assert collected(Block(), [torch.randn(1, 0, 10)]) == {}


@pytest.mark.parametrize("num_windows", [3, 40, 70, 300])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 11])
def test_ranks_share_the_windows_of_a_text(num_windows, size):
    spans = [Span(num_windows, Ranks(rank, size)) for rank in range(size)]
    assert [window for span in spans for window in span.windows] == list(range(num_windows))
    for span in spans:
        assert all(span.chunk_of(window) in span.chunks for window in span.windows)
        assert all(span.chunk_of(span.first_window(chunk)) == chunk for chunk in span.chunks)
    assert spans[0].num_chunks == {3: 1, 40: 2, 70: 4, 300: 8}[num_windows]


def test_sums_of_chunks_are_added_in_one_order():
    """However many nodes of the tree come ready made, as they do from other ranks."""
    torch.manual_seed(6)
    block, windows = Block(), [100 * torch.randn(1, 8, 10) for _ in range(300)]
    whole = collector_of(block, windows, Span(300)).stats()
    assert len(windows) / 8 > 16
    trees = [collector_of(block, windows, Span(300, Ranks(rank, 3)))._nodes() for rank in range(3)]
    joined = Tree()
    for node in (node for nodes in trees for node in nodes):
        joined.add(node)
    [root] = joined.nodes
    assert root.level == 3 and torch.equal(root.sums["q"].stats().gram_II, whole["q"].gram_II)
    assert torch.equal(root.sums["o"].stats().sample_TI, whole["o"].sample_TI)
    plain = Sums(10, ALL, torch.device("cpu"))
    for window in windows:
        plain.add(window[0], None, None, 1, 300)
    gram_II = plain.stats().gram_II
    assert not torch.equal(gram_II, whole["q"].gram_II), "the order makes a difference here"
    assert torch.allclose(gram_II, whole["q"].gram_II, atol=1)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_gpu_multiplies_inputs_of_bfloat16_as_such(is_weighted):
    """Without weights the sums are exact but for their order; weighted or subtracted inputs are rounded once more."""
    torch.manual_seed(8)
    x_TI, reference_TI = torch.randn(2, 400, 24).bfloat16()
    weight_T = 3 * torch.rand(400) if is_weighted else None

    def work(counts):
        there = [None if x is None else x.to("sim") for x in (x_TI, reference_TI, weight_T)]
        sums = Sums(24, ALL, torch.device("sim", 0))
        sums.add(*there, 0, 1)
        stats = sums.stats()
        return stats.gram_II.cpu(), stats.shift_II.cpu(), counts.launches["aten.addmm.dtype_out"]

    gram_II, shift_II, num_products = on_accelerator(work)
    assert num_products == 4 + 1 + 1, "the panels of the Gram matrix, the shift, and the trial"
    x, moved, weight = x_TI.double(), reference_TI.double() - x_TI.double(), 1.0
    if weight_T is not None:
        weight = weight_T.double().unsqueeze(1)
    checks = [
        (gram_II, (weight * x).T @ x / 400, 1e-3 if is_weighted else 1e-6),
        (shift_II, moved.T @ (weight * x) / 400, 1e-3),
    ]
    for found, expected, tolerance in checks:
        assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()
    assert torch.linalg.eigvalsh(gram_II.double()).min() > 0


@dataclass(frozen=True)
class Threads(Ranks):
    """Ranks that are threads of one process; ``moved`` counts what went from one to another."""

    ways: Any = None
    moved: Any = None

    def move(self, things, key, source, target):
        if source == target:
            return
        if self.rank == source:
            self.moved.append((source, target))
            self.ways[source, target].put(things.pop(key))
        elif self.rank == target:
            things[key] = self.ways[source, target].get(timeout=60)


@pytest.mark.parametrize("num_windows", [3, 300])
@pytest.mark.parametrize("size", with_rare([1, 2, 3, 5, 8, 11], [8, 11]))
def test_the_sums_of_all_ranks_meet_at_any_of_them(num_windows, size):
    """Bit for bit those of one rank; the owner gives nothing away."""
    torch.manual_seed(7)
    block, windows = Block(), [100 * torch.randn(1, 8, 10) for _ in range(num_windows)]
    whole = collector_of(block, windows, Span(num_windows)).stats()
    ways, moved = defaultdict(queue.Queue), []
    spans = [Span(num_windows, Threads(rank, size, ways, moved)) for rank in range(size)]
    for owner in {0, 1 % size, size // 2, size - 1}:
        moved.clear()
        nodes = [[node.taken(["q", "o"]) for node in collector_of(block, windows, span)._nodes()] for span in spans]
        with ThreadPoolExecutor(size) as threads:
            roots = list(threads.map(root_at, repeat(owner), nodes, spans))
        assert [root is not None for root in roots] == [rank == owner for rank in range(size)]
        for name in ("q", "o"):
            stats = roots[owner].sums[name].stats(owner)
            assert stats.owner == owner and stats.num_tokens == whole[name].num_tokens
            for part in ("gram_II", "hessian_diagonal_I", "largest_I", "mean_I", "mean_abs_I", "sample_TI"):
                assert torch.equal(getattr(stats, part), getattr(whole[name], part)), part
        with_chunks = [rank for rank in range(size) if spans[rank].chunks]
        assert all(target != source != owner for source, target in moved)
        assert len(moved) >= len(set(with_chunks) - {owner})
        if size <= spans[0].num_chunks and num_windows == 300 and size in (2, 8):
            assert len(moved) == size - 1


def collector_of(block, windows, span):
    """Having seen its windows of ``span``."""
    collector = StatsCollector(dict(block.named_children()), ALL, span)
    with torch.no_grad(), collector.watching():
        for window in span.windows:
            collector.begin(torch.ones_like(windows[window]))
            block(windows[window])
    return collector


class Routed(nn.Module):
    """Sends the tokens whose first feature is positive to expert 0, the others to expert 1."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        fused = nn.Module()
        fused.gate_up_proj = nn.Parameter(torch.randn(2, 8, 6))
        fused.down_proj = nn.Parameter(torch.randn(2, 6, 4))
        fused.act_fn = nn.SiLU()
        self.experts = SplitExperts(fused, ProjectionNames())

    def forward(self, x_TH):
        return self.experts(x_TH, (x_TH[:, :1] <= 0).long(), x_TH.new_ones(len(x_TH), 1))


def test_the_tokens_of_an_expert_are_compared_with_themselves():
    """Routers send other tokens to it behind quantized layers, and sometimes as many: those are no pairs."""
    block = Routed()
    floats = torch.randn(6, 6)
    floats[:, 0] = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    x_TH = floats + 0.1 * torch.randn(6, 6)
    x_TH[:, 0] = torch.tensor([-1.0, 1.0, 1.0, 1.0, -1.0, -1.0])  # tokens 0 and 3 change places
    modules = {name: part for name, part in block.named_modules() if isinstance(part, nn.Linear)}
    collector = StatsCollector(modules, ALL, Span(1))
    with torch.no_grad(), collector.watching():
        collector.begin(x_TH[None])
        with collector.reference():
            block(floats)
        block(x_TH)
    stats = collector.stats()
    for index, same, alone in ((0, [1, 2], 3), (1, [4, 5], 0)):
        seen = stats[f"experts.{index}.gate_proj"]
        shift_II = (floats[same] - x_TH[same]).T @ x_TH[same] / 3  # nothing for the one without a counterpart
        torch.testing.assert_close(seen.shift_II.float(), shift_II, rtol=1e-4, atol=1e-5)
        assert seen.num_tokens == 3 and seen.largest_I[0] == x_TH[[*same, alone], 0].abs().max()
