"""The verdict on a result: how far its predictions are from the original's, in one word and a sentence. No torch.

It comes from paired measurements on held-out text, and for a chat model on the original's own answers, each at the
unfavourable end of its 95 % interval, so that a short text gives no better verdict than a long one would. Nor does it
give a bad one: a result whose measurements are good, and whose text is too short to say so, is "unclear".
docs/concepts/proof-and-gates.md says what the levels mean, and docs/benchmarks.md which results have which.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantcore.config.recipes import Advice
from quantcore.config.verdict_levels import LEVELS, POOR, Level
from quantcore.report.behaviour import Behaviour
from quantcore.report.gate_result import GateResult
from quantcore.report.quality import AnswerQuality, Measure, Quality, Step, TaskResults, Verdict

_RISES = re.compile("perplexity|bits_per|brier|ece")  # metrics that a worse model has more of


@dataclass(frozen=True)
class LevelLimits:
    """Upper limits of the mean KL divergence (nats per token) and of the perplexity ratio; lower one of top-1."""

    kl_mean: float
    perplexity_ratio: float
    top1_agreement: float


LIMITS: dict[Level, LevelLimits] = {
    "faithful": LevelLimits(kl_mean=0.02, perplexity_ratio=1.02, top1_agreement=0.93),
    "good": LevelLimits(kl_mean=0.10, perplexity_ratio=1.08, top1_agreement=0.82),
    "degraded": LevelLimits(kl_mean=0.50, perplexity_ratio=1.50, top1_agreement=0.60),
}
"""Level -> the limits that all measurements keep. A result that keeps none is broken."""

MOST_TEXT = 100
"""Upper bound of the text, relative to what was measured, that is named as enough for a verdict."""


def judge_quality(quality: Quality, tasks: TaskResults | None = None, answers: AnswerQuality | None = None) -> Verdict:
    """Return the verdict on a result: that on a text and tasks, or that on its ``answers`` if it is worse.

    Answers that are good as measured, and only not beyond doubt, change nothing: there are few prompts more to ask.
    """
    of_text = _judge(quality, tasks)
    if answers is None:
        return of_text
    of_answers = _judge(answers)
    if of_answers.level == "unclear" or LEVELS.index(of_answers.level) <= LEVELS.index(of_text.level):
        return of_text
    return of_answers.replace(reason=f"on the original's own answers, {of_answers.reason}")


def _judge(quality: Quality, tasks: TaskResults | None = None) -> Verdict:
    """Return the verdict on a result from its distance to the original, and from tasks that both models ran.

    A metric of a task that fell by more than chance explains makes the result degraded at best. A result is unclear if
    it is good as measured, and worse at the unfavourable ends of the intervals alone. It is broken only as measured.
    """
    misses: list[str] = []
    for level, limits in LIMITS.items():
        if level == "degraded" and not any(_fallen(tasks or {})):
            as_measured = next(_missed(quality, LIMITS["good"], sure=True), None)
            if as_measured is None:
                return _unclear(quality, misses[-1])
            misses.append("{}, and good {}".format(*as_measured))
        if level != "degraded" and (fallen := next(_fallen(tasks or {}), None)):
            misses.append(fallen)
            continue
        missed = next(_missed(quality, limits, sure=level == "degraded"), None)
        if missed is None:
            reason = misses[-1] if misses else "every measurement is within its limits"
            return Verdict(level=level, reason=reason, sentence=sentence_of(level, quality))
        phrase, limit = missed
        misses.append(f"{phrase}, and {level} {limit}")
    return Verdict(level="broken", reason=misses[-1], sentence=sentence_of("broken", quality))


def with_failed_gates(verdict: Verdict, quality: Quality, gates: Sequence[GateResult]) -> Verdict:
    """Return ``verdict`` with the gates' findings in it if the two seem to disagree.

    Gates compare a result with what is usual for its scheme, the verdict with the original. A failed one does not
    change the level, but the result is no longer said to be ready.
    """
    missed = [gate.sentence.removesuffix(".") for gate in gates if gate.status == "fail"]
    if verdict.level not in POOR and missed:
        which = "a check" if len(missed) == 1 else f"{len(missed)} checks"
        reason = f"{verdict.reason}; but it failed {which}: {'; '.join(missed)}"
        if verdict.level == "unclear":
            return verdict.replace(reason=reason)
        return verdict.replace(reason=reason, sentence=sentence_of(verdict.level, quality, is_failed=True))
    if verdict.level in POOR and gates and all(gate.status in ("pass", "skipped") for gate in gates):
        return verdict.replace(reason=f"{verdict.reason}; that is normal for this scheme, whose checks it passes")
    return verdict


def with_behaviour(verdict: Verdict, quality: Quality, behaviour: Behaviour | None) -> Verdict:
    """Return ``verdict``; degraded at best, if the model's own answers show something that is certainly worse."""
    if behaviour is None or not behaviour.findings or verdict.level in POOR:
        return verdict
    reason = f"in its own answers, {'; '.join(behaviour.findings)}"
    return Verdict(level="degraded", reason=reason, sentence=sentence_of("degraded", quality))


def sentence_of(level: Level, quality: Quality, *, enough: str | None = None, is_failed: bool = False) -> str:
    """Return the verdict in a sentence for everybody.

    ``enough``: how much text a result needs that is unclear. ``is_failed``: a check of a better one failed.
    """
    agreement = quality.divergence.top1_agreement.value
    where = " of its answers" if isinstance(quality, AnswerQuality) else ""
    if agreement is None:
        share = "its predictions are not numbers"
    else:
        num_equal = 100 if agreement >= 1 else min(99, round(100 * agreement))
        share = f"of 100 next words{where}, {num_equal} are the original's"
        if level in POOR and agreement >= LIMITS["good"].top1_agreement:
            share += ", but other measurements are too far away"
    if enough is not None:
        return f"There is not enough text to decide: {share}, on {quality.num_tokens} tokens. Measure {enough}."
    return f"{_FAILED if is_failed else _SHIPPING[level]}: {share}."


_SHIPPING: dict[Level, str] = {
    "faithful": "It may be shipped",
    "good": "It may be shipped",
    "degraded": "Read its answers before you ship it",
    "broken": "Do not ship it",
}
_FAILED = "Look at the failed checks before you ship it"


def steps_of(advice: Iterable[Advice]) -> tuple[Step, ...]:
    """Return each piece of advice with the flags for it."""
    return tuple(Step(text=text, changes=changes, flags=_flags_of(changes)) for text, changes in advice)


def _flags_of(changes: Mapping[str, Any]) -> str:
    """Return the flags of ``quantize`` and ``clone`` that make these changes of a request."""
    words: list[str] = []
    for name, value in changes.items():
        if name == "effort":
            words += ["--effort", value]
        elif name == "goal":
            words += [word for flag, text in value.items() for word in (f"--{flag}", text)]
        elif name == "evaluation":
            words += ["--num_eval_data", str(value["num_windows"])]
        else:
            names = [algorithm["name"] for algorithm in value["algo_config"]]
            words += ["--quant_algo", ",".join("smoothquant" if each == "smooth" else each for each in names)]
    return " ".join(words)


def _unclear(quality: Quality, missed: str) -> Verdict:
    """Return the verdict on a result that more text may show to be good. Intervals shrink with the root of the text."""
    factor = max(
        (measure.half_interval / max(abs(limit - (measure.value or 0.0)), 1e-9)) ** 2
        for _, measure, limit, _ in _rows(quality, LIMITS["good"])
    )
    num_windows = math.ceil(factor * quality.num_windows)
    enough = f"about {num_windows} windows of {quality.seq_len} tokens instead of {quality.num_windows}"
    steps = steps_of([Advice(f"Measure {enough}.", {"evaluation": {"num_windows": num_windows}})])
    if factor > MOST_TEXT:
        enough, steps = f"more than {MOST_TEXT} times as much, since it is so close to the limit", ()
    return Verdict(
        level="unclear",
        reason=f"there is not enough text to decide: {missed}. It needs {enough}",
        sentence=sentence_of("unclear", quality, enough=enough),
        advice="Measure on more text: --num_eval_data, or num_windows of a job's evaluation.",
        steps=steps,
    )


def _rows(quality: Quality, limits: LevelLimits) -> tuple[tuple[str, Measure, float, int], ...]:
    """Return name, measurement, limit, and 1 for an upper limit or -1 for a lower one."""
    divergence = quality.divergence
    return (
        ("KL divergence", divergence.kl_mean, limits.kl_mean, 1),
        ("perplexity ratio", quality.ratio, limits.perplexity_ratio, 1),
        ("top-1 agreement", divergence.top1_agreement, limits.top1_agreement, -1),
    )


def _missed(quality: Quality, limits: LevelLimits, *, sure: bool = False) -> Iterator[tuple[str, str]]:
    """Yield two phrases for each limit that the 95 % interval of a measurement is not within: where it is, the limit.

    With ``sure``, for each that the measured value itself misses.
    """
    for name, measure, limit, sign in _rows(quality, limits):
        worst = _worst(measure, 0 if sure else sign)
        if not sign * worst <= sign * limit:
            best = _worst(measure, -sign)
            is_value_alone = sure and sign * best <= sign * limit
            where = f"{measure.value:.4g} as measured" if is_value_alone else measure.in_words
            yield f"the {name} is {where}", f"{'allows at most' if sign > 0 else 'needs at least'} {limit:g}"


def _worst(measure: Measure, sign: int) -> float:
    if measure.value is None:
        return math.nan
    return measure.value + sign * measure.half_interval


def _fallen(tasks: TaskResults) -> Iterator[str]:
    """Yield a phrase for each metric that is worse than the original's by more than their common error explains."""
    for task, metrics in tasks.items():
        for metric, pair in metrics.items():
            before, after = pair.original, pair.quantized
            if before is None or before.value is None or after.value is None:
                continue
            error = math.hypot(before.half_interval, after.half_interval)
            lost = (after.value - before.value) if _RISES.search(metric) else (before.value - after.value)
            if lost > error > 0:
                yield f"{task} {metric} went from {before} to {after}"
