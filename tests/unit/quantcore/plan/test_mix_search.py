"""The search for the smallest candidate that is good enough: against trying all of them."""

import random

import pytest

from quantcore.plan.mix_search import CLOSE_BY_LOSS, CLOSE_BY_SIZE, Point, find_smallest, predict

POINTS = [Point(num_bytes=1000 + 10 * index, loss=0.5 * 0.96**index) for index in range(101)]


def losses(seed: int) -> list[float]:
    """Measured losses: a factor of the estimate that falls with the bits, as that of GPTQ does; still monotone."""
    rng = random.Random(seed)
    first, last = rng.uniform(0.1, 0.9), rng.uniform(0.1, 0.9)
    factors = [first + (last - first) * index / 100 for index in range(101)]
    smooth = [point.loss * factor for point, factor in zip(POINTS, factors, strict=True)]
    return [min(smooth[: index + 1]) * (1 - 1e-6 * index) for index in range(101)]


@pytest.mark.parametrize("max_loss", [0.3, 0.1, 0.03, 0.012])
def test_the_answer_is_nearly_that_of_trying_all(max_loss: float) -> None:
    counts = []
    for seed in range(60):
        real = losses(seed)
        tried: list[int] = []
        measured = find_smallest(
            POINTS,
            max_loss,
            lambda index, real=real, tried=tried: tried.append(index) or real[index],
            8,
            first_guess=0.35,
        )
        assert len(tried) == len(set(tried)) == len(measured)
        wanted = next((index for index, loss in enumerate(real) if loss <= max_loss), None)
        good = [index for index, loss in measured.items() if loss <= max_loss]
        if wanted is None:
            assert not good and len(POINTS) - 1 in measured
            continue
        found = min(good)
        near = POINTS[found].num_bytes <= (1 + CLOSE_BY_SIZE) * POINTS[wanted].num_bytes * 1.01
        assert near or real[found] >= CLOSE_BY_LOSS * max_loss
        counts.append(len(measured))
    assert not counts or sum(counts) / len(counts) <= 4.5


def test_one_measurement_decides_if_even_the_best_is_too_bad() -> None:
    measured = find_smallest(POINTS, 1e-6, lambda index: POINTS[index].loss, 8)
    assert measured == {100: POINTS[100].loss}


def test_the_last_measurement_is_that_of_the_largest_if_nothing_was_good_enough() -> None:
    """An answer that exists is found, however wrong the estimates are."""
    measured = find_smallest(POINTS, 0.05, lambda index: 0.01 if index == 100 else 0.2 - 1e-4 * index, 3)
    assert measured[100] == 0.01 and len(measured) == 3


def test_it_ends_with_the_smallest_if_that_is_good_enough() -> None:
    assert find_smallest(POINTS, 1.0, lambda index: 0.1, 8) == {0: 0.1}


def test_it_stops_when_the_time_is_over_but_measures_once() -> None:
    assert len(find_smallest(POINTS, 0.05, lambda index: POINTS[index].loss, 8, may_go_on=lambda: False)) == 1


def test_a_measurement_corrects_the_estimates_near_it() -> None:
    assert predict(POINTS, {50: 2 * POINTS[50].loss}, 51) == pytest.approx(2 * POINTS[51].loss)
    assert predict(POINTS, {50: 0.7}, 50) == 0.7
