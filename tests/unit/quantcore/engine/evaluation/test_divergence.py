"""The distance by position: every scored token counts once, in the range of its position."""

from __future__ import annotations

import pytest
import torch

from quantcore.engine.evaluation.divergence import Measured, summarize_both
from quantcore.engine.evaluation.text import EvaluationText


def summarized(kl_NP: torch.Tensor, first_N: list[int]):
    num, length = kl_NP.shape
    text = EvaluationText(torch.zeros(num, length + 1, dtype=torch.long), torch.tensor(first_N), 1, 1)
    zeros_NP = torch.zeros_like(kl_NP)
    distances = torch.stack([kl_NP, (kl_NP < 1).double(), zeros_NP, zeros_NP], -1)
    return summarize_both(Measured(zeros_NP, zeros_NP, distances), text)


def test_the_ranges_cover_all_positions_and_their_means_are_those_of_their_tokens():
    kl_NP = torch.arange(1, 101, dtype=torch.float64).repeat(2, 1)  # the divergence is the position
    quality = summarized(kl_NP, [1, 1])
    assert [(each.first, each.last, each.num_tokens) for each in quality.by_position] == [
        (1, 16, 32), (17, 64, 96), (65, 100, 72)
    ]  # fmt: skip
    assert [each.kl_mean.value for each in quality.by_position] == [8.5, 40.5, 82.5]
    sums = sum((each.kl_mean.value or 0) * each.num_tokens for each in quality.by_position)
    assert sums / quality.num_tokens == pytest.approx(quality.divergence.kl_mean.value)


def test_a_range_ends_at_the_last_position_and_tokens_that_are_not_scored_do_not_count():
    quality = summarized(torch.cat([torch.zeros(2, 10), torch.full((2, 6), 2.0)], 1).double(), [11, 11])
    [only] = quality.by_position
    assert (only.first, only.last, only.num_tokens) == (1, 16, 12)
    assert only.kl_mean.value == 2.0 and only.top1_agreement.value == 0.0
    later = summarized(torch.ones(2, 40).double(), [17, 20])
    assert [(each.first, each.num_tokens) for each in later.by_position] == [(17, 24 + 21)]  # none before position 17
