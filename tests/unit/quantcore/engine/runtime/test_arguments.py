"""What blocks are given beside the hidden states is kept for every window, and stored once where windows agree."""

from collections import UserDict

import torch
from torch import nn

from quantcore.engine.runtime.arguments import Arguments, WindowArguments
from quantcore.engine.runtime.hidden import Hidden

MASK = torch.ones(1, 1, 4, 4)


def recorded(window, num_blocks=3):
    """As a model gives them: one mask and one mapping for all blocks, token ids, and a part of a wider tensor each."""
    mask, shared, ids = MASK.clone(), UserDict(), torch.arange(4)[None] + window
    wide = torch.randn(1, 4, num_blocks, 8, generator=torch.Generator().manual_seed(window))
    rope = (torch.ones(4), torch.zeros(4))
    return [
        Arguments((wide[:, :, i],), {"mask": mask, "ids": ids, "shared": shared, "rope": rope, "past": None})
        for i in range(num_blocks)
    ]


def test_every_window_has_its_own_and_equal_values_are_one():
    kept = WindowArguments()
    given = [recorded(window) for window in range(3)]
    for one in given:
        kept.add(one)
    for window in range(3):
        for index in range(3):
            found = kept.of(index, window)
            assert torch.equal(found.positional[0], given[window][index].positional[0])
            assert torch.equal(found.named["ids"], torch.arange(4)[None] + window)
            assert found.named["mask"] is kept.of(0, 0).named["mask"]
            assert found.named["rope"] is kept.of(0, 0).named["rope"] and found.named["past"] is None
    part = kept.of(1, 2).positional[0]
    assert part.untyped_storage().nbytes() == part.nbytes


def test_windows_that_agree_share_all_of_it():
    kept = WindowArguments()
    for _ in range(2):
        kept.add([Arguments((), {"mask": MASK.clone(), "rope": (torch.ones(4), torch.zeros(4)), "layer": "full"})] * 2)
    assert kept.of(1, 1) is kept.of(1, 0)


def test_a_mapping_is_shared_by_the_blocks_of_one_window_alone():
    kept = WindowArguments()
    for window in range(2):
        kept.add(recorded(window))
    other, only = kept.copy(), kept.only(1)
    assert not kept.pass_values_on
    kept.of(0, 1).named["shared"]["keys"] = MASK
    assert kept.of(2, 1).named["shared"]["keys"] is MASK and not kept.of(2, 0).named["shared"]
    assert kept.pass_values_on and not other.pass_values_on and not only.pass_values_on
    assert not other.of(2, 1).named["shared"] and not only.of(2, 0).named["shared"]
    assert other.of(0, 1).named["shared"] is other.of(2, 1).named["shared"]


def test_a_block_is_skipped_in_the_windows_that_do_not_reach_it():
    kept = WindowArguments()
    for is_skipped in (True, False, True):
        kept.add([Arguments(is_skipped=is_skipped)])
    assert [kept.of(0, window).is_skipped for window in range(3)] == [True, False, True]
    hidden = Hidden([torch.ones(1, 4, 8)] * 3, kept)
    hidden.advance(nn.Linear(8, 8), 0)
    assert [torch.equal(state, torch.ones(1, 4, 8)) for state in hidden.states] == [True, False, True]
