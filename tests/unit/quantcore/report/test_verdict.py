"""The verdict on a result: its levels, that it is judged at the unfavourable end of every interval, and why."""

from __future__ import annotations

import pytest

from quantcore.config.verdict_levels import Level
from quantcore.report.gate_result import GateResult, with_failed_gates
from quantcore.report.quality import Divergence, Measure, Perplexities, Quality, TaskResult
from quantcore.report.verdict import judge_quality

PERPLEXITY = Measure(value=20.0, stderr=0.5)
PERPLEXITIES = Perplexities(
    token_perplexity=PERPLEXITY, word_perplexity=PERPLEXITY, byte_perplexity=PERPLEXITY, bits_per_byte=1.0
)


def quality(
    *, kl: float | None = 0.001, ratio: float = 1.0, top1: float = 0.99, stderr: float | None = 0.0001
) -> Quality:
    return Quality(
        num_windows=8, seq_len=512, num_tokens=4088, before=PERPLEXITIES, after=PERPLEXITIES,
        ratio=Measure(value=ratio, stderr=stderr),
        divergence=Divergence(
            kl_mean=Measure(value=kl, stderr=stderr), kl_p99=0.1, top1_agreement=Measure(value=top1, stderr=stderr),
            logit_error=0.01,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "level", "reason"),
    [
        (quality(), "faithful", "every measurement"),
        (quality(kl=0.03), "good", "KL divergence"),
        (quality(ratio=1.03), "good", "perplexity ratio"),
        (quality(top1=0.9), "good", "top-1 agreement is 0.9 ± 0.0002, at worst 0.9 (95 %), below the 0.93 of faithful"),
        (quality(kl=0.2), "degraded", "above the 0.1 of good"),
        (quality(ratio=1.2), "degraded", "perplexity ratio"),
        (quality(kl=0.7), "broken", "above the 0.5 of degraded"),
        (quality(kl=0.001, ratio=3.0), "broken", "perplexity ratio"),
        (quality(kl=None), "broken", "KL divergence"),
        (quality(ratio=0.9), "faithful", "every measurement"),  # better than the original is no fault
        (quality(kl=0.015, stderr=0.001), "faithful", "every measurement"),
        (quality(kl=0.015, stderr=0.003), "good", "0.015 ± 0.0059, at worst 0.0209"),  # too short a text to be sure
        (quality(kl=0.015, stderr=None), "faithful", "every measurement"),
        (quality(ratio=1.004, stderr=0.075), "unclear", "not enough text"),  # 126 tokens of fp8: it was degraded
        (quality(kl=0.15, stderr=0.026), "degraded", "above the 0.1 of good"),  # poor as measured
        (quality(kl=0.3, stderr=0.2), "degraded", "above"),
    ],
)
def test_levels(measured: Quality, level: Level, reason: str) -> None:
    verdict = judge_quality(measured)
    assert verdict.level == level and reason in verdict.reason, verdict


def test_an_unclear_result_says_how_much_text_is_enough() -> None:
    """The interval is 0.01 to 0.09 of the ratio above 1; four times the text halves it, and 1.06 keeps the limit."""
    short = quality(ratio=1.05, kl=0.001, top1=0.99, stderr=0.0)
    short = short.replace(ratio=Measure(value=1.05, stderr=0.0306))  # half of it: 0.06, and 0.03 are left
    verdict = judge_quality(short)
    assert verdict.level == "unclear" and "about 32 windows of 512 tokens instead of 8" in verdict.reason
    assert "--num_eval_data" in (verdict.advice or "")
    long = short.replace(num_windows=34, ratio=Measure(value=1.05, stderr=0.0306 * (8 / 34) ** 0.5))
    assert judge_quality(long).level == "good"
    close = short.replace(ratio=Measure(value=1.0799, stderr=0.0306))
    assert "more than 100 times" in judge_quality(close).reason


def test_verdict_and_gates_do_not_contradict_each_other() -> None:
    gate = GateResult(gate="G8", name="kl_mean", status="fail", value=0.2, limit=0.1, detail="limit for int8")
    passed = gate.replace(status="pass")
    faithful, degraded = judge_quality(quality()), judge_quality(quality(kl=0.2))
    assert "but it failed a gate: Mean KL divergence 0.2 is above" in with_failed_gates(faithful, [gate, passed]).reason
    assert with_failed_gates(faithful, [passed]) == faithful and with_failed_gates(degraded, [gate]) == degraded
    assert "normal for this scheme" in with_failed_gates(degraded, [passed]).reason
    assert with_failed_gates(degraded, []) == degraded  # the gates were off


@pytest.mark.parametrize(
    ("metric", "before", "after", "level"),
    [
        ("acc,none", 0.6, 0.59, "faithful"),  # within the error
        ("acc,none", 0.6, 0.4, "degraded"),
        ("acc,none", 0.4, 0.6, "faithful"),
        ("word_perplexity,none", 10.0, 12.0, "degraded"),
        ("word_perplexity,none", 12.0, 10.0, "faithful"),
    ],
)
def test_a_task_that_got_worse_makes_a_result_degraded(metric: str, before: float, after: float, level: Level) -> None:
    pair = TaskResult(original=Measure(value=before, stderr=0.02), quantized=Measure(value=after, stderr=0.02))
    verdict = judge_quality(quality(), {"task": {metric: pair}})
    assert verdict.level == level
    assert ("task" in verdict.reason) == (level == "degraded")


def test_a_task_without_errors_or_an_original_decides_nothing() -> None:
    for original, stderr in ((None, 0.02), (0.6, None)):
        pair = TaskResult(
            original=None if original is None else Measure(value=original, stderr=stderr),
            quantized=Measure(value=0.1, stderr=stderr),
        )
        assert judge_quality(quality(), {"task": {"acc,none": pair}}).level == "faithful"
