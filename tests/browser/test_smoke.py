"""The page in short: in, every page there and accessible, a job started and cancelled, out. No job runs to its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from bitfoundry.client import Client
from bitfoundry.local import LocalStack

PAGES = {
    "/": "Runs",
    "/jobs/new": "New job",
    "/compare": "Compare",
    "/datasets": "Datasets",
    "/workers": "Workers",
    "/keys": "Keys",
    "/webhooks": "Webhooks",
    "/audit": "Audit",
    "/system": "System",
    "/nowhere": "No such page",
}


def test_in_with_a_key_and_out(page: Page, stack: LocalStack, check_accessible: Callable[[Page], None]) -> None:
    page.goto("/")
    key = page.get_by_label("API key")
    check_accessible(page)
    key.fill("bf_nonsense")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_text("not a valid key")).to_be_visible()
    key.fill(stack.api_key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    page.reload()  # the cookie stays
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    cookies = page.context.cookies()
    assert [(cookie["httpOnly"], cookie["sameSite"]) for cookie in cookies] == [(True, "Strict")]
    assert page.evaluate("document.cookie + JSON.stringify({...localStorage, ...sessionStorage})") == "{}"
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    assert page.context.request.get("/v1/jobs").status == 401


def test_the_link_signs_in_and_leaves_no_key_in_the_address(signed_in: Page, stack: LocalStack) -> None:
    assert signed_in.url == f"{stack.url}/ui/"


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_there_and_accessible(
    path: str, signed_in: Page, check_accessible: Callable[[Page], None]
) -> None:
    signed_in.goto(f"/ui{path}")
    expect(signed_in.get_by_role("heading", level=1)).to_have_text(PAGES[path])
    signed_in.wait_for_load_state("networkidle") if path == "/nowhere" else signed_in.wait_for_timeout(300)
    check_accessible(signed_in)
    signed_in.set_viewport_size({"width": 360, "height": 740})
    too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert signed_in.evaluate(too_wide) <= 0, "it scrolls sideways at 360 px"


def test_a_job_is_planned_started_and_cancelled(signed_in: Page, stack: LocalStack, client: Client) -> None:
    page = signed_in
    page.keyboard.press("n")
    page.get_by_role("textbox", name="Folder").fill(str(stack.home / "nothing"))
    plan = page.get_by_role("region", name="Plan")
    expect(plan.get_by_role("alert")).to_be_visible()  # there is no such model
    expect(page.get_by_role("button", name="Start the job")).to_be_disabled()
    page.get_by_role("textbox", name="Folder").fill(str(stack.home / "model"))
    expect(page.get_by_text("seq_len is 512, but the model reads at most 256").first).to_be_visible()
    page.get_by_label("Tokens of a sample").fill("64")
    expect(plan.get_by_text("21 in 3 blocks")).to_be_visible()
    page.get_by_label("Name", exact=True).fill("from the page")
    page.get_by_label("Labels").fill("team=search")
    page.get_by_role("tab", name="Copy as").click()
    expect(page.get_by_label("As a command")).to_contain_text("--label team=search")
    page.get_by_role("button", name="Start the job").click()
    expect(page.get_by_role("heading", name="from the page")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.locator("main .state").first).to_have_text("⊘ Cancelled")
    page.get_by_role("link", name="Runs", exact=True).click()
    page.get_by_role("link", name="Cancelled 1").click()
    expect(page).to_have_url(f"{stack.url}/ui/?state=cancelled")
    expect(page.get_by_role("row").filter(has_text="from the page")).to_contain_text("local")  # its owner
    (job,) = client.list(states=["cancelled"])
    assert (job.name, job.labels) == ("from the page", {"team": "search"})


def test_a_lost_connection_is_said_and_comes_back(signed_in: Page, context: BrowserContext) -> None:
    notice = signed_in.get_by_text("The service does not answer")
    context.set_offline(True)
    expect(notice).to_be_visible()
    context.set_offline(False)
    expect(notice).to_be_hidden()
    expect(signed_in.get_by_role("heading", name="Runs")).to_be_visible()
