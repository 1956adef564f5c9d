"""Sums over parts of a vocabulary give what all logits give: the reference is torch, in float64."""

import pytest
import torch
from torch.nn import functional

from quantcore.engine.evaluation.token_sums import sums_of_tokens
from quantcore.plan.workload import CACHED_TILE_BYTES

VOCAB, ROWS = 1000, 7


def logits(seed, spread=5.0):
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread + 3


def summed(outputs, targets_T, size):
    sums = None
    for first in range(0, VOCAB, size):
        part = sums_of_tokens([each[:, first : first + size] for each in outputs], targets_T, first)
        sums = part if sums is None else sums.joined(part)
    return sums


def expected_of(original, other, targets_T):
    ours, theirs = original.double(), other.double()
    log_p, log_q = functional.log_softmax(ours, -1), functional.log_softmax(theirs, -1)
    losses = [-logs.gather(1, targets_T[:, None])[:, 0] for logs in (log_p, log_q)]
    centred, centred_other = (each - each.mean(-1, keepdim=True) for each in (ours, theirs))
    distances = [
        (log_p.exp() * (log_p - log_q)).sum(-1), (ours.argmax(-1) == theirs.argmax(-1)).double(),
        (centred_other - centred).square().sum(-1), centred.square().sum(-1),
    ]  # fmt: skip
    return losses, torch.stack(distances, -1)


@pytest.mark.parametrize("size", [VOCAB, 256, 1], ids=["whole", "parts, the last one smaller", "single tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sums_of_parts_are_those_of_the_whole_vocabulary(size, dtype):
    original = logits(0).to(dtype)
    other = (original + logits(1, 0.3)).to(dtype)
    targets_T = torch.tensor([0, 255, 256, 500, 767, 768, VOCAB - 1])  # at the edges of parts, too
    losses, distances_T4 = expected_of(original, other, targets_T)
    sums = summed([original, other], targets_T, size)
    for got, expected in zip(sums.losses(), losses, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)  # sums within a part are float32
    torch.testing.assert_close(sums.distances(), distances_T4, rtol=1e-5, atol=1e-6)
    [alone] = summed([other], targets_T, size).losses()
    torch.testing.assert_close(alone.double(), losses[1], rtol=1e-6, atol=1e-6)


def test_rows_are_summed_in_tiles_and_nothing_is_changed():
    num_rows = 3 * CACHED_TILE_BYTES // (4 * VOCAB) // 2 + 1  # one tile and a half
    many = logits(2).repeat(-(-num_rows // ROWS), 1)
    before = many.clone()
    targets_T = torch.arange(len(many)) % VOCAB
    sums = sums_of_tokens([many, many], targets_T, 0)
    torch.testing.assert_close(
        sums.losses()[0].double(), functional.cross_entropy(many.double(), targets_T, reduction="none")
    )
    assert torch.equal(many, before)


def test_a_model_is_at_no_distance_from_itself():
    sums = summed([logits(3), logits(3)], torch.zeros(ROWS, dtype=torch.long), 300)
    kl, agrees, lost, _ = sums.distances().unbind(-1)
    assert (kl == 0).all() and (agrees == 1).all() and (lost == 0).all()


def test_of_equal_logits_the_first_is_the_choice_in_whatever_part_it_is():
    flat = torch.zeros(1, VOCAB)
    later = flat.clone()
    later[0, 700] = 1e-3
    target = torch.zeros(1, dtype=torch.long)
    assert summed([flat, flat], target, 300).models[0].choice.item() == 0
    assert summed([flat, later], target, 300).distances()[0, 1] == 0


def test_numbers_that_are_not_finite_are_not_hidden():
    broken = logits(4)
    broken[2, 600] = float("nan")
    [losses_T] = summed([broken], torch.zeros(ROWS, dtype=torch.long), 300).losses()
    assert losses_T.isnan().tolist() == [row == 2 for row in range(ROWS)]
