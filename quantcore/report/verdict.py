"""The verdict on a result: how far its predictions are from the original's, in one word. No torch.

It comes from paired measurements on held-out text, each at the unfavourable end of its 95 % interval, so that a short
text gives no better verdict than a long one would. Nor does it give a bad one: a result whose measurements are good,
and whose text is too short to say so, is "unclear". docs/concepts/proof-and-gates.md says what the levels mean, and
docs/benchmarks.md which results have which.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from quantcore.config.verdict_levels import Level
from quantcore.report.quality import Measure, Quality, TaskResults, Verdict

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


def judge_quality(quality: Quality, tasks: TaskResults | None = None) -> Verdict:
    """Return the verdict on a result from its distance to the original, and from tasks that both models ran.

    A metric of a task that fell by more than chance explains makes the result degraded at best. A result is unclear if
    it is good as measured, and worse at the unfavourable ends of the intervals alone. It is broken only as measured.
    """
    misses: list[str] = []
    for level, limits in LIMITS.items():
        if (
            level == "degraded"
            and not any(_fallen(tasks or {}))
            and not any(_missed(quality, LIMITS["good"], sure=True))
        ):
            return _unclear(quality, misses[-1])
        if level != "degraded" and (fallen := next(_fallen(tasks or {}), None)):
            misses.append(fallen)
            continue
        missed = next(_missed(quality, limits, sure=level == "degraded"), None)
        if missed is None:
            return Verdict(level=level, reason=misses[-1] if misses else "every measurement is within its limits")
        misses.append(f"{missed} of {level}")
    return Verdict(level="broken", reason=misses[-1])


def _unclear(quality: Quality, missed: str) -> Verdict:
    """Return the verdict on a result that more text may show to be good. Intervals shrink with the root of the text."""
    factor = max(
        (measure.half_interval / max(abs(limit - (measure.value or 0.0)), 1e-9)) ** 2
        for _, measure, limit, _ in _rows(quality, LIMITS["good"])
    )
    num_windows = math.ceil(factor * quality.num_windows)
    enough = f"about {num_windows} windows of {quality.seq_len} tokens instead of {quality.num_windows}"
    if factor > MOST_TEXT:
        enough = f"more than {MOST_TEXT} times as much, since it is so close to the limit"
    return Verdict(
        level="unclear",
        reason=f"there is not enough text to decide: {missed}. It needs {enough}",
        advice="Measure on more text: --num_eval_data, or num_windows of a job's evaluation.",
    )


def _rows(quality: Quality, limits: LevelLimits) -> tuple[tuple[str, Measure, float, int], ...]:
    """Return name, measurement, limit, and 1 for an upper limit or -1 for a lower one."""
    divergence = quality.divergence
    return (
        ("KL divergence", divergence.kl_mean, limits.kl_mean, 1),
        ("perplexity ratio", quality.ratio, limits.perplexity_ratio, 1),
        ("top-1 agreement", divergence.top1_agreement, limits.top1_agreement, -1),
    )


def _missed(quality: Quality, limits: LevelLimits, *, sure: bool = False) -> Iterator[str]:
    """Yield a phrase for each limit that the 95 % interval of a measurement is not within.

    With ``sure``, for each that the measured value itself misses.
    """
    for name, measure, limit, sign in _rows(quality, limits):
        worst = _worst(measure, 0 if sure else sign)
        if not sign * worst <= sign * limit:
            beyond = "above" if sign > 0 else "below"
            at_worst = "" if sure else f", at worst {worst:.3g} (95 %)"
            yield f"the {name} is {measure}{at_worst}, {beyond} the {limit:g}"


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
