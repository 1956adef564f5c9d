"""The page of a report: what comes first, and what is marked."""

import pytest

from quantcore.report.html import page
from quantcore.report.values import Report
from tests.support import reports


def render(**changes) -> str:
    data = reports.report()
    data["summary"] |= changes.pop("summary", {})
    return page(Report.model_validate(data | changes))


@pytest.mark.parametrize(("level", "tone"), [("faithful", "pass"), ("degraded", "warn"), ("broken", "fail")])
def test_the_verdict_comes_first_in_words_with_its_next_steps(level, tone):
    verdict = {"level": level, "reason": "the KL divergence is 2 < 3", "advice": "Use GPTQ."}
    _, _, body = render(summary={"verdict": verdict}).partition("</h1>\n")
    judged = "KL divergence between 0.08 and 0.12, perplexity between 0.8 and 1.3 times the original's."
    reason = "<p>The KL divergence is 2 &lt; 3.</p>"
    advice = "<p>Use GPTQ.</p>"
    assert body.startswith(f'<section class="verdict {tone}"><h2>{level}</h2><p>{judged}</p>{reason}{advice}')
    assert "held-out windows; in brackets the 95 % interval" in body
    step = {"text": "Use effort best.", "changes": {"effort": "best"}, "flags": "--effort best"}
    in_words = verdict | {"sentence": "Ship < it.", "steps": [step]}
    _, _, unmeasured = render(summary={"verdict": in_words}, quality=None).partition("</h1>\n")
    assert unmeasured.startswith(
        f'<section class="verdict {tone}"><h2>Ship &lt; it.</h2><p>Verdict: <b>{level}</b>.</p>{reason}'
        "<p>Use effort best. Run it again with:</p><pre>--effort best</pre>"
    )


def test_behaviour_is_a_table_with_its_findings():
    text = render(behaviour=reports.behaviour())
    assert "<h2>Behaviour</h2>" in text and "&lt;|im_end|&gt; no longer ends an answer" in text
    assert '<th scope="row">answers that repeat themselves</th>' in text and "about 387 prompts would tell" in text
    assert "<h2>Behaviour</h2>" not in render()


def test_kv_caches_are_a_table_with_sizes_and_verdicts():
    text = render(kv_caches=[reports.kv_cache("q8_0"), reports.kv_cache("q4_0", level="degraded", kl=0.4, spared=4)])
    _, _, table = text.partition("<h2>KV caches</h2>")
    assert '<th scope="row">q8_0</th><td>53 %</td><td>+0.01 %</td>' in table
    assert '<th scope="row">q4_0</th><td>53 %</td><td>+2.00 %</td>' in table and "<td>degraded</td>" in table
    assert "positions 257 to 511" in table and "llama.cpp: --cache-type-k NAME --cache-type-v NAME" in table
    assert "TurboQuant keeps 16 bits in 4 blocks" in table
    assert "KV caches" not in render()


def test_samples_come_before_the_checks_which_are_folded_if_they_pass():
    sample = {"prompt": "A", "original": "a", "quantized": "b"}
    sample |= {"original_is_degenerate": False, "quantized_is_degenerate": False}
    text = render(samples=[sample])
    assert text.index("Sample outputs") < text.index("<b>Size</b>") < text.index("Checks: 1 of 2 beyond their limits")
    passed = render(summary={"gates": [reports.gate("pass"), reports.gate("skipped")]})
    assert "<details><summary>All checks passed</summary><table>" in passed


def test_the_scheme_is_in_the_first_table():
    text = render()
    assert (
        text.index("<b>Scheme</b>") < text.index("<b>Layers</b>")
        and f">{reports.report()['layers'][0]['scheme']}<" in text
    )


def test_a_result_without_a_verdict_has_no_box():
    assert 'class="verdict' not in render(summary={"verdict": None})


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"kl_before": 1.7012, "kl_after": 1.25, "is_kept": True}, "KL 1.701 -&gt; 1.25 on held-back calibration"
         " windows; the tuned scales are kept"),
        ({"kl_before": 0.5, "kl_after": None, "is_kept": False}, "KL 0.5 -&gt; not finite on held-back calibration"
         " windows; no gain, so the scales of the solver are kept"),
    ],
)  # fmt: skip
def test_what_distillation_gained_is_shown(result, text):
    _, _, row = render(distillation=result).partition("<b>Distillation of scales</b></th>")
    assert row.split("</td>")[0].endswith(f">{text}")
    assert "Distillation" not in render()


def test_the_lines_of_every_program_that_loads_an_export_are_shown():
    export = {
        "path": ".",
        "bytes": 1,
        "load": "load me",
        "programs": {"vLLM": "LLM('.')", "Transformers": "from_x('.')"},
    }
    text = render(summary={"exports": {"quark": export}})
    assert "<p>vLLM</p><pre>LLM(&#x27;.&#x27;)</pre><p>Transformers</p><pre>from_x(&#x27;.&#x27;)</pre>" in text
    assert "load me" not in text
    assert "<pre>load me</pre>" in render(summary={"exports": {"quark": export | {"programs": {}}}})
    assert "<p>vLLM &lt; 1</p>" in render(summary={"exports": {"quark": export | {"refusals": {"vLLM": "vLLM < 1"}}}})


def test_a_sample_is_marked_from_the_first_difference_on():
    sample = {"prompt": "A", "original_is_degenerate": False, "quantized_is_degenerate": False}
    same = sample | {"original": "a dog", "quantized": "a dog"}
    other = sample | {"original": "a dog", "quantized": "a <cat>"}
    assert "<td>a <mark>&lt;cat&gt;</mark></td>" in render(samples=[same, other])
    assert "<mark>" not in render(samples=[same])


def test_the_distance_by_position_and_what_is_clipped_are_shown():
    quality = reports.report()["quality"]
    assert "by position" not in render() and "Clipping" not in render()
    measures = {"kl_mean": reports.measure(0.5), "top1_agreement": reports.measure(0.8)}
    by_position = [{"first": 17, "last": 64, "num_tokens": 576, **measures}]
    text = render(quality=quality | {"by_position": by_position}, clipping={"q_proj input": 0.001, "<x>": 0.0125})
    assert '<th scope="row">17 to 64</th><td>576</td><td>0.50 (0.3 to 0.7)</td><td>0.80 (0.6 to 1.0)</td>' in text
    assert text.index("&lt;x&gt;</th><td>1.250%") < text.index("q_proj input</th><td>0.100%")  # the largest first
