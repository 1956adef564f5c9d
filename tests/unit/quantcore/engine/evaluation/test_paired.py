"""Whether one result is worse than another: wrong no more often, and right as often, as the interval promises."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats

from quantcore.engine.evaluation.divergence import Measured
from quantcore.engine.evaluation.paired import compare_measured
from quantcore.errors import ConfigError
from quantcore.report.paired import MIN_WINDOWS, judge, student_quantile
from quantcore.report.quality import Interval

NUM_WINDOWS, NUM_PREDICTED = 128, 511  # 64k tokens in windows of 512
NUM_PAIRS, FEW_PAIRS = 200, 100
TOLERANCES = (0.0, 0.05)
SHARED_TOKENS, SHARED_WINDOWS, OWN_TOKENS, OWN_WINDOWS = 0.90, 0.15, 0.46, 0.04
"""Deviations of the logarithm of KL that both results share, and that each has alone, by token and by window.

They give what was measured of pairs of results (w4a16 of SmolLM2-135M-Instruct with two seeds, on WikiText): the
divergence of a token has 1.3 times its mean as deviation, that of a window 0.16; tokens of the two correlate by 0.7,
windows by 0.9; and the error of the ratio over windows is 1.6 times what it would be if tokens were independent.
"""


def measured(kl_NP: torch.Tensor, losses_NP: torch.Tensor | None = None) -> Measured:
    """A model with these divergences: the larger one is, the larger the loss; the largest change the first choice."""
    rest_NP = torch.zeros_like(kl_NP)
    losses_NP = 3 + kl_NP if losses_NP is None else losses_NP
    return Measured(losses_NP, rest_NP, torch.stack([kl_NP, (kl_NP < 0.2).double(), rest_NP, rest_NP], -1))


def draw_kl(generator: torch.Generator, num_windows: int = NUM_WINDOWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the divergences [N, P] of the tokens of two results that are equally good."""

    def noise(tokens: float, windows: float) -> torch.Tensor:
        by_token = torch.randn(num_windows, NUM_PREDICTED, generator=generator, dtype=torch.float64)
        return tokens * by_token + windows * torch.randn(num_windows, 1, generator=generator, dtype=torch.float64)

    shared_NP = noise(SHARED_TOKENS, SHARED_WINDOWS) - 2.5
    first_NP, second_NP = (shared_NP.add(noise(OWN_TOKENS, OWN_WINDOWS)).exp() for _ in range(2))
    return first_NP, second_NP


def compared(new_NP: torch.Tensor, old_NP: torch.Tensor, tolerance: float = 0.0) -> dict[str, Any]:
    return compare_measured(
        [measured(new_NP)], [measured(old_NP)], torch.ones_like(new_NP, dtype=torch.bool), tolerance
    )


@pytest.fixture(scope="module")
def verdicts() -> Callable[..., Counter[str]]:
    """Count the verdicts on the same pairs, whose KL is made to differ by a ratio: each pair is drawn once for all."""
    generator = torch.Generator().manual_seed(1)
    pairs = [draw_kl(generator) for _ in range(20)]
    smallest = {
        tolerance: sum(compared(*pair, tolerance)["smallest_kl_change"] for pair in pairs) / len(pairs)
        for tolerance in TOLERANCES
    }
    cases = [(1.0, 0.0), (1.05, 0.0), (0.95, 0.0)]
    cases += [(1 + change, tolerance) for tolerance in TOLERANCES for change in (smallest[tolerance], tolerance)]
    found = {case: Counter[str]() for case in cases}
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_PAIRS):
        new_NP, old_NP = draw_kl(generator)
        for (ratio, tolerance), counted in found.items():
            counted[compared(ratio * new_NP, old_NP, tolerance)["verdict"]] += 1
    return lambda ratio, tolerance=0.0: found[ratio, tolerance]


def most(share: float, num_pairs: int = NUM_PAIRS) -> float:
    """The number of pairs that a true share of them exceeds once in 1000 times."""
    return float(stats.binom.ppf(0.999, num_pairs, share))


def test_a_change_that_is_not_there_is_found_at_most_1_time_in_20(verdicts: Callable[..., Counter[str]]) -> None:
    found = verdicts(1.0)
    assert found["worse"] <= most(0.025) and found["better"] <= most(0.025)
    assert 0 < found["worse"] + found["better"] <= most(0.05)


def test_tokens_of_a_window_are_not_independent() -> None:
    """The test above can fail."""
    generator, num_found = torch.Generator().manual_seed(0), 0
    for _ in range(FEW_PAIRS):
        new_NP, old_NP = (kl_NP.view(-1, 1) for kl_NP in draw_kl(generator))
        num_found += compared(new_NP, old_NP)["verdict"] != "no difference found"
    assert num_found > most(0.05, FEW_PAIRS)


def test_a_change_of_5_percent_is_found_19_times_in_20(verdicts: Callable[..., Counter[str]]) -> None:
    assert verdicts(1.05)["worse"] >= 0.95 * NUM_PAIRS
    assert verdicts(0.95)["better"] >= 0.95 * NUM_PAIRS


@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_the_smallest_change_is_found_19_times_in_20(verdicts: Callable[..., Counter[str]], tolerance: float) -> None:
    """Not more often: it is the smallest. A change of just the tolerance is not called worse."""
    generator = torch.Generator().manual_seed(1)
    smallest = sum(compared(*draw_kl(generator), tolerance)["smallest_kl_change"] for _ in range(20)) / 20
    assert tolerance < smallest < tolerance + 0.05
    missed = NUM_PAIRS - verdicts(1 + smallest, tolerance)["worse"]
    assert stats.binom.ppf(0.001, NUM_PAIRS, 0.05) <= missed <= most(0.05)
    assert verdicts(1 + tolerance, tolerance)["worse"] <= most(0.025)


def test_the_intervals_are_those_of_a_bootstrap_over_windows() -> None:
    """On a short text; with the difference between Student's t and the bootstrap, and its own noise of 3 %."""
    new_NP, old_NP = draw_kl(torch.Generator().manual_seed(2), num_windows=40)
    result = compared(new_NP, old_NP)
    drawn = torch.randint(40, (2000, 40), generator=torch.Generator().manual_seed(3))
    new_RN, old_RN, difference_RN = (one.mean(1)[drawn] for one in (new_NP, old_NP, new_NP - old_NP))
    agrees_RN = ((new_NP < 0.2).double() - (old_NP < 0.2).double()).mean(1)[drawn]
    resampled = {
        "kl_change": new_RN.sum(1) / old_RN.sum(1) - 1,
        "perplexity_ratio": difference_RN.mean(1).exp(),
        "top1_difference": agrees_RN.mean(1),
    }
    for name, values in resampled.items():
        low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        found = result[name]
        assert found.value == pytest.approx(values.mean().item(), abs=0.05 * (high - low))
        assert found.high - found.low == pytest.approx(high - low, rel=0.15)
        assert found.low < found.value < found.high


def test_a_result_against_itself_does_not_differ() -> None:
    same_NP = draw_kl(torch.Generator().manual_seed(4))[0]
    result = compared(same_NP, same_NP)
    assert (result["verdict"], result["smallest_kl_change"]) == ("no difference found", 0.0)
    assert result["kl_change"] == Interval(value=0.0, low=0.0, high=0.0)
    assert compared(torch.zeros_like(same_NP), same_NP)["kl_change"] == Interval(value=-1.0, low=-1.0, high=-1.0)


@pytest.mark.parametrize(
    ("low", "high", "tolerance", "verdict"),
    [
        (0.01, 0.02, 0.0, "worse"),
        (-0.01, 0.02, 0.0, "no difference found"),
        (-0.02, -0.01, 0.0, "better"),
        (0.04, 0.09, 0.05, "no difference found"),
        (0.051, 0.09, 0.05, "worse"),
        (-0.09, -0.04, 0.05, "no difference found"),
        (-0.09, -0.051, 0.05, "better"),
    ],
)
def test_the_whole_interval_is_beyond_the_tolerance(low: float, high: float, tolerance: float, verdict: str) -> None:
    assert judge(Interval(value=(low + high) / 2, low=low, high=high), tolerance) == verdict


def test_what_cannot_be_compared_is_said() -> None:
    kl_NP = draw_kl(torch.Generator().manual_seed(5), num_windows=MIN_WINDOWS)[0]
    compared(kl_NP, kl_NP)
    with pytest.raises(ConfigError) as few:
        compared(kl_NP[1:], kl_NP[1:])
    with pytest.raises(ConfigError) as exact:
        compared(kl_NP, torch.zeros_like(kl_NP))
    assert (few.value.code, exact.value.code) == ("too_few_windows", "not_comparable")
    huge = compare_measured(
        [measured(kl_NP, kl_NP + 900)], [measured(kl_NP, kl_NP)], torch.ones_like(kl_NP, dtype=torch.bool)
    )
    assert math.isfinite(huge["perplexity_ratio"].value)


SEED_DEVIATION = 0.035
"""Deviation of the logarithm of KL from seed to seed: see the benchmarks."""


def draw_recipe(generator: torch.Generator, num_results: int) -> list[torch.Tensor]:
    """Draw the divergences [N, P] of results that differ by their seed."""
    shared_NP = torch.randn(32, 40, generator=generator, dtype=torch.float64)

    def draw() -> torch.Tensor:
        own_NP = 0.3 * torch.randn(32, 40, generator=generator, dtype=torch.float64)
        seed = SEED_DEVIATION * torch.randn(1, generator=generator, dtype=torch.float64)
        return (shared_NP + own_NP + seed - 2.5).exp()

    return [draw() for _ in range(num_results)]


def recipes_compared(num_new: int, num_old: int, ratio: float = 1.0) -> list[dict[str, Any]]:
    generator, scored_NP = torch.Generator().manual_seed(6), torch.ones(32, 40, dtype=torch.bool)
    found = []
    for _ in range(NUM_PAIRS):
        results = draw_recipe(generator, num_new + num_old)
        new = [measured(ratio * kl_NP) for kl_NP in results[:num_new]]
        found.append(compare_measured(new, [measured(kl_NP) for kl_NP in results[num_new:]], scored_NP))
    return found


def num_found(compared: list[dict[str, Any]]) -> int:
    return sum(each["verdict"] != "no difference found" for each in compared)


@pytest.mark.parametrize(("num_new", "num_old"), [(3, 3), (1, 5), (8, 2)])
def test_recipes_that_differ_by_their_seed_alone_are_told_apart_1_time_in_20(num_new: int, num_old: int) -> None:
    found = recipes_compared(num_new, num_old)
    assert 0 < num_found(found) <= most(0.05)
    deviations = [each["seed_deviation"] for each in found]
    assert sum(deviations) / NUM_PAIRS == pytest.approx(SEED_DEVIATION, rel=0.15)
    assert all(each["num_results"] == (num_new, num_old) for each in found)


def test_two_results_are_told_apart_more_often() -> None:
    """The test above can fail: one result each says nothing about their recipes."""
    assert num_found(recipes_compared(1, 1)) > 2 * most(0.05)


def test_a_change_of_the_recipe_is_found_19_times_in_20() -> None:
    smallest = sum(each["smallest_kl_change"] for each in recipes_compared(5, 5)) / NUM_PAIRS
    assert 0.06 < smallest < 0.12
    missed = NUM_PAIRS - num_found(recipes_compared(5, 5, 1 + smallest))
    assert stats.binom.ppf(0.001, NUM_PAIRS, 0.04) <= missed <= most(0.06)  # the deviation is estimated each time


@pytest.mark.parametrize(("num_new", "num_old"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_a_few_results_say_nothing_about_their_spread(num_new: int, num_old: int) -> None:
    with pytest.raises(ConfigError) as error:
        recipes_compared(num_new, num_old)
    assert error.value.code == "too_few_results"


@pytest.mark.parametrize("num_degrees", [MIN_WINDOWS - 4, MIN_WINDOWS - 1, 54, 127])
def test_students_quantile(num_degrees: int) -> None:
    assert student_quantile(0.975, num_degrees) == pytest.approx(stats.t.ppf(0.975, num_degrees), rel=0.0005)
