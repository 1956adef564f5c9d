"""What people come for, from the first page to the last, on the real service: no answer is changed."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from sqlalchemy import create_engine, text

from bitfoundry.client.answers import Job
from bitfoundry.client.service import Client
from bitfoundry.local.stack import LocalStack
from tests.support.chromium import TOO_WIDE
from tests.support.models import tiny_model

pytestmark = pytest.mark.slow

CALIBRATION = {"source": "builtin", "num_samples": 4, "seq_len": 64}
JOB_LIMIT_MS = 240_000
MOST_CLICKS = 6
COUNT_CLICKS = "addEventListener('click', event => { event.isTrusted && console.debug('clicked') }, true)"


@pytest.fixture
def clicks(page: Page) -> list[str]:
    """The clicks on pages from now on. To choose from a list is one."""
    seen: list[str] = []
    page.add_init_script(COUNT_CLICKS)
    page.on("console", lambda message: message.text == "clicked" and seen.append(message.text))
    return seen


@pytest.fixture(scope="module")
def finished(stack: LocalStack) -> list[Job]:
    """Two results of one model."""
    with Client(stack.url, stack.api_key) as client:
        jobs = [
            client.submit(stack.home.parent / "model", config=preset, calibration=CALIBRATION, name=f"as {preset}")
            for preset in ("fp8", "w4a16")
        ]
        return [client.wait(job.id, timeout_s=JOB_LIMIT_MS / 1000) for job in jobs]


@pytest.fixture
def phone(browser: Browser, stack: LocalStack) -> Iterator[Page]:
    """A touch screen of 390 px, signed in."""
    size = {"width": 390, "height": 844}
    with browser.new_context(base_url=stack.url, viewport=size, has_touch=True, is_mobile=True) as context:
        page = context.new_page()
        page.goto(f"/ui/#key={stack.api_key}")
        yield page


def test_from_an_empty_dashboard_to_a_downloaded_checkpoint(
    clicks: list[str], signed_in: Page, stack: LocalStack, tmp_path: Path, check_accessible: Callable[[Page], None]
) -> None:
    """Nothing is typed: the page offers the models that are there. This test comes first, while there is no run."""
    page = signed_in
    expect(page.get_by_text("No runs yet.")).to_be_visible()
    expect(page.get_by_role("link", name="Quantize deep")).to_be_visible()
    check_accessible(page)
    page.get_by_role("link", name="Quantize model").click()
    expect(page.get_by_label("Models on the server")).to_have_value(str(stack.home.parent / "model"))
    expect(page.get_by_role("region", name="Plan").get_by_text("in 3 blocks")).to_be_visible()
    check_accessible(page)
    page.get_by_role("button", name="Start job").click()
    expect(page.locator("main .state").first).to_have_text("✓ Succeeded", timeout=JOB_LIMIT_MS)
    expect(page.get_by_role("region", name="Result")).to_be_visible()
    with page.expect_download() as downloading:
        page.get_by_role("link", name="Download all files").click()
    assert len(clicks) <= MOST_CLICKS, f"{len(clicks)} clicks"
    with tarfile.open(downloading.value.path()) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert downloading.value.suggested_filename == f"{folder.name}.tar"
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert {file["path"] for file in manifest["files"]} >= {"config.json", "report.json"}
    for file in manifest["files"]:
        assert hashlib.sha256((folder / file["path"]).read_bytes()).hexdigest() == file["sha256"], file["path"]


def test_from_a_failure_to_a_result(
    signed_in: Page, stack: LocalStack, client: Client, check_accessible: Callable[[Page], None]
) -> None:
    """A file of the model goes away while the job waits. It is put back, and a button of the failure does the rest."""
    page = signed_in
    model = tiny_model(stack.home.parent / "fragile")
    weights, hidden = model / "model.safetensors", stack.home.parent / "hidden.safetensors"
    first = client.submit(stack.home.parent / "deep", config="w4a16", calibration=CALIBRATION, name="in the way")
    job = client.submit(model, config="fp8", calibration=CALIBRATION, name="fragile")
    page.goto(f"/ui/jobs/{job.id}")
    expect(page.locator("main .state").first).to_have_text("◷ Queued")
    weights.rename(hidden)
    client.cancel(first.id)
    failure = page.get_by_role("region", name="Failure")
    expect(failure.get_by_role("heading")).to_contain_text("Failed", timeout=JOB_LIMIT_MS)
    expect(failure).to_contain_text("safetensors")
    check_accessible(page)
    hidden.rename(weights)
    failure.get_by_role("button", name="Retry", exact=True).click()
    expect(page.locator("main .state").first).to_have_text("✓ Succeeded", timeout=JOB_LIMIT_MS)
    expect(failure).to_be_hidden()
    expect(page.get_by_text("attempt 2")).to_be_visible()
    expect(page.get_by_role("region", name="Result")).to_be_visible()


def test_a_paused_run_is_resumed(signed_in: Page, stack: LocalStack, client: Client) -> None:
    page = signed_in
    job = client.submit(stack.home.parent / "deep", config="w4a16", calibration=CALIBRATION, name="with a rest")
    page.goto(f"/ui/jobs/{job.id}")
    page.get_by_role("button", name="Pause").click()
    state = page.locator("main .state").first
    expect(state).to_contain_text("Paused", timeout=JOB_LIMIT_MS)
    page.get_by_role("button", name="Resume").click()
    expect(state).to_have_text("✓ Succeeded", timeout=JOB_LIMIT_MS)


def test_a_failed_run_is_resumed_where_it_stopped(signed_in: Page, stack: LocalStack, client: Client) -> None:
    """Its time is up soon after its first saved block: the database is told a limit then, as the job had none."""
    page, slow = signed_in, CALIBRATION | {"num_samples": 128, "seq_len": 128}
    job = client.submit(stack.home.parent / "deep", config="w4a16", calibration=slow, name="out of time")
    next(event for event in client.stream_events(job.id) if event.kind == "saved")
    limit_runtime(stack, job, 1)
    page.goto(f"/ui/jobs/{job.id}")
    failure = page.get_by_role("region", name="Failure")
    expect(failure.get_by_role("heading")).to_contain_text("Failed in quantize, at block", timeout=JOB_LIMIT_MS)
    expect(page.get_by_role("region", name="Phases")).to_contain_text("Saved progress is kept until")
    resume = failure.get_by_role("button", name=re.compile("^Resume after block"))
    next_block = int(resume.inner_text().split()[3])
    limit_runtime(stack, job, None)
    last = max(event.seq for event in client.events(job.id))
    resume.click()
    expect(page.locator("main .state").first).to_have_text("✓ Succeeded", timeout=JOB_LIMIT_MS)
    layers = [event.data["name"] for event in client.events(job.id, after=last, kinds=["layer_quantized"])]
    assert min(int(name.split(".")[2]) for name in layers) == next_block


def limit_runtime(stack: LocalStack, job: Job, seconds: int | None) -> None:
    engine = create_engine(stack.database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE job SET max_runtime_s = :s WHERE id = :id"), {"s": seconds, "id": job.id})
    engine.dispose()


def test_from_a_comparison_to_a_publication(
    signed_in: Page, finished: list[Job], stack: LocalStack, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    page.goto(f"/ui/jobs/new?path={stack.home.parent / 'model'}&preset=w4a16")
    expected = page.get_by_role("region", name="Plan").get_by_text("An earlier run with w4a16 + gptq is")
    expect(expected).to_contain_text("as w4a16")
    plan = page.get_by_role("region", name="Plan")
    expect(plan).to_contain_text(re.compile("Expected time.* of this model and preset with other settings"))
    page.get_by_text("More settings").click()
    page.get_by_label("Samples").fill("4")
    page.get_by_label("Calibration Sequence length").fill("64")
    expect(plan).to_contain_text(re.compile(r"Expected timeabout .* as earlier runs of this model with these settings"))
    expect(plan).to_contain_text("Algorithmsgptq")
    page.get_by_label("For a goal").check()
    expect(plan).to_contain_text("gptq or none (rounds to nearest) for the first candidate, depending on its schemes")
    page.goto("/ui/")
    for job in finished:
        page.get_by_label(f"Select {job.name}").check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("img", name="Perplexity and size of each run")).to_be_visible()
    page.get_by_role("rowheader", name="as fp8").get_by_role("link").click()
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_role("button", name="Publish…").click()
    dialog = page.get_by_role("dialog", name="Publish artifact")
    dialog.get_by_label("Storage URL").check()
    dialog.get_by_label("URL", exact=True).fill("file:///etc/published")
    dialog.get_by_role("button", name="Preview").click()
    expect(dialog.get_by_role("alert")).to_contain_text("may not publish to")
    dialog.get_by_label("URL", exact=True).fill(f"file://{stack.home.parent}/published/best")
    dialog.get_by_label("Publish also if the verdict is degraded or broken").check()
    dialog.get_by_role("button", name="Preview").click()
    expect(dialog.get_by_text("will be published to")).to_be_visible()
    check_accessible(page)
    dialog.get_by_role("button", name="Publish", exact=True).click()
    expect(page.get_by_text("✓ Published")).to_be_visible(timeout=JOB_LIMIT_MS)
    check_accessible(page)
    published = stack.home.parent / "published" / "best"
    assert any(published.rglob("config.json"))
    page.goto(f"/ui/models?model={stack.home.parent / 'model'}")
    row = page.get_by_role("row").filter(has_text="as fp8")
    expect(row).to_contain_text("/published/best")


def test_a_phone(phone: Page, finished: list[Job], check_accessible: Callable[[Page], None]) -> None:
    """Every step fits the width, and what is to be pressed can be pressed by a finger."""
    page = phone

    def check_fits() -> None:
        assert page.evaluate(TOO_WIDE) <= 0, page.url
        check_accessible(page)

    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    check_fits()
    page.get_by_role("link", name="New job").first.tap()
    page.get_by_label("Models on the server").select_option(index=1)
    expect(page.get_by_role("region", name="Plan").get_by_text("Peak memory")).to_be_visible()
    page.get_by_label("Uniform").tap()
    page.get_by_text("More settings").tap()
    page.get_by_label("Samples").fill("4")
    page.get_by_label("Calibration Sequence length").fill("64")
    check_fits()
    page.get_by_role("button", name="Start job").tap()
    expect(page.locator("main .state").first).to_have_text("✓ Succeeded", timeout=JOB_LIMIT_MS)
    expect(page.get_by_role("group", name="Relative output error of")).to_be_visible()
    page.get_by_label("View", exact=True).select_option(label="Heatmap: block by module")
    expect(page.get_by_role("img", name="by module type and block")).to_be_visible()
    check_fits()
    for name in ("Log", "Config", "Artifacts", "Events"):
        page.get_by_role("tab", name=name).tap()
        page.wait_for_timeout(300)
        check_fits()
    with page.expect_download() as downloading:
        page.get_by_role("tab", name="Artifacts").tap()
        page.get_by_role("link", name="Download all files").tap()
    assert downloading.value.suggested_filename.endswith(".tar")
    page.goto(f"/ui/compare?job={finished[0].id}&job={finished[1].id}")
    expect(page.get_by_role("rowheader", name="as w4a16")).to_be_visible()
    check_fits()
    page.goto(f"/ui/models?model={finished[0].model['path']}")
    expect(page.get_by_role("row").filter(has_text="as fp8")).to_be_visible()
    check_fits()
