"""The verdict on a result: its levels, that it is judged at the unfavourable end of every interval, and why."""

from __future__ import annotations

import pytest

from quantcore.config.recipes import Advice
from quantcore.config.verdict_levels import Level
from quantcore.report.behaviour import Behaviour
from quantcore.report.gate_result import GateResult
from quantcore.report.quality import AnswerQuality, Divergence, Measure, Perplexities, Perplexity, Quality, TaskResult
from quantcore.report.verdict import judge_quality, steps_of, with_behaviour, with_failed_gates
from tests.support import reports

PERPLEXITY = Perplexity(value=20.0, stderr=0.5)
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
        (quality(top1=0.9), "good", "top-1 agreement is between 0.8998 and 0.9002, and faithful needs at least 0.93"),
        (quality(kl=0.2), "degraded", "and good allows at most 0.1"),
        (quality(ratio=1.2), "degraded", "perplexity ratio"),
        (quality(kl=0.7), "broken", "and degraded allows at most 0.5"),
        (quality(kl=0.001, ratio=3.0), "broken", "perplexity ratio"),
        (quality(kl=None), "broken", "KL divergence"),
        (quality(ratio=0.9), "faithful", "every measurement"),  # better than the original is no fault
        (quality(kl=0.015, stderr=0.001), "faithful", "every measurement"),
        (
            quality(kl=0.015, stderr=0.003),
            "good",
            "between 0.009 and 0.021, and faithful allows at most 0.02",
        ),  # too short a text to be sure
        (quality(kl=0.015, stderr=None), "faithful", "every measurement"),
        (quality(ratio=1.004, stderr=0.075), "unclear", "not enough text"),  # 126 tokens of fp8: it was degraded
        (quality(kl=0.15, stderr=0.026), "degraded", "and good allows at most 0.1"),  # poor as measured
        (quality(kl=0.3, stderr=0.2), "degraded", "is 0.3 as measured, and good allows at most 0.1"),
    ],
)
def test_levels(measured: Quality, level: Level, reason: str) -> None:
    verdict = judge_quality(measured)
    assert verdict.level == level and reason in verdict.reason, verdict


@pytest.mark.parametrize(
    ("text", "answers", "level", "of_answers"),
    [
        (quality(), quality(kl=0.2, top1=0.9), "degraded", True),
        (quality(), quality(kl=0.05), "good", True),
        (quality(kl=0.2), quality(kl=0.05), "degraded", False),
        (quality(kl=0.2), quality(kl=0.3), "degraded", False),
        (quality(), quality(kl=0.09, stderr=0.02), "faithful", False),  # no more prompts could be asked
    ],
)
def test_the_worse_of_text_and_own_answers_decides(
    text: Quality, answers: Quality, level: Level, of_answers: bool
) -> None:
    verdict = judge_quality(text, None, AnswerQuality(**dict(answers), num_ended=3, by_kind=()))
    assert verdict.level == level
    assert verdict.reason.startswith("on the original's own answers, ") is of_answers
    assert ("next words of its answers" in str(verdict.sentence)) is of_answers


@pytest.mark.parametrize(
    ("measured", "is_worse", "level"),
    [
        (quality(), True, "degraded"),
        (quality(), False, "faithful"),
        (quality(ratio=1.05, stderr=0.0306, kl=0.03, top1=0.9), True, "degraded"),
        (quality(kl=0.7, top1=0.2), True, "broken"),
    ],
)
def test_a_finding_in_the_behaviour_makes_a_result_degraded_at_best(
    measured: Quality, is_worse: bool, level: Level
) -> None:
    behaviour = Behaviour.model_validate(reports.behaviour(is_worse=is_worse))
    verdict = with_behaviour(judge_quality(measured), measured, behaviour)
    assert verdict.level == level
    assert ("<|im_end|> no longer ends an answer; 75% of the answers do not end" in verdict.reason) is (
        level == "degraded"
    )
    assert with_behaviour(judge_quality(measured), measured, None) == judge_quality(measured)


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


def test_the_reason_is_what_decides() -> None:
    """The divergence is only too large at the unfavourable end of its interval; the ratio is, as measured."""
    verdict = judge_quality(quality(kl=0.08, ratio=1.087, stderr=0.03))
    assert verdict.level == "degraded"
    assert verdict.reason == "the perplexity ratio is 1.087 as measured, and good allows at most 1.08"


def test_verdict_and_gates_do_not_contradict_each_other() -> None:
    gate = GateResult(gate="G8", name="kl_mean", status="fail", value=0.2, limit=0.1, detail="limit for int8")
    passed = gate.replace(status="pass")
    near, far = quality(), quality(kl=0.2)
    faithful, degraded = judge_quality(near), judge_quality(far)
    failed = with_failed_gates(faithful, near, [gate, passed])
    assert "but it failed a check: Mean KL divergence 0.2 is above" in failed.reason
    assert (failed.sentence or "").startswith("Look at the failed checks before you ship it: of 100 next words, 99")
    assert with_failed_gates(faithful, near, [passed]) == faithful
    assert with_failed_gates(degraded, far, [gate]) == degraded
    assert "normal for this scheme" in with_failed_gates(degraded, far, [passed]).reason
    assert with_failed_gates(degraded, far, []) == degraded  # the gates were off
    assert with_failed_gates(degraded, far, [passed, gate.replace(status="warn")]) == degraded
    unclear = quality(ratio=1.004, stderr=0.075)
    assert with_failed_gates(judge_quality(unclear), unclear, [gate]).sentence == judge_quality(unclear).sentence


@pytest.mark.parametrize(
    ("measured", "sentence"),
    [
        (quality(top1=0.916), "It may be shipped: of 100 next words, 92 are the original's."),
        (quality(top1=0.997), "It may be shipped: of 100 next words, 99 are the original's."),  # not all of them
        (quality(top1=1.0), "It may be shipped: of 100 next words, 100 are the original's."),
        (quality(kl=0.2, top1=0.7), "Read its answers before you ship it: of 100 next words, 70 are the original's."),
        (
            quality(ratio=3.0),
            "Do not ship it: of 100 next words, 99 are the original's, but other measurements are too far away.",
        ),
        (quality(kl=0.7, top1=0.2), "Do not ship it: of 100 next words, 20 are the original's."),
    ],
)
def test_the_verdict_in_a_sentence(measured: Quality, sentence: str) -> None:
    assert judge_quality(measured).sentence == sentence


def test_the_sentence_of_an_unclear_result_says_how_much_text_is_missing() -> None:
    verdict = judge_quality(quality(ratio=1.05, stderr=0.0306, kl=0.03, top1=0.9).replace())
    sentence, (step,) = verdict.sentence or "", verdict.steps
    assert sentence.startswith("There is not enough text to decide: of 100 next words, 90 are the original's, on 4088")
    needed = step.changes["evaluation"]["num_windows"]
    assert f"Measure about {needed} windows of 512 tokens instead of 8." in sentence
    assert step.flags == f"--num_eval_data {needed}"


def test_each_step_has_the_flags_for_its_changes() -> None:
    chain = {"config": {"algo_config": [{"name": "smooth"}, {"name": "gptaq"}]}}
    goal = {"goal": {"runtime": "vllm", "device": "24GB"}}
    steps = steps_of([Advice("a", {"effort": "best"}), Advice("b", chain), Advice("c", goal)])
    assert [step.flags for step in steps] == [
        "--effort best", "--quant_algo smoothquant,gptaq", "--runtime vllm --device 24GB",
    ]  # fmt: skip


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
