"""Behaviour is compared prompt by prompt: what is certain is a finding, what may be chance says what would tell."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from quantcore.engine.evaluation.answer_faults import Answered, Asked
from quantcore.engine.evaluation.behaviour_change import (
    LEVEL,
    AnsweredPrompt,
    compare_answers,
    corrected_tests,
    needed_prompts,
    paired_interval,
    sign_test,
)
from quantcore.report.behaviour import FaultChange

GOOD = Answered("The tank is full after 24 minutes.", 10, is_ended=True)
CUT = Answered("The tank is full after 24 minutes, because", 64, is_ended=False)
OTHER = Answered("The tank is full after 50 minutes.", 10, is_ended=True)
MATHS = Asked("maths", "How long do both take?", answer="24")


def faults(pairs: Sequence[tuple[Answered, Answered]]) -> dict[str, FaultChange]:
    found = compare_answers([AnsweredPrompt(MATHS, [before], [after]) for before, after in pairs])
    return {each.fault: each for each in found["faults"]}


def test_answers_that_no_longer_end_are_a_finding() -> None:
    endless = faults([(GOOD, CUT)] * 9 + [(GOOD, GOOD)] * 3)["endless"]
    assert endless.is_worse and endless.num_needed is None
    assert (endless.num_worse, endless.num_better, endless.original, endless.result) == (9, 0, 0.0, 0.75)
    assert endless.change.low > 0.3
    assert str(endless) == "75% of the answers do not end (original: 0%); worse on 9 of 12 prompts, better on 0"


def test_a_few_differences_are_none_and_say_what_would_tell() -> None:
    endless = faults([(GOOD, CUT)] * 3 + [(CUT, GOOD)] + [(GOOD, GOOD)] * 8)["endless"]
    assert not endless.is_worse and endless.num_needed is not None and endless.num_needed > 50
    assert "no finding, about" in str(endless)
    enough = [(GOOD, CUT)] * 3 + [(CUT, GOOD)] + [(GOOD, GOOD)] * 8
    repeated = faults(enough * (endless.num_needed // 12 + 1))["endless"]
    assert repeated.is_worse


def test_the_same_answers_are_no_difference() -> None:
    found = compare_answers([AnsweredPrompt(MATHS, [GOOD], [GOOD])] * 12)
    assert [each.outcome for each in found["faults"]] == ["no difference"] * len(found["faults"])
    assert found["length"].ratio.value == 1 and not found["length"].is_off
    assert (found["changed_finals"].value, found["changed_finals"].low) == (0, 0)
    assert 0.2 < found["changed_finals"].high < 0.25  # Wilson's interval of 0 in 12


def test_changed_and_wrong_final_answers() -> None:
    found = compare_answers([AnsweredPrompt(MATHS, [GOOD], [OTHER])] * 10 + [AnsweredPrompt(MATHS, [CUT], [OTHER])] * 2)
    wrong = next(each for each in found["faults"] if each.fault == "wrong_answer")
    assert wrong.is_worse and wrong.num_prompts == 10, "an answer that was cut off is not judged"
    assert found["changed_finals"].value == 1


def test_several_answers_to_a_prompt_are_one_sample() -> None:
    """Fourfold answers to three prompts are no twelve prompts."""
    found = compare_answers([AnsweredPrompt(MATHS, [GOOD] * 4, [CUT] * 4)] * 3)
    endless = next(each for each in found["faults"] if each.fault == "endless")
    assert (endless.num_prompts, endless.num_worse, endless.is_worse) == (3, 3, False)


def test_a_model_that_stops_to_think_leaves_nothing_open() -> None:
    thinking = Answered("<think>a</think>b", 10, is_ended=True)
    found = compare_answers([AnsweredPrompt(Asked("chat", ""), [thinking], [GOOD])] * 2)
    assert [each.result for each in found["faults"] if each.fault == "open_thinking"] == [0.0]


@pytest.mark.parametrize(("tokens", "is_off"), [(10, False), (11, False), (20, True), (4, True)])
def test_lengths_beyond_the_limits(tokens: int, is_off: bool) -> None:
    rng = random.Random(0)
    prompts = []
    for _ in range(20):
        length = rng.randint(20, 60)
        pair = [
            [Answered("a", round(size * rng.uniform(0.9, 1.1)), is_ended=True)]
            for size in (length, length * tokens / 10)
        ]
        prompts.append(AnsweredPrompt(Asked("chat", ""), *pair))
    length_change = compare_answers(prompts)["length"]
    assert length_change.is_off is is_off and length_change.ratio.value == pytest.approx(tokens / 10, rel=0.1)


def test_a_few_lengths_are_not_compared() -> None:
    assert compare_answers([AnsweredPrompt(MATHS, [GOOD], [CUT])] * 4)["length"] is None


def test_chance_finds_nothing_more_often_than_the_level() -> None:
    """Two models alike, with faults at random: all tests together find something in 2.5 % of 500 trials at most."""
    rng, num_found = random.Random(1), 0
    kinds = [GOOD, CUT, OTHER, Answered("der die das und ist nicht ein eine mit " * 8, 80, is_ended=True)]
    for _ in range(500):
        prompts = [AnsweredPrompt(MATHS, [rng.choice(kinds)], [rng.choice(kinds)]) for _ in range(16)]
        found = compare_answers(prompts)
        num_found += any(each.is_worse for each in found["faults"])
    assert num_found / 500 <= LEVEL + 3 * (LEVEL / 500) ** 0.5


def test_the_sign_test_counts_all_outcomes() -> None:
    for worse, better in [(0, 0), (3, 1), (6, 0), (2, 5)]:
        outcomes = list(itertools.product([0, 1], repeat=worse + better))
        assert sign_test(worse, better) == sum(sum(each) >= worse for each in outcomes) / len(outcomes)


def test_tests_that_cannot_find_anything_cost_nothing() -> None:
    assert corrected_tests([1.0, 0.5, 0.25]) == 1
    assert corrected_tests([2.0**-20, 1.0, 0.5], more=1) == 2
    assert corrected_tests([0.0] * 7, more=1) == 8


def test_so_many_prompts_would_tell_19_times_in_20() -> None:
    """Of 500 trials with the number for 0.2 and 0.1, which is 384 by hand; the exact test is a little weaker."""
    num, rng, num_found = needed_prompts(0.2, 0.1), random.Random(2), 0
    assert num == 384
    for _ in range(500):
        draws = [rng.random() for _ in range(num)]
        num_found += sign_test(sum(draw < 0.2 for draw in draws), sum(0.2 <= draw < 0.3 for draw in draws)) <= LEVEL
    assert 0.91 < num_found / 500 < 0.97
    assert needed_prompts(0.1, 0.2) is None and needed_prompts(0.0, 0.0) is None
    assert needed_prompts(1.0, 0.0) == 6, "the exact test needs six of six"


def test_the_interval_is_that_of_agresti_and_min() -> None:
    """0 of 24 and 0 of 24: 1.96 / 26 on either side. The example of approval ratings: 86 and 150 of 1600."""
    nothing = paired_interval(0, 0, 24)
    assert nothing.high == pytest.approx(1.96 / 26, abs=1e-4) == -nothing.low
    ratings = paired_interval(150, 86, 1600)
    assert (ratings.low, ratings.high) == pytest.approx((0.021, 0.059), abs=1e-3)
