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
def test_the_verdict_comes_first_with_its_advice(level, tone):
    verdict = {"level": level, "reason": "the KL divergence is 2 < 3", "advice": "Use GPTQ."}
    _, _, body = render(summary={"verdict": verdict}).partition("</h1>\n")
    judged = "KL divergence 0.1 ± 0.02, perplexity 1.005 ± 0.2 times the original's (± half a 95 % interval)."
    reason = "<p>The KL divergence is 2 &lt; 3.</p><p>Use GPTQ.</p>"
    assert body.startswith(f'<section class="verdict {tone}"><h2>{level}</h2><p>{judged}</p>{reason}')
    assert "held-out windows, ± half a 95 % interval" in body
    _, _, unmeasured = render(summary={"verdict": verdict}, quality=None).partition("</h1>\n")
    assert unmeasured.startswith(f'<section class="verdict {tone}"><h2>{level}</h2>{reason}')


def test_a_result_without_a_verdict_has_no_box():
    assert 'class="verdict' not in render(summary={"verdict": None})


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


def test_a_sample_is_marked_from_the_first_difference_on():
    sample = {"prompt": "A", "original_is_degenerate": False, "quantized_is_degenerate": False}
    same = sample | {"original": "a dog", "quantized": "a dog"}
    other = sample | {"original": "a dog", "quantized": "a <cat>"}
    assert "<td>a <mark>&lt;cat&gt;</mark></td>" in render(samples=[same, other])
    assert "<mark>" not in render(samples=[same])
