"""Sign-in through a real OpenID provider in a real browser. The provider is another site, as it is in life."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect

from api.__main__ import SERVER
from api.main import create_app
from api.settings import Settings
from api.store.engine import Sessions
from api.store.ids import new_id
from api.store.tables.jobs import Project
from tests.support.oidc_settings import with_oidc
from tests.support.real_oidc import CLIENT_ID, SECRET, RealProvider
from tests.support.service_fixtures import sessions, settings  # noqa: F401  fixtures
from tests.support.waiting import wait_until

ACCOUNTS = {
    "lea": {"email": "lea@example.org", "email_verified": True, "groups": ["leads"]},
    "zoe": {"email": "zoe@example.org", "email_verified": True, "groups": ["guests"]},
}


@pytest.fixture
def service(settings: Settings, sessions: Sessions, tmp_path: Path) -> Iterator[str]:  # noqa: F811
    """The address of a service with the projects `default` and `search`: by name, for the provider has the number."""
    with sessions.begin() as session:
        session.add(Project(id=new_id("prj"), name="search"))
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://localhost:{listening.getsockname()[1]}"
    with listening, RealProvider(tmp_path, f"{url}/ui/sign-in", ACCOUNTS) as provider:
        own = with_oidc(settings, tmp_path, provider.issuer, CLIENT_ID, SECRET)
        app = create_app(own.model_copy(update={"public_url": url}))
        running = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, **SERVER))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        wait_until(lambda: running.started or not thread.is_alive())
        yield url
        running.should_exit = True
        thread.join(15)
        assert not thread.is_alive()


@pytest.fixture
def page(browser: Browser, service: str) -> Iterator[Page]:
    context = browser.new_context(base_url=service, viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


def sign_in(page: Page, person: str) -> None:
    page.get_by_role("button", name="Sign in with Example ID").click()
    page.get_by_placeholder("Enter any login").fill(person)
    page.get_by_placeholder("and password").fill("any")
    page.get_by_role("button", name="Sign-in").click()
    page.get_by_role("button", name="Continue").click()


def test_a_person_signs_in_and_changes_the_project(
    page: Page, service: str, check_accessible: Callable[[Page], None]
) -> None:
    """Back on the page from before, without the code in the address, and signed in after a reload, too."""
    page.goto("/ui/models?sort=name")
    expect(page.get_by_role("button", name="Sign in with Example ID")).to_be_visible()
    check_accessible(page)
    sign_in(page, "lea")
    expect(page.get_by_text("lea@example.org")).to_be_visible()
    assert page.url.startswith(f"{service}/ui/models") and "code" not in page.url and "state" not in page.url
    page.reload()
    choice = page.get_by_label("Project", exact=True)
    expect(choice).to_have_value(choice.locator("option", has_text="default").get_attribute("value") or "")
    expect(page.get_by_role("heading", level=1)).to_be_visible()  # the page comes after its frame
    check_accessible(page)
    choice.select_option(label="search")
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    expect(choice.locator("option:checked")).to_have_text("search")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()


def test_whoever_is_not_let_in_reads_why(page: Page, service: str, check_accessible: Callable[[Page], None]) -> None:
    page.goto("/ui/")
    sign_in(page, "zoe")
    expect(page.get_by_role("alert")).to_contain_text("'groups' has guests")
    expect(page.get_by_label("API key")).to_be_visible()  # a key still opens
    assert page.url == f"{service}/ui/"
    check_accessible(page)
    page.goto("/ui/sign-in?code=stolen&state=0")
    expect(page.get_by_role("alert")).to_contain_text("was not started in this browser")
