"""The long walk: real jobs from the page to their proof, watched live, through a lost service."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from bitfoundry.client.answers import Job
from bitfoundry.client.service import Client
from bitfoundry.local.stack import LocalStack

pytestmark = pytest.mark.slow

CALIBRATION = {"source": "builtin", "num_samples": 4, "seq_len": 64}
JOB_LIMIT_MS = 180_000


@pytest.fixture(scope="module")
def finished(stack: LocalStack) -> list[Job]:
    """Three runs of one model that have succeeded."""
    with Client(stack.url, stack.api_key) as client:
        jobs = [
            client.submit(stack.home.parent / "model", config=preset, calibration=CALIBRATION, name=f"as {preset}")
            for preset in ("fp8", "w4a16", "int8_dynamic")
        ]
        return [client.wait(job.id, timeout_s=JOB_LIMIT_MS / 1000) for job in jobs]


def bar_values(bar: Locator, page: Page, until: Callable[[], bool]) -> list[int]:
    """What the bar showed, one after the other."""
    seen: list[int] = []
    limit = time.monotonic() + JOB_LIMIT_MS / 1000
    while not until():
        assert time.monotonic() < limit, seen
        shown = page.evaluate("[...document.querySelectorAll('[role=progressbar]')].map(e => +e.ariaValueNow)")
        if shown and (not seen or seen[-1] != shown[0]):
            seen.append(shown[0])
        page.wait_for_timeout(50)
    return seen


def test_a_run_is_started_watched_and_proven(
    signed_in: Page, stack: LocalStack, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    page.get_by_role("link", name="New job").first.click()
    page.get_by_role("textbox", name="Path on the server").fill(str(stack.home.parent / "deep"))
    page.get_by_text("More settings").click()
    page.get_by_label("Samples").fill("8")
    page.get_by_label("Calibration Sequence length").fill("128")
    page.get_by_label("Name", exact=True).fill("watched")
    page.get_by_label("Uniform").check()
    for name in ("quark", "compressed_tensors"):
        page.get_by_label(name, exact=True).check()
    page.get_by_role("button", name="Start job").click()
    expect(page.get_by_role("heading", name="watched")).to_be_visible()
    state = page.locator("main .state").first
    seen = bar_values(page.get_by_role("progressbar"), page, lambda: "Succeeded" in state.inner_text())
    assert any(0 < value < 100 for value in seen), seen  # it has moved while the job ran

    expect(page.get_by_text("Each export was read back from disk")).to_be_visible()
    expect(page.get_by_role("cell", name="✓ compressed_tensors")).to_be_visible()
    chart = page.get_by_role("group", name="Relative output error of")
    expect(chart).to_be_visible()
    expect(page.locator(".chart .legend button")).to_have_count(7)
    chart.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("region", name="Selected layer")).to_contain_text("model.layers.0.")
    page.get_by_text("Show as table").click()
    expect(page.get_by_role("row").filter(has_text="model.layers.").first).to_be_visible()
    check_accessible(page)
    for tab in ("Log", "Config", "Artifacts", "Events"):
        page.get_by_role("tab", name=tab).click()
        expect(page.get_by_role("tab", name=tab)).to_have_attribute("aria-selected", "true")
        page.wait_for_timeout(300)
        check_accessible(page)
    expect(page.get_by_role("row").filter(has_text="state changed").first).to_be_visible()
    page.set_viewport_size({"width": 360, "height": 740})
    page.get_by_role("tab", name="Overview").click()
    expect(chart).to_be_visible()
    check_accessible(page)
    page.get_by_role("tab", name="Artifacts").click()
    with page.expect_download() as downloading:
        page.get_by_role("link", name="report.json").click()
    report = json.loads(Path(downloading.value.path()).read_text())
    assert report["proof"].keys() == {"quark", "compressed_tensors"}


def test_runs_are_compared(signed_in: Page, finished: list[Job], check_accessible: Callable[[Page], None]) -> None:
    page = signed_in
    assert [job.state for job in finished] == ["succeeded"] * 3
    for name in ("as fp8", "as w4a16"):
        page.get_by_label(f"Select {name}").check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("heading", name="Compare")).to_be_visible()
    smaller = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="as w4a16"))
    expect(smaller).to_contain_text("% better")
    assert "−" in smaller.inner_text()  # its sign, not only a colour
    expect(smaller).to_contain_text(re.compile(r"% to [+−]"))  # the interval of the ratio comes with the summary
    expect(page.get_by_role("img", name="Perplexity and size of each run")).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="/config/global_quant_config/weight/dtype")).to_contain_text(
        "≠ uint4"
    )
    page.get_by_label("Add a finished run").select_option(
        label=f"as int8_dynamic · int8_dynamic · {finished[2].id[-6:]}"
    )
    expect(page.get_by_role("rowheader", name="as int8_dynamic")).to_be_visible()
    page.get_by_text("Layers with the largest differences").click()
    outputs = page.get_by_role("region", name="Sample outputs")
    outputs.get_by_text("Answers of the original and of 3 runs").click()
    runs = ["as fp8", "as w4a16", "as int8_dynamic"]
    expect(outputs.get_by_role("columnheader")).to_have_text(["Prompt", "Original model", *runs])
    reports = [json.loads((Path(job.artifact.path) / "report.json").read_text()) for job in finished if job.artifact]
    samples = [sample for report in reports for sample in report["samples"]]
    different = [sample for sample in samples if not sample["original"].startswith(sample["quantized"])]
    assert len(reports) == 3 and different
    expect(outputs.locator("mark")).to_have_count(len(different))
    check_accessible(page)


def test_the_end_of_the_run_on_a_hidden_page_is_told(notified: Page, stack: LocalStack, client: Client) -> None:
    """By the bell, on every page; a page that somebody sees tells nothing."""
    page, streams = notified, []
    page.on("request", lambda request: "/stream" in request.url and streams.append(request.url))
    job = client.submit(stack.home.parent / "deep", config="fp8", calibration=CALIBRATION, name="told")
    page.goto(f"/ui/jobs/{job.id}")
    page.get_by_role("button", name="Notifications").click()
    page.get_by_label("Notify me when a run ends").check()
    with page.expect_console_message(timeout=JOB_LIMIT_MS) as told:
        page.evaluate("Object.defineProperty(document, 'hidden', {get: () => true})")
    title, body, tag = json.loads(told.value.text)
    verdict = client.get(job.id).model_dump()["summary"]["verdict"]
    assert (title, body, tag) == ("told: Succeeded", verdict["sentence"], job.id)
    assert len(streams) == 1


def test_a_shared_report_is_read_without_a_key(
    signed_in: Page, finished: list[Job], stack: LocalStack, browser: Browser, check_accessible: Callable[[Page], None]
) -> None:
    """By somebody who never signed in, until the link is revoked. Its page runs no script and loads nothing else."""
    page = signed_in
    page.goto(f"/ui/jobs/{finished[0].id}")
    page.get_by_role("button", name="Share").click()
    dialog = page.get_by_role("dialog", name="Share this run")
    dialog.get_by_role("button", name="Create link").click()
    link = dialog.get_by_label("New link").locator("code").inner_text()
    assert link.startswith(f"{stack.url}/v1/shared/")
    with browser.new_context() as stranger:
        loaded: list[str] = []
        stranger.on("request", lambda request: loaded.append(request.url))
        shared = stranger.new_page()
        shared.goto(link)
        expect(shared.get_by_role("heading", level=1)).to_have_text("model, quantized")
        assert [url for url in loaded if not url.endswith("/favicon.ico")] == [link]
        assert str(stack.home.parent) not in shared.content()
        check_accessible(shared)
        dialog.get_by_role("button", name="Revoke").click()
        expect(dialog.get_by_role("button", name="Revoke")).to_have_count(0)
        answer = shared.goto(link)
        assert answer and answer.status == 404
        expect(shared.get_by_role("heading", level=1)).to_have_text("This link does not open a report.")
        expect(shared.get_by_text("Ask the sender for a new link.")).to_be_visible()
        check_accessible(shared)


def test_a_result_is_tried_beside_its_original(
    signed_in: Page, finished: list[Job], check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    page.goto(f"/ui/jobs/{finished[1].id}?tab=chat")
    page.get_by_role("button", name="Start chat").click()
    prompt = page.get_by_role("textbox", name="Prompt")
    prompt.press_sequentially("for")
    prompt.press("Shift+Enter")
    expect(prompt).to_have_value("for\n")
    prompt.fill("for example")
    prompt.press("Enter")
    expect(page.get_by_role("heading", name="Quantized")).to_be_visible()
    marked = page.locator(".answer mark")
    expect(marked).to_have_css("text-decoration-line", "underline")  # not by its colour alone
    expect(page.get_by_text("differs from token")).to_be_visible()
    expect(prompt).to_have_value("")
    check_accessible(page)
    held: list[Route] = []
    page.route("**/turns", lambda route: held.append(route))
    prompt.fill("and then")
    with page.expect_request("**/turns"):
        page.get_by_role("button", name="Send").click()
    prompt.fill("what comes next")  # while the one before it is being sent
    with page.expect_response("**/turns"):
        held[0].continue_()
    expect(page.locator(".prompt")).to_have_text(["for example", "and then"])
    expect(page.get_by_role("heading", name="Quantized")).to_have_count(2)  # both prompts are answered
    expect(prompt).to_have_value("what comes next")
    page.set_viewport_size({"width": 360, "height": 740})
    original, quantized = (
        page.get_by_role("heading", name=name).first.bounding_box() for name in ("Original", "Quantized")
    )
    assert original and quantized and original["y"] < quantized["y"], "one above the other"
    page.reload()  # the chat goes on
    expect(page.get_by_text("for example")).to_be_visible()
    page.get_by_role("button", name="End chat").click()
    expect(page.get_by_text("You ended this chat.")).to_be_visible()
    check_accessible(page)
    expect(page.get_by_role("button", name="Start a new chat")).to_be_visible()


def test_the_results_of_a_model_are_walked(
    signed_in: Page, finished: list[Job], client: Client, check_accessible: Callable[[Page], None]
) -> None:
    page, first = signed_in, finished[0]
    assert first.artifact and first.artifact.path
    client.cancel(client.submit(Path(first.artifact.path), config="int8_dynamic", calibration=CALIBRATION).id)
    page.goto(f"/ui/jobs/{first.id}")
    page.get_by_role("link", name=str(first.model["path"])).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("model")
    expect(page.get_by_role("img", name="KL divergence and size of each result")).to_be_visible()
    row = page.get_by_role("row").filter(has_text="as fp8")
    expect(row).to_contain_text(re.compile(r"\d to \d"))  # the interval of the divergence
    check_accessible(page)
    row.get_by_role("link", name=f"job_…{first.id[-6:]}").click()
    expect(page.get_by_text("This model is the result of run")).to_be_visible()
    expect(page.get_by_text("No run of this model has succeeded yet")).to_be_visible()
    check_accessible(page)
    page.get_by_role("link", name="Models", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Models")
    expect(page.get_by_role("link", name="model", exact=True).first).to_be_visible()
    check_accessible(page)
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


def test_from_the_three_questions_to_a_comparison_and_a_chat(
    signed_in: Page, stack: LocalStack, finished: list[Job]
) -> None:
    page = signed_in
    page.get_by_role("link", name="New job").first.click()
    page.get_by_role("textbox", name="Path on the server").fill(str(stack.home.parent / "model"))
    page.get_by_label("Where will it run?").select_option(label="Transformers")
    page.get_by_label("Device").fill("cpu")
    page.get_by_label("How large may it be?").fill("1GB")
    page.get_by_label("How good must it be?").select_option(label="The best that fits")
    page.get_by_text("More settings").click()
    page.get_by_label("Samples").fill("4")
    page.get_by_label("Calibration Sequence length").fill("64")
    page.get_by_label("Name", exact=True).fill("for a goal")
    page.get_by_role("button", name="Start job").click()
    expect(page.locator("main .state").first).to_contain_text("Succeeded", timeout=JOB_LIMIT_MS)

    page.get_by_role("link", name="Runs", exact=True).click()
    for name in ("for a goal", str(finished[0].name)):
        page.get_by_label(f"Select {name}").check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("rowheader", name="for a goal")).to_be_visible()
    expect(page.get_by_role("img", name="Perplexity and size of each run")).to_be_visible()

    page.get_by_role("link", name="for a goal").first.click()
    page.get_by_role("tab", name="Try it").click()
    page.get_by_role("button", name="Start chat").click()
    page.get_by_role("textbox", name="Prompt").fill("for example")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("heading", name="Quantized")).to_be_visible()
    page.get_by_role("button", name="End chat").click()
    expect(page.get_by_text("You ended this chat.")).to_be_visible()


def test_a_running_job_is_cancelled_in_the_list(signed_in: Page, stack: LocalStack, client: Client) -> None:
    page = signed_in
    jobs = [
        client.submit(stack.home.parent / "deep", config="w4a16", calibration=CALIBRATION, name=f"unwanted {n}")
        for n in (1, 2)
    ]
    expect(page.get_by_role("row").filter(has_text="unwanted 1")).to_contain_text("Running", timeout=JOB_LIMIT_MS)
    for n in (1, 2):
        page.get_by_label(f"Select unwanted {n}").check()
    page.get_by_role("region", name="Selected runs").get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel 2 runs").click()
    for n in (1, 2):
        expect(page.get_by_role("row").filter(has_text=f"unwanted {n}")).to_contain_text("Cancelled", timeout=60_000)
    assert {client.get(job.id).state for job in jobs} == {"cancelled"}


def test_a_dataset_is_uploaded_and_looked_into(
    signed_in: Page, tmp_path: Path, client: Client, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"The row number {n} of a small file."}) + "\n" for n in range(200)))
    large = tmp_path / "large.jsonl"
    large.write_text("".join(json.dumps({"text": f"{n} " + "word " * 600}) + "\n" for n in range(6000)))
    assert large.stat().st_size > 17 << 20  # more than a part
    page.goto("/ui/datasets")
    for path, num_rows in ((rows, 200), (large, 6000)):
        page.get_by_role("button", name="Upload dataset").click()
        page.get_by_label("File").set_input_files(path)
        page.get_by_role("button", name="Upload", exact=True).click()
        expect(page.get_by_text(f"✓ {num_rows} rows")).to_be_visible(timeout=60_000)
        expect(page.get_by_role("rowheader").first).to_be_visible()
        check_accessible(page)
        page.get_by_role("button", name="Done").click()
    assert {dataset.name for dataset in client.datasets.list()} >= {"rows.jsonl", "large.jsonl"}
    page.get_by_role("button", name="rows.jsonl").click()
    expect(page.get_by_role("dialog")).to_contain_text("Duplicates")
    check_accessible(page)


def test_a_run_goes_on_live_when_the_service_comes_back(signed_in: Page, stack: LocalStack, client: Client) -> None:
    page = signed_in
    job = client.submit(stack.home.parent / "deep", config="fp8", calibration=CALIBRATION, name="through a break")
    page.goto(f"/ui/jobs/{job.id}")
    expect(page.locator("main .state").first).to_contain_text("Running", timeout=JOB_LIMIT_MS)
    stack._programs["api"].kill()
    expect(page.get_by_text("The service is not responding.")).to_be_visible(timeout=30_000)
    expect(page.get_by_text("The event stream was interrupted")).to_be_visible()
    stack.tend()
    expect(page.get_by_text("The service is not responding.")).to_be_hidden(timeout=60_000)
    expect(page.get_by_text("The event stream was interrupted")).to_be_hidden(timeout=60_000)
    expect(page.locator("main .state").first).to_have_text("✓ Succeeded", timeout=JOB_LIMIT_MS)
    rows = page.evaluate("document.querySelector('.chart [role=img]').ariaLabel")
    assert f"{7 * 12} layers" in rows  # each of them once, whatever connection told it


def test_keys_and_webhooks_are_made(signed_in: Page, check_accessible: Callable[[Page], None]) -> None:
    page = signed_in
    page.goto("/ui/keys")
    page.get_by_role("button", name="New key").click()
    page.get_by_label("Name", exact=True).fill("nightly")
    check_accessible(page)
    page.get_by_role("button", name="Create key").click()
    expect(page.get_by_label("New API key")).to_contain_text("bf_")
    check_accessible(page)
    page.get_by_role("button", name="Close").click()
    row = page.get_by_role("row").filter(has_text="nightly")
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(row).to_contain_text("Revoked")
    page.goto("/ui/webhooks")
    page.get_by_role("button", name="New webhook").click()
    page.get_by_label("URL").fill("https://127.0.0.1/hook")
    page.get_by_role("button", name="Create webhook").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_be_visible()  # not a public address
    check_accessible(page)
