"""Standard errors over windows, of one text and of several that each give a fixed number of windows."""

import math

import pytest
import torch

from quantcore.engine.evaluation.perplexity import mean_and_stderr, ratio_and_stderr
from quantcore.report.paired import strata
from quantcore.report.quality import Measure

KINDS_N = torch.tensor([0] * 5 + [1] * 6 + [2] * 7)
MEANS = torch.tensor([0.05, 0.1, 0.2])
SPREAD = 0.02


DIVERGENCES = {
    "prose": [0.082, 0.077, 0.058, 0.075, 0.085, 0.072, 0.09, 0.116, 0.083],
    "dialogue": [0.211, 0.197, 0.236, 0.147, 0.112, 0.11, 0.109, 0.1, 0.116, 0.146],
    "code": [
        0.065, 0.077, 0.072, 0.075, 0.072, 0.084, 0.056, 0.068, 0.085, 0.058, 0.068, 0.084, 0.059, 0.068,
        0.075, 0.085, 0.062, 0.055, 0.064,
    ],
    "languages": [0.178, 0.199, 0.168, 0.148, 0.184, 0.213, 0.154, 0.121, 0.192, 0.191, 0.215, 0.182],
}  # fmt: skip
"""The mean KL divergence of 50 windows of 512 tokens of the built-in text, by kind: SmolLM2-135M in `w4a16`."""


def drawn(generator: torch.Generator) -> torch.Tensor:
    """The divergence of 18 windows of 10 tokens, whose mean differs by the kind of text: [18, 10]."""
    means_N1 = MEANS[KINDS_N, None] + SPREAD * torch.randn(len(KINDS_N), 1, generator=generator)
    return (means_N1 + 0.01 * torch.randn(len(KINDS_N), 10, generator=generator)).double()


def test_a_difference_between_texts_is_no_error() -> None:
    """The error is what the mean of repeated draws has; as if there was one text it is three times as large."""
    generator = torch.Generator().manual_seed(1)
    all_NP = torch.ones(18, 10, dtype=torch.bool)
    found = [mean_and_stderr(values, all_NP, KINDS_N) for values in (drawn(generator) for _ in range(400))]
    true = math.sqrt(SPREAD**2 + 0.01**2 / 10) / math.sqrt(18)
    means, errors = torch.tensor(found).T
    assert means.std().item() == pytest.approx(true, rel=0.1)
    assert errors.square().mean().sqrt().item() == pytest.approx(true, rel=0.1)
    plain = mean_and_stderr(drawn(generator), all_NP)[1]
    assert plain is not None and plain > 2.5 * true


def test_the_error_of_a_ratio_is_that_of_a_stratified_jackknife() -> None:
    """Each window is left out in turn, and the others of its text count for it."""
    generator = torch.Generator().manual_seed(2)
    bases_N = 100 + 10 * torch.rand(18, generator=generator, dtype=torch.double)
    sums_N = bases_N * drawn(generator).mean(1)
    variance = 0.0
    for kind in range(3):
        own = torch.where(kind == KINDS_N)[0]
        ratios = []
        for left_out in own:
            weights_N = torch.ones(18, dtype=torch.double)
            weights_N[own] = len(own) / (len(own) - 1)
            weights_N[left_out] = 0
            ratios.append((weights_N @ sums_N / (weights_N @ bases_N)).item())
        centred = torch.tensor(ratios, dtype=torch.double) - sum(ratios) / len(ratios)
        variance += (len(own) - 1) / len(own) * centred.square().sum().item()
    ratio, error = ratio_and_stderr(sums_N, bases_N, KINDS_N)
    assert ratio == pytest.approx((sums_N.sum() / bases_N.sum()).item(), rel=1e-15)
    assert error == pytest.approx(math.sqrt(variance), rel=0.01)


@pytest.mark.parametrize(
    ("numbers", "sizes"),
    [
        ([0] * 3, [3]),
        ([0] * 5 + [1] * 6, [5, 6]),
        ([0] * 2 + [1] * 2 + [2] * 5 + [3] * 3, [5, 7]),
        ([0] + [1] * 5 + [2] * 6, [6, 6]),
        ([0, 1, 2], [3]),
        ([0], [1]),
    ],
)
def test_texts_with_few_windows_are_joined(numbers: list[int], sizes: list[int]) -> None:
    parts = strata(numbers, len(numbers))
    assert sorted(len(part) for part in parts) == sizes
    assert sorted(window for part in parts for window in part) == list(range(len(numbers)))


def test_one_text_needs_no_numbers() -> None:
    values_NT = drawn(torch.Generator().manual_seed(3))
    all_NP = torch.ones(18, 10, dtype=torch.bool)
    expected = mean_and_stderr(values_NT, all_NP)
    assert mean_and_stderr(values_NT, all_NP, torch.zeros(18, dtype=torch.long)) == expected
    assert mean_and_stderr(values_NT[:1], all_NP[:1])[1] is None


@pytest.mark.parametrize("counts", [(2, 2, 5, 3), (4, 4, 9, 6), (5, 6, 12, 9), (9, 10, 19, 12)])
def test_intervals_of_a_real_result_hold_its_mean(counts: tuple[int, ...]) -> None:
    """Windows are drawn again and again, as many of each kind as in texts of 12 to 50 windows."""
    generator = torch.Generator().manual_seed(4)
    kinds = [torch.tensor(values, dtype=torch.double) for values in DIVERGENCES.values()]
    strata_N = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    bases_N = torch.ones(sum(counts), dtype=torch.double)
    true = sum(num * kind.mean() for num, kind in zip(counts, kinds, strict=True)) / sum(counts)
    num_held, stratified, plain = 0, [], []
    for _ in range(1000):
        drawn_N = torch.cat(
            [
                kind[torch.randint(len(kind), (num,), generator=generator)]
                for num, kind in zip(counts, kinds, strict=True)
            ]
        )
        mean, error = ratio_and_stderr(drawn_N, bases_N, strata_N)
        stratified.append(error)
        plain.append(ratio_and_stderr(drawn_N, bases_N)[1])
        num_held += abs(mean - true) <= Measure(value=mean, stderr=error).half_interval
    assert num_held >= 900
    assert sum(stratified) < 0.8 * sum(plain)
