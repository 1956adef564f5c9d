"""The registry: a result becomes a version, one member asks for production, and another one approves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from api.lineage.schemas import JOB
from api.registry.schemas import MODEL, REQUEST, VERSION
from bitfoundry.client.service import Client
from bitfoundry.local.stack import LocalStack
from tests.support.chromium import TOO_WIDE

JOB_LIMIT_S = 180


@pytest.fixture
def sign_in(browser: Browser, stack: LocalStack, client: Client) -> Iterator[Callable[[str], Page]]:
    """``sign_in("Ada")``: a page of a new member with the role admin."""
    contexts = []

    def open_page(name: str) -> Page:
        key = client.account.add_member(name, "admin").first_key
        assert key
        context = browser.new_context(base_url=stack.url, viewport={"width": 1280, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.goto(f"/ui/#key={key.key}")
        page.get_by_role("heading", name="Runs").wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.slow
def test_a_version_goes_into_production(
    sign_in: Callable[[str], Page], stack: LocalStack, client: Client, check_accessible: Callable[[Page], None]
) -> None:
    job = client.submit(stack.home.parent / "model", config="fp8", name="nightly", evaluation={"num_windows": 1})
    assert client.wait(job.id, timeout_s=JOB_LIMIT_S).state == "succeeded"
    ada, grace = sign_in("Ada"), sign_in("Grace")

    ada.goto(f"/ui/jobs/{job.id}")
    ada.get_by_role("button", name="Add to registry").click()
    expect(ada.get_by_label("Model", exact=True)).to_have_value("model")
    ada.get_by_label("Model", exact=True).fill("support-bot")
    ada.keyboard.press("Enter")
    expect(ada.get_by_role("heading", name="support-bot")).to_be_visible()
    row = ada.get_by_role("row").filter(has_text="nightly")
    expect(row).to_contain_text("Ada")
    row.get_by_role("button", name="Set alias of version 1").press("Enter")
    ada.get_by_label("Alias", exact=True).fill("candidate")
    ada.keyboard.press("Enter")
    expect(row).to_contain_text("candidate")
    row.get_by_role("button", name="Set alias of version 1").press("Enter")
    ada.get_by_label("Alias", exact=True).fill("production")
    ada.get_by_label("Reason", exact=True).fill("It answers the new questions.")
    ada.keyboard.press("Enter")
    pending = ada.get_by_role("region", name="Pending requests")
    expect(pending).to_contain_text("new → version 1")
    expect(pending).to_contain_text("Another admin decides it.")
    expect(pending.get_by_role("button", name="Withdraw support-bot@production")).to_be_visible()
    expect(pending.get_by_role("button", name="Approve")).to_have_count(0)
    check_accessible(ada)

    grace.get_by_role("link", name="Registry").click()
    grace.get_by_role("button", name="Approve support-bot@production").press("Enter")
    check_accessible(grace)
    grace.get_by_label("Comment", exact=True).fill("Tried it.")
    grace.keyboard.press("Enter")
    expect(grace.get_by_role("region", name="Pending requests")).to_have_count(0)
    expect(grace.get_by_role("row").filter(has_text="support-bot")).to_contain_text("production: 1 protected")
    assert client.registry.version("support-bot@production").job_id == job.id
    [request] = client.registry.requests()
    assert (request.state, request.comment) == ("approved", "Tried it.")
    grace.get_by_text("Decided requests", exact=True).click()
    decided = grace.get_by_role("list", name="Decided requests")
    expect(decided).to_contain_text("support-bot@production new → version 1 ✓ approved")
    expect(decided).to_contain_text("“Tried it.”")
    expect(decided).to_contain_text("asked by Ada; decided by Grace")
    check_accessible(grace)
    for page, path in ((grace, "/ui/registry"), (ada, "/ui/registry?name=support-bot")):
        page.set_viewport_size({"width": 390, "height": 844})
        page.goto(path)
        expect(page.get_by_role("row").filter(has_text="production")).to_be_visible()
        assert page.evaluate(TOO_WIDE) <= 0, path

    grace.goto(f"/ui/jobs/{job.id}")
    grace.get_by_role("button", name="Delete").click()
    grace.get_by_role("dialog").get_by_role("button", name="Delete run").click()
    expect(grace.get_by_role("alert")).to_contain_text("support-bot@1")


def test_verdicts_stand_where_people_decide(
    sign_in: Callable[[str], Page], check_accessible: Callable[[Page], None]
) -> None:
    page = sign_in("Linus")
    sentence = "Do not ship it: of 100 next words, 3 are the original's."
    verdict: dict[str, Any] = {"level": "broken", "reason": "far", "sentence": sentence, "advice": None, "steps": []}
    broken = VERSION | {"verdict": "broken"}
    answers: dict[str, Any] = {
        "models?*": page_of(MODEL | {"latest_verdict": "broken"}),
        "requests?*": page_of(REQUEST | {"verdict": "broken"}, REQUEST | {"id": "rqs_2", "verdict": None}),
        "models/support-bot/versions?*": page_of(broken, VERSION | {"version": 2, "job_id": "good"}),
        "protected-aliases": {"aliases": ["production"]},
    }
    for address, answer in answers.items():
        give(page, f"**/v1/registry/{address}", answer)
    goal = {"is_met": False, "why": "it keeps 91 % of 95 %"}
    give(page, f"**/v1/jobs/{JOB}", {"id": JOB, "summary": {"verdict": verdict, "goal": goal}})
    give(page, "**/v1/jobs/good", {"id": "good", "summary": {"verdict": verdict | {"level": "good"}}})

    page.get_by_role("link", name="Registry").click()
    expect(page.get_by_role("row").filter(has_text="support-bot")).to_contain_text("✕ broken")
    requests = page.get_by_role("region", name="Pending requests").get_by_role("listitem")
    expect(requests.nth(0)).to_contain_text("version 2 → 3 · ✕ broken")
    expect(requests.nth(1)).to_contain_text("version 2 → 3 · no verdict")
    requests.nth(0).get_by_role("button", name="Approve support-bot@production").click()
    expect(page.get_by_role("dialog")).to_contain_text("version 2 → 3 · ✕ broken. The alias moves now.")
    check_accessible(page)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate(TOO_WIDE) <= 0
    page.set_viewport_size({"width": 1280, "height": 900})
    page.keyboard.press("Escape")

    page.get_by_role("row").get_by_role("link", name="support-bot").click()
    page.get_by_role("button", name="Set alias of version 3").click()
    notices = page.get_by_role("dialog").locator(".notice")
    expect(notices.nth(0)).to_have_text(f"This result is ✕ broken. {sentence}")
    expect(notices.nth(1)).to_have_text("This result missed its goal: it keeps 91 % of 95 %.")
    check_accessible(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Set alias of version 2").click()
    expect(page.get_by_role("dialog").get_by_label("Alias", exact=True)).to_be_visible()
    expect(page.get_by_role("dialog").locator(".notice")).to_have_count(0)


def give(page: Page, address: str, answer: dict[str, Any]) -> None:
    page.route(address, lambda route: route.fulfill(json=answer))


def page_of(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"data": rows, "has_more": False, "next_cursor": None}
