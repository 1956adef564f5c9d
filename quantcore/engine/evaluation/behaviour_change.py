"""Compares how two models answer the same prompts: which faults became more frequent, and the length of the answers.

The sampled units are prompts: several answers of a model to one prompt depend on each other. A prompt is worse if more
of its answers have a fault than of the original's. If both models behaved alike, worse and better prompts would be
equally likely, which is the exact test of McNemar (Agresti, Categorical Data Analysis, 10.1). A finding needs more than
one such test would say, since several are made.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any

from quantcore.engine.evaluation.answer_faults import FAULTS, Answered, Asked, faults_of, final_number, without_thinking
from quantcore.report.behaviour import FaultChange, LengthChange
from quantcore.report.paired import CONFIDENCE, POWER, student_quantile
from quantcore.report.quality import Interval

LEVEL = (1 - CONFIDENCE) / 2
"""Probability of a finding by chance, of all tests together: that beyond one end of a 95 % interval."""
MIN_LENGTHS = 5
"""Fewest prompts from which lengths are compared: the spread of fewer is itself hardly known."""
LENGTH_LIMIT = 1.25
"""Ratio of the lengths up to which answers are equally long: the limit for the equivalence of two medicines."""


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt with the answers of both models: the greedy ones first, then as many sampled ones."""

    asked: Asked
    original: Sequence[Answered]
    result: Sequence[Answered]


def compare_answers(prompts: Sequence[AnsweredPrompt]) -> dict[str, Any]:
    """Return ``length``, ``faults`` and ``changed_finals``, as fields of Behaviour."""
    shares = _shares(prompts)
    counts = {name: _counts(pairs) for name, pairs in shares.items()}
    num_tests = corrected_tests([2.0 ** -(worse + better) for worse, better in counts.values()], more=1)
    level = LEVEL / num_tests
    return {
        "faults": tuple(_fault_change(name, pairs, level) for name, pairs in shares.items()),
        "length": _length_change(prompts, level),
        "changed_finals": _changed_finals(prompts),
    }


def corrected_tests(smallest: Iterable[float], more: int = 0) -> int:
    """Return by how many tests a level must be divided, from the smallest p-values that these could have.

    A test that could not be significant whatever its outcome costs the others nothing: Tarone, A Modified Bonferroni
    Method for Discrete Data (1990). ``more`` tests could have any p-value.
    """
    values = [*smallest, *[0.0] * more]
    return next(num for num in range(1, len(values) + 2) if sum(value <= LEVEL / num for value in values) <= num)


def sign_test(num_worse: int, num_better: int) -> float:
    """Return the probability that at least ``num_worse`` of all differing prompts are worse by chance."""
    num = num_worse + num_better
    return math.fsum(math.comb(num, count) / 2**num for count in range(num_worse, num + 1))


def needed_prompts(share_worse: float, share_better: float, level: float = LEVEL) -> int | None:
    """Return the number of prompts that would show such a difference 19 times in 20; None if there is none.

    It is that of Connor, Sample Size for Testing Differences in Proportions for the Paired-Sample Design (1987), and at
    least the number with enough differing prompts for the exact test.
    """
    difference, differing = share_worse - share_better, share_worse + share_better
    if difference <= 0:
        return None
    one, two = NormalDist().inv_cdf(1 - level), NormalDist().inv_cdf(POWER)
    root = one * math.sqrt(differing) + two * math.sqrt(max(0.0, differing - difference**2))
    return math.ceil(max((root / difference) ** 2, math.ceil(-math.log2(level)) / differing))


def paired_interval(num_worse: int, num_better: int, num: int) -> Interval:
    """Return the share of prompts that are worse less that of better ones, with its 95 % interval.

    It is Wald's with half a prompt more on either side: Agresti and Min, Simple Improved Confidence Intervals for
    Comparing Matched Proportions (2005).
    """
    centre = (num_worse - num_better) / (num + 2)
    error = math.sqrt((num_worse + num_better + 1) - (num_worse - num_better) ** 2 / (num + 2)) / (num + 2)
    margin = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
    return Interval(
        value=(num_worse - num_better) / num, low=max(-1.0, centre - margin), high=min(1.0, centre + margin)
    )


def _shares(prompts: Sequence[AnsweredPrompt]) -> Mapping[str, list[tuple[float, float]]]:
    """Return by fault the shares of both models' answers to a prompt that have it, of the prompts that tell."""
    shares: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for prompt in prompts:
        before, after = (
            [faults_of(prompt.asked, answer) for answer in answers] for answers in (prompt.original, prompt.result)
        )
        for name in FAULTS:
            sides = [[found[name] for found in side if name in found] for side in (before, after)]
            if name == "open_thinking" and any(sides):  # a model that does not think leaves nothing open
                sides = [side or [False] for side in sides]
            if all(sides):
                shares[name].append((fmean(sides[0]), fmean(sides[1])))
    return {name: shares[name] for name in FAULTS if name in shares}


def _counts(pairs: Sequence[tuple[float, float]]) -> tuple[int, int]:
    return sum(after > before for before, after in pairs), sum(after < before for before, after in pairs)


def _fault_change(name: str, pairs: Sequence[tuple[float, float]], level: float) -> FaultChange:
    num, (worse, better) = len(pairs), _counts(pairs)
    chance = sign_test(worse, better)
    is_worse = chance <= level
    return FaultChange(
        fault=name,
        title=FAULTS[name],
        num_prompts=num,
        original=fmean(before for before, _ in pairs),
        result=fmean(after for _, after in pairs),
        num_worse=worse,
        num_better=better,
        change=paired_interval(worse, better, num),
        chance=chance,
        is_worse=is_worse,
        num_needed=None if is_worse else needed_prompts(worse / num, better / num, level),
    )


def _length_change(prompts: Sequence[AnsweredPrompt], level: float) -> LengthChange | None:
    """Return the ratio of the geometric means of the lengths; None for fewer than MIN_LENGTHS prompts.

    The interval is Student's over the prompts, of the logarithm.
    """
    if len(prompts) < MIN_LENGTHS:
        return None
    logs = [_mean_log(prompt.result) - _mean_log(prompt.original) for prompt in prompts]
    mean, error, num_degrees = fmean(logs), stdev(logs) / math.sqrt(len(logs)), len(logs) - 1
    margin = student_quantile((1 + CONFIDENCE) / 2, num_degrees) * error
    beyond = abs(mean) - math.log(LENGTH_LIMIT)
    is_off = beyond > student_quantile(1 - level, num_degrees) * error
    deviations = NormalDist().inv_cdf(1 - level) + NormalDist().inv_cdf(POWER)
    needed = math.ceil((deviations * stdev(logs) / beyond) ** 2) if beyond > 0 and not is_off else None
    ratio = Interval(value=math.exp(mean), low=math.exp(mean - margin), high=math.exp(mean + margin))
    return LengthChange(ratio=ratio, is_off=is_off, num_needed=needed)


def _mean_log(answers: Sequence[Answered]) -> float:
    return fmean(math.log(max(1, answer.num_tokens)) for answer in answers)


def _changed_finals(prompts: Sequence[AnsweredPrompt]) -> Interval | None:
    """Return the share of greedy answers to maths whose final number is another one than the original's.

    The interval is that of Wilson (1927). It is no finding: a number may change because the original was close to it.
    """
    finals = [
        [final_number(without_thinking(answers[0].text)) for answers in (prompt.original, prompt.result)]
        for prompt in prompts
        if (prompt.asked.kind == "maths" or prompt.asked.answer is not None)
        and prompt.original[0].is_ended
        and prompt.result[0].is_ended
    ]
    if not finals:
        return None
    num, share = len(finals), fmean(before != after for before, after in finals)
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre, scale = share + z**2 / (2 * num), 1 + z**2 / num
    margin = z * math.sqrt(share * (1 - share) / num + z**2 / (4 * num**2))
    return Interval(value=share, low=max(0.0, (centre - margin) / scale), high=min(1.0, (centre + margin) / scale))
