"""The verdict on a result: how far its predictions are from the original's, in one word. No torch.

It comes from paired measurements on held-out text, each at the unfavourable end of its 95 % interval, so that a short
text gives no better verdict than a long one would. docs/concepts/proof-and-gates.md says what the levels mean, and
docs/benchmarks.md which results have which.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from quantcore.evaluation.quality import Level, Measure, Quality, TaskResults, Verdict

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


def judge_quality(quality: Quality, tasks: TaskResults | None = None) -> Verdict:
    """Return the verdict on a result from its distance to the original, and from tasks that both models ran.

    A metric of a task that fell by more than chance explains makes the result degraded at best.
    """
    misses: list[str] = []
    for level, limits in LIMITS.items():
        if level != "degraded" and (fallen := next(_fallen(tasks or {}), None)):
            misses.append(fallen)
            continue
        missed = next(_missed(quality, limits), None)
        if missed is None:
            return Verdict(level=level, reason=misses[-1] if misses else "every measurement is within its limits")
        misses.append(f"{missed} of {level}")
    return Verdict(level="broken", reason=misses[-1])


def _missed(quality: Quality, limits: LevelLimits) -> Iterator[str]:
    """Yield a phrase for each limit that the 95 % interval of a measurement is not within."""
    divergence = quality.divergence
    rows = (
        ("KL divergence", divergence.kl_mean, limits.kl_mean, 1),
        ("perplexity ratio", quality.ratio, limits.perplexity_ratio, 1),
        ("top-1 agreement", divergence.top1_agreement, limits.top1_agreement, -1),
    )
    for name, measure, limit, sign in rows:
        worst = _worst(measure, sign)
        if not sign * worst <= sign * limit:
            beyond = "above" if sign > 0 else "below"
            yield f"the {name} is {measure}, at worst {worst:.3g} (95 %), {beyond} the {limit:g}"


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
