"""Edges of blocks of many architectures: exactly those that their code has, in every dtype; folds leave the logits."""

import pytest
import torch

from quantcore.engine.transforms.mappings.discovery import EdgeFinder, find_edges, prove
from tests.support.decoder_blocks import blocks_of, logits_of, model_in_memory, run_of
from tests.support.known_edges import KNOWN, REJECTED, as_known, model_and_block

QUICK = ("llama", "gemma2", "mixtral", "phi3", "deepseek_v3")
NAMES = sorted({model_and_block(case)[0] for case in KNOWN})


def slow_unless_quick(cases):
    """Some in every run of the tests, the others only in the long one."""
    return [case if model_and_block(case)[0] in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", slow_unless_quick(KNOWN), ids=str)
def test_the_edges_are_those_of_the_code(case, dtype):
    name, index = model_and_block(case)
    run = run_of(model_in_memory(name, dtype), index)
    before = {name: tensor.clone() for name, tensor in run.block.state_dict().items()}
    found = find_edges(run.block, run)
    assert as_known(found) == set(KNOWN[case])
    assert len(found.edges) == len(KNOWN[case])
    rejected = REJECTED.get(case, [])
    assert [one.producer for one in found.rejected] == [producer for producer, _, _ in rejected]
    for one, (_, consumer, reason) in zip(found.rejected, rejected, strict=True):
        assert consumer in one.consumers
        assert reason in one.reason
    assert prove(run.block, run, found.edges) <= (1e-6 if dtype == torch.float32 else 1e-4)
    for name, tensor in run.block.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("name", slow_unless_quick(NAMES))
def test_folding_leaves_the_logits(name):
    """Random real scales through every edge of every block, in float32."""
    model = model_in_memory(name)
    before = logits_of(model)
    finder = EdgeFinder()
    generator = torch.Generator().manual_seed(2)
    for index, block in enumerate(blocks_of(model)):
        for edge in finder.find(block, run_of(model, index)).edges:
            edge.fold(block, 0.3 + 2.7 * torch.rand(edge.num_scales, generator=generator))
    after = logits_of(model)
    assert not torch.equal(after, before)
    assert (after - before).norm() / before.norm() < 1e-5
