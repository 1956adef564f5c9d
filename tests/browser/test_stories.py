"""What the pages say of runs that ended well or badly: a real job, with changed answers of the service."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from bitfoundry.client.answers import Job
from bitfoundry.client.service import Client
from bitfoundry.local.stack import LocalStack
from tests.support.chromium import TOO_WIDE

MB = 1_000_000
MESSAGE = "The engine stopped because " + "the weights of model.layers.7.mlp.down_proj are not finite and " * 8
GATES = [
    {"gate": gate, "name": name, "status": status, "value": 0.5, "limit": 0.1, "detail": ""}
    for gate, name, status in (("G8", "kl_mean", "fail"), ("G14", "size", "pass"))
]
SUMMARY: dict[str, Any] = {
    "size_before_bytes": 200 * MB, "size_after_bytes": 60 * MB, "num_layers_quantized": 21, "num_layers_kept": 1,
    "perplexity_before": 15.8, "perplexity_after": 15.9, "perplexity_ratio": 1.0063, "perplexity_ratio_stderr": 0.001,
    "kl_mean": 0.05, "kl_stderr": 0.001, "quantize_s": 3.0, "total_s": 9.0, "executor": "streamed", "gate": "warn",
    "gates": GATES,
    "verdict": {
        "level": "degraded", "reason": "recovery 94.1 %", "advice": "Try GPTQ.",
        "sentence": "Read its answers: of 100 next words, 81 are its.",
        "steps": [{"text": "Use effort best.", "changes": {"effort": "best"}, "flags": "--effort best"}],
    },
    "worst_layer": {"name": "model.layers.0.mlp.down_proj", "relative_error": 0.09, "sqnr_db": 20.9},
    "peak_memory_bytes": 950 * MB, "planned_peak_memory_bytes": 528 * MB, "failed_tasks": {},
    "memory_by_phase": {
        name: {"peak_memory_bytes": peak * MB, "planned_peak_memory_bytes": 528 * MB}
        for name, peak in (("quantize", 500), ("verify", 950))
    },
    "exports": {
        "compressed_tensors": {
            "path": ".", "bytes": 60 * MB, "load": "load me",
            "programs": {"Transformers": "model = from_pretrained('.')", "vLLM": "llm = LLM('.')"},
        },
        "quark": {"path": "quark", "bytes": 60 * MB, "load": "quantcore.load('quark')"},
    },
}  # fmt: skip
MEASURE = {"value": 15.9, "stderr": 0.4}
REPORT: dict[str, Any] = {
    "summary": SUMMARY, "proof": {}, "kept": [], "warnings": [], "environment": {},
    "samples": [
        {"prompt": "The", "original": "The same.", "quantized": "The same."},
        {"prompt": "A", "original": "A dog.", "quantized": "A cat."},
    ],
    "quality": {
        "before": {"token_perplexity": MEASURE}, "after": {"token_perplexity": MEASURE}, "num_tokens": 6144,
        "divergence": {"kl_mean": MEASURE, "kl_p99": 0.4, "top1_agreement": MEASURE},
        "ratio": {"value": 1.0063, "stderr": 0.001},
        "by_position": [
            {"first": first, "last": last, "num_tokens": 192, "kl_mean": {"value": kl, "stderr": 0.01},
             "top1_agreement": MEASURE}
            for first, last, kl in ((1, 16, 0.25), (17, 64, 0.125))
        ],
    },
    "more_bits": {
        "text": "Keep the 4 layers with the largest errors in 8 bits: about +2.0 MB.",
        "changes": {"export": ["quark"]}, "flags": "--quant_scheme w4a16 --layer_quant_scheme a int8_weight_only",
    },
    "clipping": {"q_proj input": 0.0002, "down_proj input": 0.0125},
}  # fmt: skip


def phase(name: str, start: int, end: int, state: str = "done") -> dict[str, Any]:
    times = {"started_at": f"2026-11-26T08:00:{start:02}Z", "ended_at": f"2026-11-26T08:00:{end:02}Z"}
    return {"name": name, "state": state, "done": 3, "total": 30, "unit": "block"} | times


FAILED: dict[str, Any] = {
    "state": "failed",
    "error": {"code": "nonfinite_weights", "message": MESSAGE, "hint": "Give another model.", "retryable": False},
    "phases": [phase("plan", 0, 2), phase("quantize", 2, 6, "stopped")],
}
SUCCEEDED: dict[str, Any] = {
    "state": "succeeded", "summary": SUMMARY, "error": None,
    "artifact": {"bytes": 60 * MB, "manifest_sha256": "0" * 64, "path": "/artifact"},
    "phases": [phase("plan", 0, 2), phase("quantize", 2, 8), phase("verify", 8, 12)],
}  # fmt: skip


@pytest.fixture(scope="module")
def ended(stack: LocalStack) -> Iterator[Job]:
    """A job that was cancelled at once."""
    with Client(stack.url, stack.api_key) as client:
        job = client.submit(stack.home.parent / "model", config="fp8", calibration={"num_samples": 2, "seq_len": 64})
        yield client.cancel(job.id)


def change(page: Page, address: str | re.Pattern[str], changes: Callable[[Any], None]) -> None:
    """Let the page see the service's answers from ``address`` with ``changes``."""

    def answer(route: Route) -> None:
        body = route.fetch(headers={**route.request.headers, "if-none-match": ""}).json()
        changes(body)
        route.fulfill(json=body)

    page.route(address, answer)


def test_a_failed_run_says_what_failed_and_what_to_do(
    signed_in: Page, ended: Job, check_accessible: Callable[[Page], None]
) -> None:
    page, posted = signed_in, []
    change(page, f"**/v1/jobs/{ended.id}", lambda job: job.update(FAILED))
    page.route(f"**/v1/jobs/{ended.id}/retry", lambda route: (posted.append(route.request.method), route.abort())[1])
    page.goto(f"/ui/jobs/{ended.id}")
    failure = page.get_by_role("region", name="Failure")
    expect(failure.get_by_role("heading")).to_have_text("Failed in quantize, at block 3 of 30, after 4 s")
    expect(failure).to_contain_text("Give another model.")
    expect(failure).to_contain_text("it will fail again unless something changes")
    expect(page.get_by_role("region", name="Phases")).to_contain_text("A retry starts from the beginning")
    expect(failure.get_by_role("link", name="Clone and change")).to_have_class("button primary")
    expect(page.get_by_role("button", name="Delete")).not_to_have_class("danger")
    check_accessible(page)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate(TOO_WIDE) <= 0
    failure.get_by_role("button", name="Retry", exact=True).click()
    expect(failure.get_by_role("alert")).to_be_visible()  # the service was away
    assert posted == ["POST"]
    failure.get_by_role("link", name="Open log").click()
    expect(page.get_by_role("tab", name="Log")).to_have_attribute("aria-selected", "true")


def test_a_run_that_may_succeed_elsewhere_is_retried_there(signed_in: Page, ended: Job) -> None:
    page, posted = signed_in, []
    retryable = FAILED | {"error": FAILED["error"] | {"code": "disk_full", "retryable": True}}
    change(page, f"**/v1/jobs/{ended.id}", lambda job: job.update(retryable))
    page.route(f"**/v1/jobs/{ended.id}/retry*", lambda route: (posted.append(route.request.url), route.abort())[1])
    with page.expect_response("**/v1/workers"):
        page.goto(f"/ui/jobs/{ended.id}")
    failure = page.get_by_role("region", name="Failure")
    expect(failure.get_by_role("button", name="Retry", exact=True)).to_have_class("primary")
    elsewhere = failure.get_by_role("button", name="Retry on another machine")
    expect(elsewhere).to_have_count(0)  # the only worker is on the machine where it failed

    change(page, "**/v1/workers", lambda workers: workers["data"].append(workers["data"][0] | {"host": "two"}))
    page.reload()
    elsewhere.click()
    expect(failure.get_by_role("alert")).to_be_visible()
    assert [url.rpartition("/")[2] for url in posted] == ["retry?elsewhere=true"]


def test_a_long_message_leaves_the_columns_and_an_ended_run_no_cancel(signed_in: Page, ended: Job) -> None:
    page = signed_in
    change(page, "**/v1/jobs?*", lambda jobs: [job.update(FAILED) for job in jobs["data"] if job["id"] == ended.id])
    page.goto("/ui/")
    row = page.get_by_role("row").filter(has_text="The engine stopped because")
    expect(row).to_be_visible()
    last = page.get_by_role("columnheader", name="Created").bounding_box()
    assert last and last["x"] + last["width"] <= 1280
    row.get_by_role("checkbox").check()
    selection = page.get_by_role("region", name="Selected runs")
    expect(selection.get_by_role("button", name="Clear")).to_be_visible()
    expect(selection.get_by_role("button", name="Cancel")).to_have_count(0)


def test_a_running_job_says_what_is_left_of_all_phases(signed_in: Page, ended: Job) -> None:
    """On its page and in the list; what is left of the phase is the detail. Without a basis only that is shown."""
    page = signed_in
    running: dict[str, Any] = {
        "state": "running", "error": None, "phase": "quantize", "eta_s": 351.0,
        "progress": {"phase": "quantize", "done": 3, "total": 30, "unit": "block", "eta_s": 40.0},
        "phases": [phase("plan", 0, 2), phase("quantize", 2, 6, "running") | {"ended_at": None}],
    }  # fmt: skip
    change(page, f"**/v1/jobs/{ended.id}", lambda job: job.update(running))
    change(page, "**/v1/jobs?*", lambda jobs: [job.update(running) for job in jobs["data"] if job["id"] == ended.id])
    page.goto("/ui/")
    progress = page.get_by_role("row").filter(has_text="Running").locator(".progress .sub")
    expect(progress).to_have_text("quantize · block 3 of 30 · about 6 min left")
    expect(progress).to_have_attribute("title", "40 s left in quantize")
    page.goto(f"/ui/jobs/{ended.id}")
    phases = page.get_by_role("region", name="Phases")
    expect(phases).to_contain_text("About 6 min left")
    expect(phases).to_contain_text("block 3 of 30 · 40 s left in quantize, then export and verify")
    running["eta_s"] = None
    expect(phases).not_to_contain_text("About")
    expect(phases).to_contain_text("40 s left in quantize")
    page.goto("/ui/")
    expect(progress).to_have_text("quantize · block 3 of 30 · 40 s left in quantize")


def test_a_run_for_a_goal_shows_whether_it_was_met_and_what_was_tried(
    signed_in: Page, ended: Job, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    why = "no measured result that fits keeps 97 %; this is the best: 92.55 % in 118.0 MB"
    trial = {
        "kl": MEASURE, "algorithms": "gptq", "verdict": {"level": "good", "reason": "r"}, "seconds": 9.0,
        "layers": {"gguf_q4_0": 7, "gguf_q4_k": 14},
    }  # fmt: skip
    goal = {
        "asked": {"min_recovery": 0.97}, "max_bytes": None, "kv_cache": None, "cache_bytes": 0, "is_met": False,
        "why": why, "advice": ["124.0 MB (+5 %): expect 98.1 %"],
        "trials": [
            trial | {"size_bytes": 118 * MB, "recovery": 0.9255, "is_chosen": True},
            trial | {"size_bytes": 110 * MB, "recovery": 0.9, "is_chosen": False},
        ],
        "frontier": [{"size_bytes": 124 * MB, "recovery": 0.981}],
    }  # fmt: skip
    missed = SUMMARY | {"goal": {"is_met": False, "why": why}}
    change(page, f"**/v1/jobs/{ended.id}", lambda job: job.update(SUCCEEDED | {"summary": missed}))
    page.route("**/artifacts/report.json", lambda route: route.fulfill(json=REPORT | {"goal": goal}))
    page.goto(f"/ui/jobs/{ended.id}")
    expect(page.get_by_role("region", name="Result").get_by_text("✕ missed")).to_be_visible()
    card = page.get_by_role("region", name="Goal")
    expect(card).to_contain_text(f"✕ missed: {why}.")
    rows = card.get_by_role("row")
    expect(rows.nth(1)).to_contain_text("1, chosen118 MB7 gguf_q4_0, 14 gguf_q4_kgptq")
    expect(rows.nth(1)).to_contain_text("92.55 %✓ good")
    expect(rows.nth(2)).to_contain_text("90.00 %")
    expect(card.get_by_text("97.0 % requested")).to_be_visible()
    card.get_by_role("group").press("ArrowRight")
    expect(card).to_contain_text("110 MB, candidate 2")
    expect(card.get_by_role("listitem")).to_have_text("124.0 MB (+5 %): expect 98.1 %")
    check_accessible(page)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate(TOO_WIDE) <= 0


def test_a_finished_run_shows_its_verdict_and_how_to_use_it(
    signed_in: Page, ended: Job, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    change(page, f"**/v1/jobs/{ended.id}", lambda job: job.update(SUCCEEDED))
    page.route("**/artifacts/report.json", lambda route: route.fulfill(json=REPORT))
    page.goto(f"/ui/jobs/{ended.id}")
    result = page.get_by_role("region", name="Result")
    expect(result.get_by_role("heading").first).to_have_text("Read its answers: of 100 next words, 81 are its.")
    expect(result).to_contain_text("Verdict: ✕ degraded")
    expect(result).to_contain_text("KL divergence between 0.048 and 0.052")
    expect(result).to_contain_text("Perplexity between +0.43 % and +0.83 %")
    expect(result.locator(".samples mark")).to_have_text("cat.")  # before the checks, and not folded
    expect(page.get_by_role("heading", name="Checks: 1 fail, 1 pass")).to_be_visible()
    expect(page.get_by_text("Footnotes: the verdict does not depend on these.")).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="G8 kl mean")).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="G14 size")).not_to_be_visible()
    result.get_by_text("Command").click()
    expect(result.get_by_label("Command: Use effort best.")).to_contain_text(f"clone {ended.id} --effort best")
    assert page.get_by_role("region").first.get_attribute("aria-label") == "Result"
    expect(page.get_by_role("region", name="Phases")).to_contain_text("12 s in all phases")
    expect(
        page.get_by_text("+0.63 % (+0.43 % to +0.83 %)")
    ).to_be_visible()  # the paired ratio, beside two wide perplexities
    meaning = page.get_by_title("Share of tokens for which both models")
    expect(meaning).to_have_text("Top-1 agreement")
    later = page.get_by_role("row").filter(has_text="17 to 64")
    expect(later).to_contain_text("0.125 (0.10 to 0.15)")
    clipped = page.get_by_role("table").filter(has_text="static activation ranges").get_by_role("row")
    expect(clipped.nth(1)).to_have_text("down_proj input1.25 %")  # the largest first
    expect(result.get_by_role("heading", name="Sample outputs: 1 of 2 differ")).to_be_visible()
    use = page.get_by_role("region", name="Use it")
    whole = use.get_by_role("link", name="Download all files (60.0 MB)")
    expect(whole).to_have_attribute("href", f"/v1/jobs/{ended.id}/artifacts.tar")
    expect(use.get_by_label("Load compressed_tensors with vLLM")).to_contain_text("LLM('.')")
    expect(use.get_by_label("Load compressed_tensors with Transformers")).to_be_visible()
    expect(use.get_by_label("Load quark")).to_contain_text("quantcore.load")  # no other program was seen to load it
    expect(use.get_by_label("Load quark with")).to_have_count(0)
    memory = page.get_by_role("region", name="Memory")
    expect(memory).to_contain_text("950 MB in verify, planned 528 MB (+80 %)")
    expect(memory).to_contain_text("mapped into memory")
    page.get_by_role("button", name="Add to registry").click()
    warning = page.get_by_role("dialog").locator(".notice")
    expect(warning).to_have_text(f"This result is ✕ degraded. {SUMMARY['verdict']['sentence']}")
    page.keyboard.press("Escape")
    check_accessible(page)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate(TOO_WIDE) <= 0
    result.get_by_role("link", name="Run again: Use effort best.").click()
    expect(page.get_by_label("Effort", exact=True)).to_have_value("best")
    page.go_back()
    page.get_by_role("link", name="Run again: Keep the 4 layers").click()
    page.get_by_role("tab", name="JSON").click()
    expect(page.get_by_label("Request JSON")).to_have_value(re.compile('"quark"'))


def test_a_running_search_shows_its_goal_its_candidates_and_all_blocks(
    signed_in: Page, ended: Job, check_accessible: Callable[[Page], None]
) -> None:
    """From the start: the chart has all blocks on its axis when two of thirty are quantized."""
    page = signed_in
    running: dict[str, Any] = {
        "state": "running", "error": None, "phase": "quantize", "eta_s": None,
        "goal": {"runtime": "vllm", "device": "24GB", "context": 8192, "min_recovery": 0.97},
        "progress": {"phase": "quantize", "done": 2, "total": 30, "unit": "block", "eta_s": 40.0},
        "phases": [phase("plan", 0, 2), phase("quantize", 2, 6, "running") | {"ended_at": None}],
    }  # fmt: skip
    change(page, f"**/v1/jobs/{ended.id}", lambda job: job.update(running))
    trial = {
        "size_bytes": 118 * MB, "recovery": 0.9255, "kl": MEASURE, "algorithms": "gptq", "seconds": 9.0,
        "layers": {"w4a16": 21}, "verdict": {"level": "good", "reason": "r"}, "is_chosen": False,
    }  # fmt: skip
    told = [("candidate", {"trial": trial}), *(("layer_quantized", LAYER | {"block": block}) for block in (0, 1))]
    events = [
        {"seq": seq, "at": "2026-11-21T12:00:00Z", "kind": kind, "attempt": 1, "data": data}
        for seq, (kind, data) in enumerate(told, 1)
    ]
    stream = "".join(f"id: {each['seq']}\nevent: {each['kind']}\ndata: {json.dumps(each)}\n\n" for each in events)
    page.route("**/events/stream", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    page.goto(f"/ui/jobs/{ended.id}")
    card = page.get_by_role("region", name="Goal")
    expect(card).to_contain_text("At least 97.0 % recovery in vLLM on 24GB, context of 8192 tokens")
    expect(card.get_by_role("row").nth(1)).to_contain_text("118 MB21 w4a16gptq")
    chart = page.get_by_role("img", name=re.compile("of 1 layer by block"))
    expect(chart.get_by_text("30", exact=True).or_(chart.get_by_text("25", exact=True)).first).to_be_visible()
    expect(page.get_by_role("region", name="Phases")).to_contain_text("in all phases so far")
    check_accessible(page)


def test_a_rejected_result_shows_its_verdict_what_it_missed_and_its_samples(
    signed_in: Page, ended: Job, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    failure = {"code": "gate_failed", "message": "KL 0.5", "hint": "Try --gate warn.", "retryable": False, "detail": ""}
    change(page, f"**/v1/jobs/{ended.id}", lambda job: job.update(state="failed", error=failure))
    judged = {"gate": "fail", "results": GATES, "verdict": SUMMARY["verdict"], "samples": REPORT["samples"]}
    event = {"seq": 1, "at": "2026-11-21T12:00:00Z", "kind": "gates", "attempt": 1, "data": judged}
    stream = f"id: 1\nevent: gates\ndata: {json.dumps(event)}\n\nevent: end\ndata: {{}}\n\n"
    page.route("**/events/stream", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    page.goto(f"/ui/jobs/{ended.id}")
    card = page.get_by_role("region", name="Failure")
    expect(card.get_by_role("heading").first).to_have_text("The result did not pass its checks")
    expect(card).to_contain_text("Read its answers: of 100 next words, 81 are its.")
    expect(card.get_by_role("row").filter(has_text="G8 kl mean")).to_be_visible()
    expect(card.get_by_role("row").filter(has_text="G14 size")).to_have_count(0)
    expect(card.locator(".samples mark")).to_have_text("cat.")
    expect(page.get_by_text("--gate")).to_have_count(0)
    check_accessible(page)
    card.get_by_role("link", name="Run again, with failed checks as warnings").click()
    expect(page.get_by_label("Quality gate")).to_have_value("warn")


def test_the_list_of_runs_shows_the_verdict_beside_the_state(
    signed_in: Page, ended: Job, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    missed = SUMMARY | {"goal": {"is_met": False, "why": "it keeps 91 %"}}
    results = [("missed", missed), ("unjudged", SUMMARY | {"verdict": None}), ("waiting", None)]

    def judge(answer: Any) -> None:
        job = next(each for each in answer["data"] if each["id"] == ended.id)
        answer["data"] = [
            job | (SUCCEEDED | {"summary": summary} if summary else {}) | {"id": f"job_{number}", "name": name}
            for number, (name, summary) in enumerate(results)
        ]

    change(page, re.compile(r"/v1/jobs\?"), judge)
    page.goto("/ui/")
    expect(page.get_by_role("row").filter(has_text="unjudged")).to_be_visible()
    assert page.get_by_role("columnheader").all_inner_texts()[3:5] == ["State", "Verdict"]
    for name, verdict in (("missed", "✕ degraded\ngoal missed"), ("unjudged", "not measured"), ("waiting", "–")):
        row = page.get_by_role("row").filter(has_text=name)
        assert row.get_by_role("cell").all_inner_texts()[4] == verdict
    expect(page.locator("td[data-label=Perplexity]").first).to_have_text("15.80 → 15.90+0.63 %")
    check_accessible(page)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate(TOO_WIDE) <= 0


def test_numbers_are_in_the_readers_locale(browser: Browser, ended: Job, stack: LocalStack) -> None:
    with browser.new_context(base_url=stack.url, locale="de-DE") as context:
        page = context.new_page()
        page.goto(f"/ui/#key={stack.api_key}")
        page.get_by_role("heading", name="Runs").wait_for()
        change(page, f"**/v1/jobs/{ended.id}", lambda job: job.update(SUCCEEDED))
        page.route("**/artifacts/report.json", lambda route: route.fulfill(json=REPORT))
        page.goto(f"/ui/jobs/{ended.id}")
        result = page.get_by_role("region", name="Result")
        expect(result).to_contain_text("15,8 → 15,9 (+0,63 %)")
        expect(page.get_by_role("link", name="Download all files (60,0 MB)")).to_be_visible()


SHARE = {
    "id": "shr_" + "0" * 32, "created_at": "2026-11-22T08:00:00Z", "expires_at": "2099-11-29T08:00:00Z",
    "created_by": "W" * 60,
}  # fmt: skip


def test_a_link_to_a_run_is_made_and_revoked(
    signed_in: Page, ended: Job, check_accessible: Callable[[Page], None]
) -> None:
    page, shares, asked = signed_in, [], []

    def answer(route: Route) -> None:
        if route.request.method == "POST":
            asked.append(route.request.post_data_json)
            shares.append(SHARE)
            route.fulfill(status=201, json=SHARE | {"url": f"https://bitfoundry.example.org/v1/shared/{'x' * 43}"})
        elif route.request.method == "DELETE":
            shares.clear()
            route.fulfill(status=204)
        else:
            route.fulfill(json={"data": shares})

    page.route(f"**/v1/jobs/{ended.id}/shares**", answer)
    page.goto(f"/ui/jobs/{ended.id}")
    expect(page.get_by_role("link", name="Clone")).to_be_visible()
    expect(page.get_by_role("button", name="Share")).to_have_count(0)  # a cancelled run has no report
    change(page, f"**/v1/jobs/{ended.id}", lambda job: job.update(SUCCEEDED))
    page.route("**/artifacts/report.json", lambda route: route.fulfill(json=REPORT))
    page.reload()
    page.get_by_role("button", name="Share").click()
    dialog = page.get_by_role("dialog", name="Share this run")
    expect(dialog.get_by_label("Link expires after")).to_have_value("7")
    dialog.get_by_label("Link expires after").select_option(label="30 days")
    dialog.get_by_role("button", name="Create link").click()
    expect(dialog.get_by_label("New link")).to_contain_text("/v1/shared/")
    expect(dialog).to_contain_text("it will not be shown again")
    expect(dialog).to_contain_text("2099")
    assert asked == [{"expires_in_s": 30 * 24 * 3600}]
    check_accessible(page)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate(TOO_WIDE) <= 0
    dialog.get_by_role("button", name="Revoke").click()
    expect(dialog.get_by_role("button", name="Revoke")).to_have_count(0)
    expect(dialog.get_by_label("New link")).to_have_count(0)


HIDE = "Object.defineProperty(document, 'hidden', {get: () => true})"


def end_when_told(page: Page, ended: Job) -> dict[str, Any]:
    """Show a run as running until ``state`` of the returned fields is another one."""
    now: dict[str, Any] = {"name": "nightly", "state": "running", "error": None}
    shown = client_view(page, ended)

    def answer_active(route: Route) -> None:
        data = [shown | now] if now["state"] == "running" else []
        route.fulfill(json={"data": data, "has_more": False, "next_cursor": None})

    page.route(re.compile(r"/v1/jobs\?.*state=running"), answer_active)
    change(page, f"**/v1/jobs/{ended.id}", lambda job: job.update(now))
    return now


def client_view(page: Page, job: Job) -> dict[str, Any]:
    answer = page.request.get(f"/v1/jobs/{job.id}")
    assert answer.ok, answer.text()
    found: dict[str, Any] = answer.json()
    return found


def test_the_end_of_a_run_is_told_while_the_page_is_hidden(
    notified: Page, ended: Job, check_accessible: Callable[[Page], None]
) -> None:
    """On any page, and only to those who asked for it; the choice stays in this browser."""
    page = notified
    now = end_when_told(page, ended)
    with page.expect_response(re.compile("state=running")):
        page.goto("/ui/models")
    page.get_by_role("button", name="Notifications").click()
    choice = page.get_by_label("Notify me when a run ends")
    expect(choice).not_to_be_checked()
    choice.check()
    expect(page.get_by_text("No run has ended since this browser watches.")).to_be_visible()
    check_accessible(page)
    page.keyboard.press("Escape")
    page.evaluate(HIDE)
    with page.expect_console_message() as told:
        now.update(SUCCEEDED)
    body = SUMMARY["verdict"]["sentence"]
    assert json.loads(told.value.text) == ["nightly: Succeeded", body, ended.id]
    page.reload()
    page.get_by_role("button", name="Notifications 1 new").click()
    dialog = page.get_by_role("dialog", name="Notifications")
    expect(dialog.get_by_role("link", name="nightly: Succeeded")).to_have_attribute("href", re.compile(ended.id))
    expect(dialog).to_contain_text(body)
    check_accessible(page)
    expect(choice).to_be_checked()
    choice.uncheck()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Notifications", exact=True)).to_be_visible()  # nothing is new any more
    page.get_by_role("button", name="Notifications").click()
    dialog.get_by_role("button", name="Clear").click()
    assert page.evaluate("JSON.stringify({...localStorage})") == "{}"


def test_a_browser_that_blocks_notifications_says_so(signed_in: Page, check_accessible: Callable[[Page], None]) -> None:
    page = signed_in
    page.context.grant_permissions([])
    page.reload()
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    expect(page.get_by_text("The browser blocks notifications.")).to_have_count(0)
    page.get_by_role("button", name="Notifications").click()
    expect(page.get_by_text("The browser blocks notifications.")).to_be_visible()
    expect(page.get_by_label("Notify me when a run ends")).to_be_disabled()
    check_accessible(page)


def test_runs_of_two_models_are_compared_on_a_phone(
    signed_in: Page, ended: Job, client: Client, stack: LocalStack, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    calibration = {"num_samples": 2, "seq_len": 64}
    other = client.submit(stack.home.parent / "deep", config="w4a16", calibration=calibration, name="W" * 80)
    client.cancel(other.id)
    worse = SUMMARY | {"kl_mean": 6.5, "perplexity_after": 2047.0, "perplexity_ratio": 1.016}
    change(page, f"**/v1/jobs/{ended.id}", lambda job: job.update(SUCCEEDED))
    change(page, f"**/v1/jobs/{other.id}", lambda job: job.update(SUCCEEDED | {"summary": worse}))
    page.set_viewport_size({"width": 390, "height": 844})
    gone = f"job_{'0' * 32}"
    page.goto(f"/ui/compare?job={ended.id}&job={other.id}&job={gone}")
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="W" * 80))
    expect(row).to_be_visible()
    metrics = page.locator(".results thead th").all_inner_texts()
    cells = dict(zip(metrics, row.locator("> *").all_inner_texts(), strict=True))
    change_lines = cells["Perplexity vs. original"].replace("\u00a0", " ").split("\n")  # a number keeps its %
    assert change_lines == ["+1.60 %", "+1.40 % to +1.80 %", "+0.97 points worse"]
    for name in ("KL divergence (mean)", "Size"):
        assert not re.search("better|worse|tested", cells[name]), "a value of another model has no change"
    assert cells["KL divergence (mean)"].split("\n") == ["6.5", "6.498 to 6.502"]
    assert cells["Verdict"] == "✕ degraded" and metrics.index("Verdict") == 1  # before any number
    assert "✓ Pareto-optimal" in cells["Run"]  # the larger loss is that of another model
    assert cells["Against the baseline"] == "–"
    expect(page.get_by_text("Runs of another model are compared")).to_be_visible()
    expect(page.get_by_text(gone)).to_be_visible()  # a run that was deleted is named, and the others are shown
    assert page.evaluate(TOO_WIDE) <= 0
    check_accessible(page)


MANY = 300


def many_runs(page: Page, ended: Job) -> list[str]:
    """Let the service have ``MANY`` succeeded runs of two presets; return the ids, newest first."""
    ids = [f"job_{number:032x}" for number in range(MANY)]
    template: list[dict[str, Any]] = []

    def run(number: int) -> dict[str, Any]:
        size = (40 + 37 * number % 101) * MB
        ratio = 1 + 0.2 * 40 * MB / size + 0.001 * (number * 7919 % MANY)
        figures = {"size_after_bytes": size, "perplexity_ratio": ratio, "kl_mean": ratio - 1}
        preset = "fp8" if number % 3 else "w4a16"
        about = {"id": ids[number], "name": f"run {number}", "preset": preset}
        return template[0] | SUCCEEDED | about | {"summary": SUMMARY | figures, "config": {"preset": preset}}

    def answer(route: Route) -> None:
        if not template:
            template.append(route.fetch(url=f"{page.url.partition('/ui')[0]}/v1/jobs/{ended.id}").json())
        query = parse_qs(urlsplit(route.request.url).query)
        start, limit = int(query.get("cursor", ["0"])[0]), int(query["limit"][0])
        shown = [run(number) for number in range(start, min(MANY, start + limit))]
        following = str(start + limit) if start + limit < MANY else None
        route.fulfill(json={"data": shown, "has_more": following is not None, "next_cursor": following})

    page.route("**/v1/jobs?*", answer)
    page.route(
        "**/v1/jobs/summary*", lambda route: route.fulfill(json={"total": MANY, "by_state": {"succeeded": MANY}})
    )
    page.route("**/v1/jobs/*/events*", lambda route: route.fulfill(json=LAYERS))
    untested = {"change": None, "not_tested": "They were measured on different texts."}
    page.route("**/v1/jobs/*/change?*", lambda route: route.fulfill(json=untested))
    return ids


LAYER = {"name": "model.layers.0.mlp.down_proj", "block": 0, "relative_error": 0.09, "sqnr_db": 20.9, "scheme": "fp8"}
LAYERS = {"data": [{"seq": 1, "data": LAYER}], "has_more": False}


def scroll_to(page: Page, top_px: int) -> None:
    """Scroll the table of Compare, and wait until its rows are drawn."""
    page.locator(".results").evaluate("(box, top) => { box.scrollTop = top; }", top_px)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def layers_box(page: Page, name: str) -> Locator:
    """Return the box that shows a run's layers, after scrolling the table to it."""
    box = page.get_by_label(f"Show layers of {name}", exact=True)
    for top_px in range(0, 60 * MANY, 400):
        if box.count():
            break
        scroll_to(page, top_px)
    return box


def test_runs_that_were_not_read_yet_are_not_called_missing(signed_in: Page) -> None:
    page = signed_in
    page.route("**/v1/jobs?*", lambda _: None)
    page.goto("/ui/compare")
    expect(page.get_by_text("Choose runs here")).to_be_visible()
    expect(page.get_by_text("Loading…")).to_be_visible()
    expect(page.get_by_text("No other finished runs")).to_have_count(0)
    page.unroute("**/v1/jobs?*")  # lets the requests go on
    expect(page.get_by_label("Add a finished run")).to_be_visible()


def test_all_results_of_a_filter_are_compared_by_a_short_link(signed_in: Page, ended: Job) -> None:
    page = signed_in
    ids = many_runs(page, ended)
    page.goto("/ui/?q=run")
    page.get_by_role("link", name=f"Compare {MANY} results").click()
    expect(page).to_have_url(re.compile(r"/ui/compare\?q=run&state=succeeded$"))
    rows = page.locator(".results tbody tr")
    expect(page.locator(".results table")).to_have_attribute("aria-rowcount", str(MANY + 1))
    expect(rows.first).to_contain_text("baseline")
    assert rows.count() < MANY / 4, "what is not on the screen is not in the page"
    page.get_by_role("button", name="Size", exact=True).click()
    expect(rows.nth(1)).to_contain_text("40.0 MB")
    expect(rows.nth(1)).to_contain_text("not tested")
    expect(rows.nth(1)).to_contain_text("They were measured on different texts.")
    expect(page.get_by_role("columnheader", name="Size")).to_have_attribute("aria-sort", "ascending")
    chart = page.get_by_role("img", name="Perplexity and size of each run")
    assert 1 < chart.locator(".label").count() < 40, "the front alone is named"
    page.get_by_role("group", name="Perplexity and size of each run").focus()
    page.keyboard.press("ArrowRight")
    expect(chart.locator(".label").filter(has_text="run 202")).to_be_visible()  # the worst of the smallest
    chart.locator(".mark").hover(force=True)
    page.keyboard.press("ArrowRight")
    expect(chart.locator(".label").filter(has_text=re.compile("run 202|run 101"))).to_have_count(2)
    expect(page.get_by_role("button", name="w4a16")).to_be_visible()  # a series of the legend
    field = page.get_by_role("row").filter(has_text="/config/preset")
    expect(field).to_contain_text("≠ fp8 run 1, run 2, run 4 and 197 more runs")
    expect(page.get_by_text(f"8 of {MANY} runs. Choose up to 8")).to_be_visible()
    expect(layers_box(page, "run 20")).to_be_disabled()
    layers_box(page, "run 3").uncheck()
    layers_box(page, "run 20").focus()
    scroll_to(page, 10**6)  # the row with the focus stays, however far away
    page.keyboard.press("Space")
    layers = page.get_by_role("group", name="Relative weight error of each layer in 8 runs")
    expect(layers).to_be_visible()
    page.get_by_label("Metric").select_option(label="SQNR (dB)")

    address = page.url
    assert len(address) < 600
    page.goto("/ui/")
    page.goto(address)  # the link shows the same view
    expect(rows.nth(1)).to_contain_text("40.0 MB")
    expect(layers_box(page, "run 20")).to_be_checked()
    expect(layers_box(page, "run 3")).not_to_be_checked()
    expect(page.get_by_label("Metric")).to_have_value("sqnr_db")
    with page.expect_download() as table:
        page.get_by_role("button", name="Save as CSV").click()
    lines = Path(table.value.path()).read_text().splitlines()
    assert len(lines) == MANY + 1 and {line.split(",")[0] for line in lines[1:]} == set(ids)
    with page.expect_download() as picture:
        page.get_by_role("button", name="Save as PNG").click()
    data = Path(picture.value.path()).read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate(TOO_WIDE) <= 0


def test_more_runs_than_can_be_compared_are_refused(signed_in: Page, check_accessible: Callable[[Page], None]) -> None:
    page = signed_in
    page.route("**/v1/jobs/summary*", lambda route: route.fulfill(json={"total": 501, "by_state": {"succeeded": 501}}))
    page.goto("/ui/?q=x")
    expect(page.get_by_text("Filter to at most 500 results")).to_be_visible()
    page.goto("/ui/compare?q=x")
    expect(page.get_by_role("alert")).to_contain_text("The filter matches 501 runs; at most 500 can be compared.")
    expect(page.get_by_role("link", name="Change the filter")).to_have_attribute("href", "/ui/?q=x")
    check_accessible(page)


def test_the_queue_shows_what_is_next_first_at_any_length(
    signed_in: Page, ended: Job, check_accessible: Callable[[Page], None]
) -> None:
    """It had the newest hundred of two hundred jobs."""
    page, asked = signed_in, []
    waiting = [
        {"id": f"job_{number:032x}", "name": f"number {number}", "state": "queued", "queue_position": number}
        for number in range(1, 4)
    ]

    def answer(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        asked.append(query)
        rows = [] if "running" in query["state"] else waiting[2:] if "cursor" in query else waiting[:2]
        job = ended.model_dump(mode="json")
        has_more = bool(rows) and "cursor" not in query
        page_of = {"data": [job | row for row in rows], "has_more": has_more}
        route.fulfill(json=page_of | {"next_cursor": "next" if has_more else None})

    page.route("**/v1/jobs?*", answer)
    page.goto("/ui/queue")
    rows = page.get_by_role("row")
    expect(rows.nth(1)).to_contain_text("number 1")
    expect(rows.nth(2)).to_contain_text("number 2")
    assert ["queue"] in [query.get("order") for query in asked]
    check_accessible(page)
    page.get_by_role("link", name="Later in queue").click()
    expect(rows.nth(1)).to_contain_text("number 3")
    expect(rows).to_have_count(2)
    page.get_by_role("link", name="Next in queue").click()
    expect(rows.nth(1)).to_contain_text("number 1")


def test_a_sweep_is_one_row_that_opens_into_a_table_with_its_axes(
    signed_in: Page, stack: LocalStack, client: Client, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    job = {"model": {"path": str(stack.home.parent / "model")}, "calibration": {"seq_len": 64}}
    matrix = {"/config/preset": ["fp8", "w4a16"], "/calibration/num_samples": [2, 4]}
    sweep = client.cancel_sweep(client.submit_sweep(job, matrix, name="which scheme").id)
    page.goto("/ui/")
    row = page.get_by_role("row").filter(has_text="which scheme")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("4 runs of model")
    expect(row).to_contain_text("preset (2) × num_samples (2)")
    expect(row).to_contain_text("4 cancelled")
    check_accessible(page)
    finished = sweep.jobs[1].id
    done = SUCCEEDED | {"name": "the second"}

    def succeed(answer: Any) -> None:
        next(each for each in answer["jobs"] if each["id"] == finished).update(done)

    change(page, f"**/v1/sweeps/{sweep.id}", succeed)
    row.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("which scheme")
    heads = page.get_by_role("columnheader").all_inner_texts()
    assert heads[:4] == ["preset", "num_samples", "Run", "State"]
    rows = page.get_by_role("row")
    expect(rows).to_have_count(5)
    expect(rows.nth(1)).to_contain_text("Cancelled")
    second = rows.nth(2)
    assert second.get_by_role("cell").all_inner_texts()[:3] == ["fp8", "4", "the second"]
    expect(second).to_contain_text("✕ degraded60.0 MB0.05 (0.048 to 0.052)+0.63 %")
    check_accessible(page)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate(TOO_WIDE) <= 0
