"""A real browser on the real service: PostgreSQL, Valkey, the API, a worker with the real engine; tiny models."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from bitfoundry.client.service import Client
from bitfoundry.local.stack import LocalStack
from tests.support.chromium import DASHBOARD, ROOT, open_browser
from tests.support.models import tiny_model

SHORT_TIMES = {"BITFOUNDRY_LEASE_S": "10", "BITFOUNDRY_HEARTBEAT_S": "1", "BITFOUNDRY_POLL_S": "1"}
WAIT_MS = 60_000  # for what comes in a second, unless the machine is full
NUM_BLOCKS = 12
NOTIFICATIONS = """
window.Notification = class {
  static permission = window.name || "default";
  static async requestPermission() { return (Notification.permission = window.name = "granted"); }
  constructor(title, options) { console.log(JSON.stringify([title, options.body, options.tag])); }
};
"""
"""Script in place of the browser's own notifications, which it has none of without a screen. It permits all of them."""
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """The service with the models `model` (three blocks) and `deep` below its home."""
    built = ROOT / "api" / "ui" / "index.html"
    assert built.is_file(), "the dashboard is not built: run `make ui`"
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="bf-test-", dir="/tmp") as folder:
        for name, value in SHORT_TIMES.items():
            patch.setenv(name, value)
        patch.setenv("BITFOUNDRY_PUBLISH_URLS", f"file://{folder}/published")
        patch.delenv("DATABASE_URL", raising=False)
        patch.delenv("BROKER_URL", raising=False)
        with LocalStack(Path(folder) / "home", 0, model_roots=[Path(folder)]) as stack:
            tiny_model(stack.home.parent / "model")
            tiny_model(stack.home.parent / "deep", num_hidden_layers=NUM_BLOCKS)
            yield stack


@pytest.fixture
def client(stack: LocalStack) -> Iterator[Client]:
    with Client(stack.url, stack.api_key) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def context(browser: Browser, stack: LocalStack) -> Iterator[BrowserContext]:
    """A fresh browser profile. What a page asked for elsewhere, and what went wrong in it, fails the test."""
    context = browser.new_context(base_url=stack.url, viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT_MS)
    elsewhere: list[str] = []
    errors: list[str] = []
    context.on("request", lambda request: request.url.startswith(stack.url) or elsewhere.append(request.url))
    context.on("console", lambda message: message.type == "error" and errors.append(message.text))
    context.on("weberror", lambda error: errors.append(str(error.error)))
    yield context
    for page in context.pages:  # an answer may be under way through a test's route
        page.unroute_all(behavior="ignoreErrors")
    context.close()
    assert elsewhere == []
    # the browser itself notes answers with an error status, and a service that is away: the page shows those
    assert [error for error in errors if not error.startswith("Failed to load resource")] == []


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


@pytest.fixture
def signed_in(page: Page, stack: LocalStack) -> Page:
    """A page of somebody who took the link that `bitfoundry up` prints."""
    page.goto(f"/ui/#key={stack.api_key}")
    page.get_by_role("heading", name="Runs").wait_for()
    return page


@pytest.fixture
def notified(signed_in: Page) -> Page:
    """A page that may show notifications: each is a message on its console, [title, body, tag]."""
    signed_in.add_init_script(NOTIFICATIONS)
    signed_in.reload()
    return signed_in


@pytest.fixture
def check_accessible() -> Callable[[Page], None]:
    """axe's rules for WCAG 2.2 AA, in both schemes: no violation at all."""
    axe = (DASHBOARD / "node_modules" / "axe-core" / "axe.min.js").read_text()
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]

    def check(page: Page) -> None:
        page.evaluate(axe)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            found: dict[str, Any] = page.evaluate(f"axe.run({{runOnly: {tags}}})")
            said = [
                f"{each['id']}: {node['html'][:200]} ({node['failureSummary'][:300]})"
                for each in found["violations"]
                for node in each["nodes"][:3]
            ]
            assert said == [], f"{page.url} {scheme}"
            assert len(found["passes"]) > 10  # it did look

    return check
