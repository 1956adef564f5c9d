"""Pages that have something to show: a heatmap of a real run, and webhooks, queue, workers and audit with entries."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from bitfoundry.client.answers import Job
from bitfoundry.client.service import Client
from bitfoundry.local.stack import LocalStack
from quantcore.report import local_runs
from quantcore.report.local_runs import LocalRun
from quantcore.report.values import Report
from tests.support.chromium import TOO_WIDE
from tests.support.reports import report
from tests.support.waiting import wait_until

JOB_LIMIT_S = 180
NUM_BLOCKS, NUM_KINDS = 3, 7
CALIBRATION = {"num_samples": 2, "seq_len": 64}


@pytest.fixture(scope="module", autouse=True)
def local_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    """A result of the command line. The service, which starts after this, shows it and allows local webhooks."""
    folder = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BITFOUNDRY_WEBHOOK_NETWORKS", "127.0.0.1")
        patch.setenv("BITFOUNDRY_SHOW_LOCAL_RUNS", "true")
        patch.setenv("BITFOUNDRY_HOME", str(folder))
        (folder / "out").mkdir()
        (folder / "out" / "MANIFEST.json").write_text("{}")
        (folder / "out" / "report.json").write_text(json.dumps(report(size=19000)))
        yield local_runs.record(folder / "out", Report.model_validate(report(size=19000)), "w4a16")


@pytest.fixture(scope="module")
def finished(stack: LocalStack) -> Job:
    with Client(stack.url, stack.api_key) as client:
        job = client.submit(stack.home.parent / "model", config="w4a16", calibration=CALIBRATION)
        return client.wait(job.id, timeout_s=JOB_LIMIT_S)


def test_the_heatmap_shows_the_worst_layer_in_the_strongest_colour(
    signed_in: Page, finished: Job, client: Client, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    errors = {
        event.data["name"]: event.data["output_error"]
        for event in client.events(finished.id, kinds=["layer_quantized"])
    }
    worst, best = max(errors, key=errors.__getitem__), min(errors, key=errors.__getitem__)
    page.goto(f"/ui/jobs/{finished.id}")
    page.get_by_label("View", exact=True).select_option(label="Heatmap: block by module")
    heatmap = page.get_by_role("img", name=f"Relative output error of {len(errors)} layers by module type and block")
    expect(heatmap.locator("tr")).to_have_count(NUM_KINDS)
    expect(heatmap.locator("td:not(.none)")).to_have_count(NUM_KINDS * NUM_BLOCKS)

    def strength(name: str) -> float:
        """Share of the accent in the colour of the layer's cell, in percent."""
        style = "one => getComputedStyle(one).getPropertyValue('--share')"
        return float(heatmap.locator(f"[data-name='{name}']").evaluate(style).removesuffix("%"))

    def colour(name: str) -> str:
        painted: str = heatmap.locator(f"[data-name='{name}']").evaluate("one => getComputedStyle(one).backgroundColor")
        return painted

    strengths = {name: strength(name) for name in errors}
    assert strengths[worst] == max(strengths.values()) == 100 and strengths[best] == min(strengths.values())
    assert colour(worst) != colour(best)
    by_error = sorted(errors, key=errors.__getitem__)
    assert [strengths[name] for name in by_error] == sorted(strengths.values())
    cell = heatmap.locator(f"[data-name='{worst}']")
    expect(cell).to_have_attribute("title", re.compile(f"^{re.escape(worst)}: .*%"))
    cell.click()
    selected = page.get_by_role("region", name="Selected layer")
    expect(selected).to_contain_text(worst)
    expect(selected).to_contain_text("in the median channel")  # of the inputs that GPTQ saw
    expect(selected).to_contain_text("Outlier channels of the weight")
    weights = selected.get_by_role("img", name=re.compile(f"^Weights of {re.escape(worst)}: .* counted"))
    expect(weights.locator("rect")).to_have_count(21)
    expect(cell).to_have_class("picked")
    check_accessible(page)


def test_what_the_command_line_made_is_below_the_runs(
    signed_in: Page, local_run: LocalRun, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    local = page.get_by_role("region", name="Made by the command line on this machine")
    expect(local.get_by_role("row").nth(1)).to_contain_text("w4a16")
    check_accessible(page)
    with page.expect_popup() as opened:
        local.get_by_role("link", name="out").click()
    expect(opened.value.get_by_text(local_run.folder)).to_be_visible()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate(TOO_WIDE) <= 0
    page.goto("/ui/?state=succeeded")
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    expect(local).to_have_count(0)


def test_filled_pages_of_operations_are_accessible(
    subtests: pytest.Subtests, signed_in: Page, finished: Job, client: Client, stack: LocalStack,
    check_accessible: Callable[[Page], None],
) -> None:  # fmt: skip
    page = signed_in
    program = client.webhooks.create("http://127.0.0.1:1/hook", ["job.queued"])
    channel = client.webhooks.create("http://127.0.0.1:1/channel", ["job.failed"], format="slack")
    client.account.add_member("Ada Lovelace", "editor")
    [worker] = client.account.workers()
    client.account.order_worker(worker.id, "drain")
    wait_until(lambda: client.account.workers()[0].state == "draining")
    jobs = [
        client.submit(stack.home.parent / "model", config=preset, calibration=CALIBRATION, name=f"waits as {preset}")
        for preset in ("fp8", "w4a16")
    ]
    wait_until(lambda: any(each.tries for each in client.webhooks.deliveries(program.id)))
    shown = {
        "queue": ["waits as fp8", "waits as w4a16"],
        "workers": ["Draining"],
        "audit": ["job.submit", jobs[0].id],
        "members": ["Ada Lovelace"],
        "webhooks": [program.url, channel.url],
    }
    for path, texts in shown.items():
        with subtests.test(path):
            page.goto(f"/ui/{path}")
            for text in texts:
                expect(page.get_by_role("row").filter(has_text=text).first).to_be_visible()
            check_accessible(page)
    page.get_by_role("button", name=program.url).click()
    expect(page.get_by_role("dialog").get_by_role("row").filter(has_text="job.queued").first).to_be_visible()
    check_accessible(page)
    page.goto("/ui/system")  # three parts of the service are well, and no job can run
    expect(page.get_by_text("✕ 0 ready")).to_be_visible()
    expect(page.get_by_text("1 draining")).to_be_visible()
    for job in jobs:
        client.cancel(job.id)
    client.account.order_worker(worker.id, "uncordon")
