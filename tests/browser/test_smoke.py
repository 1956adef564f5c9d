"""The page in short: in, every page there and accessible, a job started and cancelled, out. No job runs to its end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from bitfoundry.client.service import Client
from bitfoundry.errors import ApiError
from bitfoundry.local.stack import LocalStack
from tests.support.models import tiny_model
from tests.support.waiting import wait_until

PAGES = {
    "/": "Runs",
    "/jobs/?state=failed": "Runs",
    "/jobs/new": "New job",
    "/models": "Models",
    "/compare": "Compare",
    "/datasets": "Datasets",
    "/registry": "Registry",
    "/workers": "Workers",
    "/keys": "API keys",
    "/webhooks": "Webhooks",
    "/members": "Members",
    "/audit": "Audit log",
    "/project": "Project",
    "/queue": "Queue",
    "/system": "System",
    "/nowhere": "Page not found",
    "/jobs/job_0": "Page not found",
}


def test_in_with_a_key_and_out(page: Page, stack: LocalStack, check_accessible: Callable[[Page], None]) -> None:
    page.goto("/")
    key = page.get_by_label("API key")
    check_accessible(page)
    key.fill("bf_nonsense")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_text("This API key is not valid")).to_be_visible()
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


def test_a_link_that_is_pasted_into_an_open_tab_signs_in(page: Page, stack: LocalStack) -> None:
    """The browser loads no page then: only the part behind the # changes."""
    page.goto("/ui/")
    expect(page.get_by_label("API key")).to_be_visible()
    page.evaluate(f"location.hash = 'key={stack.api_key}'")
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    assert page.url == f"{stack.url}/ui/"


def test_a_key_that_is_revoked_is_said(page: Page, stack: LocalStack, client: Client) -> None:
    key = client.account.create_key("short", scopes=["jobs:read"])
    page.goto(f"/ui/#key={key.key}")
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    client.account.revoke_key(key.id)
    page.reload()
    expect(page.get_by_label("API key")).to_be_visible()
    assert page.get_by_text("You are signed out").count() == 0  # a page that was opened anew knows of no earlier one
    other = client.account.create_key("short", scopes=["jobs:read"])
    page.evaluate(f"location.hash = 'key={other.key}'")
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    client.account.revoke_key(other.id)
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("status").filter(has_text="You are signed out")).to_be_visible()


def test_every_page_is_there_and_accessible(
    subtests: pytest.Subtests, signed_in: Page, check_accessible: Callable[[Page], None]
) -> None:
    page, too_wide = signed_in, "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for path, heading in PAGES.items():
        with subtests.test(path):
            page.set_viewport_size({"width": 1280, "height": 900})
            page.goto(f"/ui{path}")
            expect(page.get_by_role("heading", level=1)).to_have_text(heading)
            page.wait_for_load_state("networkidle") if heading == "Page not found" else page.wait_for_timeout(300)
            check_accessible(page)
            page.set_viewport_size({"width": 360, "height": 740})
            assert page.evaluate(too_wide) <= 0, "it scrolls sideways at 360 px"


def test_a_job_is_planned_started_and_cancelled(signed_in: Page, stack: LocalStack, client: Client) -> None:
    page = signed_in
    page.keyboard.press("n")
    page.get_by_role("textbox", name="Path on the server").fill(str(stack.home / "nothing"))
    plan = page.get_by_role("region", name="Plan")
    expect(plan.get_by_role("alert")).to_be_visible()  # there is no such model
    expect(page.get_by_role("button", name="Start job")).to_be_disabled()
    page.get_by_role("textbox", name="Path on the server").fill(str(stack.home.parent / "model"))
    expect(plan.get_by_text("21 in 3 blocks")).to_be_visible()  # the default length fits the model's 256 tokens
    expect(plan.get_by_text("is chosen from w4a16, int8_weight_only")).to_be_visible()  # for the usual goal
    page.get_by_label("Device").fill("h1000")
    expect(page.get_by_text("'h1000'").first).to_be_visible()
    page.get_by_label("Device").fill("h100")
    page.get_by_label("How good must it be?").select_option(label="The best that fits")
    page.get_by_role("tab", name="Code").click()
    expect(page.get_by_label("Command-line snippet")).to_contain_text("--device h100")
    page.get_by_role("tab", name="Form").click()
    page.get_by_label("Uniform").check()
    page.get_by_text("More settings").click()
    page.get_by_label("Calibration Sequence length").fill("512")
    expect(page.get_by_text("seq_len is 512, but the model reads at most 256").first).to_be_visible()
    page.get_by_label("Calibration Sequence length").fill("64")
    expect(plan.get_by_text("21 in 3 blocks")).to_be_visible()
    expect(page.get_by_text("Algorithms: gptq")).to_be_visible()  # those of the balanced effort
    page.get_by_label("Effort").select_option(label="Fast: rounds to nearest, no data")
    expect(page.get_by_text("Algorithms: none, rounds to nearest")).to_be_visible()
    page.get_by_label("Name", exact=True).fill("from the page")
    page.get_by_label("Labels").fill("team=search")
    page.get_by_role("tab", name="Code").click()
    expect(page.get_by_label("Command-line snippet")).to_contain_text("--label team=search")
    [worker] = client.account.workers()
    client.account.order_worker(worker.id, "drain")  # so that it waits until it is cancelled
    wait_until(lambda: client.account.workers()[0].state == "draining")
    page.get_by_role("button", name="Start job").click()
    expect(page.get_by_role("heading", name="from the page")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.locator("main .state").first).to_have_text("⊘ Cancelled")
    client.account.order_worker(worker.id, "uncordon")
    page.get_by_role("link", name="Runs", exact=True).click()
    page.get_by_role("link", name="Cancelled 1").click()
    expect(page).to_have_url(f"{stack.url}/ui/?state=cancelled")
    expect(page.get_by_role("row").filter(has_text="from the page")).to_contain_text("local")  # its owner
    (job,) = client.list(states=["cancelled"])
    assert (job.name, job.labels) == ("from the page", {"team": "search"})
    assert job.config["algo_config"] == []


PRESS_TWICE = """async (button) => {
    button.click();
    for (let turn = 0; turn < 20; turn++) await null;
    button.click();
}"""
"""The second time as soon as the page shows the result of the first, before its timers and effects have their turn."""


def test_the_chain_of_algorithms_is_edited_by_keyboard(
    signed_in: Page, stack: LocalStack, client: Client, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    page.goto(f"/ui/jobs/new?path={stack.home.parent / 'model'}&preset=int8_static")
    plan = page.get_by_role("region", name="Plan")
    expect(plan.get_by_text("21 in 3 blocks")).to_be_visible()
    page.get_by_text("More settings").click()
    chain = page.get_by_role("group", name="Algorithms")
    expect(chain.get_by_role("listitem")).to_have_text([re.compile("^smoothquant"), re.compile("^gptq")])
    page.get_by_role("tab", name="JSON").click()
    request = page.get_by_label("Request JSON")
    expect(request).not_to_have_value(re.compile("algo_config"))  # what was not touched is not asked for
    page.get_by_role("tab", name="Form").click()  # where "More settings" is still open
    chain.get_by_label("Add an algorithm").select_option("awq")  # before what rounds
    expect(chain.get_by_role("listitem")).to_contain_text(["smoothquant", "awq", "gptq"])
    expect(plan.get_by_text("Peak memory")).to_be_visible()
    chain.get_by_role("button", name="Move awq down").press("Enter")
    expect(chain.get_by_role("button", name="Move awq up")).to_be_focused()  # it is the last one now
    expect(chain.get_by_text("gptq rounds the weights, so it comes last: smoothquant, awq, gptq")).to_be_visible()
    page.keyboard.press("Enter")
    expect(chain.get_by_role("listitem")).to_contain_text(["smoothquant", "awq", "gptq"])
    expect(chain.get_by_role("button", name="Move awq up")).to_be_focused()
    page.keyboard.press("Enter")
    expect(chain.get_by_role("button", name="Move awq down")).to_be_focused()
    expect(chain.get_by_role("listitem")).to_contain_text(["awq", "smoothquant", "gptq"])
    chain.get_by_role("button", name="Move awq down").evaluate(PRESS_TWICE)
    expect(chain.get_by_role("button", name="Move awq up")).to_be_focused()
    expect(chain.get_by_role("listitem")).to_contain_text(["smoothquant", "gptq", "awq"])
    chain.get_by_role("button", name="Move awq up").evaluate(PRESS_TWICE)
    expect(chain.get_by_role("button", name="Move awq down")).to_be_focused()
    expect(chain.get_by_role("listitem")).to_contain_text(["awq", "smoothquant", "gptq"])
    chain.get_by_role("button", name="Remove smoothquant").press("Enter")
    expect(chain.get_by_label("Add an algorithm")).to_be_focused()
    chain.get_by_text("Options of gptq", exact=True).click()
    damping = chain.get_by_label("gptq damp_percent")
    expect(chain.get_by_text("Share of the Hessian's mean diagonal")).to_be_visible()
    damping.fill("2")
    expect(damping).to_have_attribute("aria-invalid", "true")
    expect(chain.get_by_text("it must be less than 1; 2 was given")).to_be_visible()
    check_accessible(page)
    damping.fill("0.02")
    expect(plan.get_by_text("Peak memory")).to_be_visible()
    expect(page.get_by_label("Effort")).to_be_disabled()
    wanted = {"preset": "int8_static", "algo_config": [{"name": "awq"}, {"name": "gptq", "damp_percent": 0.02}]}
    page.get_by_role("tab", name="JSON").click()
    assert json.loads(request.input_value())["config"] == wanted
    page.get_by_role("tab", name="Code").click()
    for snippet in ("curl", "Command-line", "Python"):
        expect(page.get_by_label(f"{snippet} snippet")).to_contain_text(re.compile('"damp_percent": ?0.02'))
    page.get_by_role("tab", name="Form").click()
    page.get_by_role("button", name="Start job").click()
    expect(page.get_by_role("button", name="Cancel")).to_be_visible()
    job = client.get(page.url.rpartition("/")[2])
    client.cancel(job.id)
    first, second = job.config["algo_config"]
    assert (first["name"], second["name"], second["damp_percent"]) == ("awq", "gptq", 0.02)
    page.goto(f"/ui/jobs/new?from={job.id}")
    expect(chain.get_by_role("listitem")).to_contain_text(["awq", "gptq"])
    expect(damping).to_have_value("0.02")
    chain.get_by_role("button", name="Use the recommended algorithms").click()
    expect(chain.get_by_role("listitem")).to_have_count(0)  # a whole config has none of its own
    page.get_by_label("For a goal").check()
    expect(chain).to_contain_text("The goal chooses the algorithms.")


@pytest.mark.slow
def test_the_form_says_how_a_result_is_measured_and_where_it_goes(
    signed_in: Page, stack: LocalStack, client: Client, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    page.goto("/ui/jobs/new")
    page.get_by_role("textbox", name="Path on the server").fill(str(stack.home.parent / "model"))
    page.get_by_text("More settings").click()
    page.get_by_label("Calibration Sequence length").fill("64")
    page.get_by_label("Uniform").check()
    page.get_by_label("Name", exact=True).fill("measured")
    page.get_by_label("Quality gate").select_option(label="Fail the job")
    page.get_by_label("Evaluation text").select_option(label="Built-in mix")
    page.get_by_label("Windows").fill("3")
    page.get_by_label("Evaluation Sequence length").fill("8")
    plan = page.get_by_role("region", name="Plan")
    expect(plan.get_by_text("/evaluation/seq_len is not valid")).to_be_visible()
    expect(page.get_by_label("Evaluation Sequence length")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Evaluation Sequence length").fill("64")
    page.get_by_label("Stride").fill("32")
    page.get_by_label("Tasks").fill("gsm8k, piqa")
    page.get_by_label("Documents per task").fill("10")
    page.get_by_label("Publish when verified").check()
    page.get_by_label("Storage URL").check()
    page.get_by_label("URL", exact=True).fill("file:///etc")
    expect(page.get_by_text("may not publish to").first).to_be_visible()
    target = f"file://{stack.home.parent}/published/there"
    page.get_by_label("URL", exact=True).fill(target)
    page.get_by_label("File to file").check()
    expect(
        plan.get_by_text("evaluation.tasks need to run the model, which file2file does not do").first
    ).to_be_visible()
    check_accessible(page)
    page.get_by_label("File to file").uncheck()
    page.get_by_label("Behaviour prompts").fill("3")
    page.get_by_label("Most tokens of an answer").fill("32")
    expect(plan.get_by_text("21 in 3 blocks")).to_be_visible()
    page.get_by_role("tab", name="Code").click()
    command = page.get_by_label("Command-line snippet")
    for part in ("--gate fail", "--evaluation tasks=gsm8k,piqa", "--evaluation stride=32", f"--publish {target}"):
        expect(command).to_contain_text(part)
    page.get_by_role("button", name="Start job").click()
    expect(page.get_by_role("heading", name="measured")).to_be_visible()
    (job,) = client.list(text="measured")
    client.cancel(job.id)
    asked = job.model_dump()
    measured = {"source": "builtin", "num_windows": 3, "seq_len": 64, "stride": 32, "num_prompts": 4, "batch_size": 8}
    measured |= {"num_answers": 24, "num_behaviour_prompts": 3, "behaviour_len": 32}
    assert asked["evaluation"] == measured | {"tasks": ["gsm8k", "piqa"], "limit": 10}
    published = {"to": target, "force": False, "replace": False}
    assert (asked["gate"], asked["publish"], asked["file2file"]) == ("fail", published, False)
    page.get_by_role("tab", name="Config").click()
    expect(page.get_by_text("tasks gsm8k + piqa")).to_be_visible()
    page.goto(f"/ui/jobs/new?from={job.id}")
    expect(page.get_by_label("Tasks")).to_have_value("gsm8k, piqa")
    expect(page.get_by_label("Quality gate")).to_have_value("fail")
    expect(page.get_by_label("Publish when verified")).not_to_be_checked()


def test_a_webhook_for_a_channel_says_where_its_url_comes_from(
    signed_in: Page, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    page.goto("/ui/webhooks")
    page.get_by_role("button", name="New webhook").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("The URL of your program")
    dialog.get_by_label("Send messages to").select_option(label="Slack channel")
    expect(dialog).to_contain_text("The URL of an incoming webhook")
    dialog.get_by_label("URL").fill("https://127.0.0.1/services")
    check_accessible(page)
    with page.expect_request(lambda request: request.method == "POST") as asked:
        dialog.get_by_role("button", name="Create webhook").click()
    assert asked.value.post_data_json["format"] == "slack"
    expect(dialog.get_by_role("alert")).to_contain_text("not a public address")


def test_a_member_is_added_narrowed_and_removed(
    signed_in: Page, stack: LocalStack, check_accessible: Callable[[Page], None]
) -> None:
    """What the page says of the key holds: it opens what the role allows, and nothing once the member is gone."""
    page = signed_in
    page.goto("/ui/members")
    page.get_by_role("button", name="Add member").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("Ada")
    dialog.get_by_label("Role").select_option(label="Admin")
    expect(dialog).to_contain_text("manage the project")
    check_accessible(page)
    dialog.get_by_role("button", name="Add member").click()
    shown = page.get_by_label("New API key")
    key = shown.locator("code").inner_text()
    expect(shown.get_by_role("button", name="Copy")).to_be_visible()
    check_accessible(page)
    page.get_by_role("button", name="Close").click()
    row, role = page.get_by_role("row").filter(has_text="Ada"), page.get_by_label("Role of Ada", exact=True)
    with Client(stack.url, key) as ada:
        assert [each.name for each in ada.account.members()] == ["Ada"]
        role.select_option(label="Viewer")
        page.get_by_role("button", name="Go back").click()
        expect(role).to_have_value("admin")
        role.select_option(label="Viewer")
        expect(dialog).to_contain_text("at once")
        check_accessible(page)
        page.get_by_role("button", name="Change role").click()
        expect(role).to_have_value("viewer")
        assert ada.account.own_key().scopes == ["jobs:read"]
        page.goto("/ui/keys")
        expect(row.get_by_role("cell").nth(1)).to_have_text("Ada")
        page.goto("/ui/members")
        row.get_by_role("button", name="Remove").click()
        expect(dialog).to_contain_text("stop working at once")
        page.get_by_role("button", name="Remove member").click()
        expect(row).to_have_count(0)
        with pytest.raises(ApiError, match="valid API key"):
            ada.account.own_key()


def test_the_page_of_an_admin_who_gives_up_the_role_offers_it_no_more(
    page: Page, stack: LocalStack, client: Client
) -> None:
    made = client.account.add_member("Grace", "admin")
    assert made.first_key
    page.goto(f"/ui/#key={made.first_key.key}")
    page.get_by_role("link", name="Settings").click()
    page.get_by_role("link", name="Members").click()
    page.get_by_label("Role of Grace", exact=True).select_option(label="Editor")
    expect(page.get_by_role("dialog")).to_contain_text("You are signed in as this member")
    page.get_by_role("button", name="Change role").click()
    expect(page.get_by_text("lacks the scope 'admin'")).to_be_visible()
    expect(page.get_by_role("link", name="Members")).to_have_count(0)
    client.account.remove_member(made.id)


def test_a_lost_connection_is_said_and_comes_back(signed_in: Page, context: BrowserContext) -> None:
    notice = signed_in.get_by_text("The service is not responding")
    context.set_offline(True)
    expect(notice).to_be_visible()
    context.set_offline(False)
    expect(notice).to_be_hidden()
    expect(signed_in.get_by_role("heading", name="Runs")).to_be_visible()


def test_a_page_that_cannot_be_loaded_opens_when_the_service_is_back(signed_in: Page, context: BrowserContext) -> None:
    """The code of a page is fetched when it is first opened: the service may be away then."""
    context.set_offline(True)
    signed_in.get_by_role("link", name="Data", exact=True).click()
    expect(signed_in.get_by_role("heading", name="This page could not be loaded")).to_be_visible()
    expect(signed_in.get_by_text("It opens as soon as the service responds again.")).to_be_visible()
    assert signed_in.get_by_role("button", name="Reload").count() == 0, "the page says that it reconnects by itself"
    expect(signed_in.get_by_role("navigation", name="Main")).to_be_visible()
    signed_in.get_by_role("link", name="Runs").click()
    expect(signed_in.get_by_role("heading", name="Runs")).to_be_visible()
    signed_in.get_by_role("link", name="Data", exact=True).click()
    context.set_offline(False)
    expect(signed_in.get_by_role("heading", name="Datasets")).to_be_visible()


def test_a_page_of_another_version_is_loaded_on_request(signed_in: Page) -> None:
    """The service answers, and no longer has the files that this tab knows."""
    signed_in.route("**/ui/assets/**", lambda route: route.fulfill(status=404))
    signed_in.get_by_role("link", name="Data", exact=True).click()
    expect(signed_in.get_by_role("heading", name="This page could not be loaded")).to_be_visible()
    signed_in.unroute_all()
    signed_in.get_by_role("button", name="Reload").click()
    expect(signed_in.get_by_role("heading", name="Datasets")).to_be_visible()


def test_a_run_of_an_unchanged_preset_shows_no_changes(signed_in: Page, client: Client, stack: LocalStack) -> None:
    """The effort fills in the algorithms: they are the preset's own, and no change to it."""
    calibration = {"num_samples": 2, "seq_len": 64}
    changed = {"preset": "w4a16", "algo_config": [{"name": "gptq"}, {"name": "bias_correction"}]}
    for config, is_changed in (("w4a16", False), (changed, True)):
        job = client.submit(stack.home.parent / "model", config=config, calibration=calibration)
        client.cancel(job.id)
        signed_in.goto(f"/ui/jobs/{job.id}?tab=config")
        expect(signed_in.get_by_role("heading", name="Changes from preset w4a16")).to_be_visible()
        expect(
            signed_in.get_by_text("/algo_config" if is_changed else "No changes: the config is the preset.")
        ).to_be_visible()


HOSTILE = {
    "an element": "<img src=x onerror=\"document.title='owned'\">",
    "a script": "\"><script>document.title='owned'</script>",
    "one long word": "W" * 200,
}


def test_a_hostile_name_is_text(subtests: pytest.Subtests, signed_in: Page, client: Client, stack: LocalStack) -> None:
    page = signed_in
    for case, name in HOSTILE.items():
        with subtests.test(case):
            model = tiny_model(stack.home.parent / name.replace("/", " "))
            job = client.submit(model, config="fp8", calibration={"num_samples": 2, "seq_len": 64}, name=name)
            page.set_viewport_size({"width": 1280, "height": 900})
            page.goto(f"/ui/jobs/{job.id}")
            expect(page.get_by_role("heading", name=name)).to_be_visible()
            page.get_by_role("tab", name="Config").click()
            page.set_viewport_size({"width": 390, "height": 740})
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            page.goto("/ui/")
            page.get_by_role("heading", name="Runs").wait_for()
            expect(page.get_by_text(name).first).to_be_visible()
            assert page.title() != "owned" and page.locator("img[src=x]").count() == 0


def test_hostile_names_are_text_on_every_page(signed_in: Page, client: Client, stack: LocalStack) -> None:
    """Of labels, keys, members, datasets and models, as the lists, the palette, a filter and a clone show them."""
    page, name = signed_in, HOSTILE["a script"]
    model = tiny_model(stack.home.parent / "<img src=x> model")
    labels = {"team": HOSTILE["an element"][:60]}
    job = client.submit(model, config="fp8", calibration={"num_samples": 2, "seq_len": 64}, name=name, labels=labels)
    client.cancel(job.id)
    rows = stack.home.parent / "<img src=x> rows.jsonl"
    rows.write_text('{"text": "<script>document.title=\'owned\'</script>"}\n' * 20)
    client.datasets.upload(rows)
    page.goto("/ui/keys")
    page.get_by_role("button", name="New key").click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_role("button", name="Create key").click()
    expect(page.get_by_label("New API key")).to_contain_text("bf_")
    page.goto("/ui/members")
    page.get_by_role("button", name="Add member").click()
    page.get_by_label("Name", exact=True).fill(HOSTILE["an element"])
    page.get_by_role("dialog").get_by_role("button", name="Add member").click()
    expect(page.get_by_label("New API key")).to_contain_text("bf_")
    assert page.title() != "owned" and page.locator("img[src=x]").count() == 0
    addresses = {
        "/": name, f"/?label=team={labels['team']}": "team=", "/models": "<img src=x> model", "/keys": name,
        f"/models?model={model}": "<img src=x> model", "/datasets": rows.name,
        f"/jobs/new?from={job.id}": "Clone run", f"/compare?job={job.id}&job={job.id}": "Compare", "/audit": "Audit",
        "/members": HOSTILE["an element"],
    }  # fmt: skip
    for address, text in addresses.items():
        page.goto(f"/ui{address}")
        expect(page.get_by_text(text).first).to_be_visible()
        assert page.title() != "owned" and page.locator("img[src=x]").count() == 0, address
        page.set_viewport_size({"width": 390, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, address
        page.set_viewport_size({"width": 1280, "height": 900})
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Page, run or command").fill(job.id[-6:])
    expect(page.get_by_role("option").filter(has_text=job.id[-6:]).filter(has_text=name)).to_be_visible()
    assert page.title() != "owned" and page.locator("img[src=x]").count() == 0


def test_the_menu_and_the_palette_lead_to_every_page(
    signed_in: Page, client: Client, stack: LocalStack, check_accessible: Callable[[Page], None]
) -> None:
    page = signed_in
    menu = page.get_by_role("navigation", name="Main")
    assert menu.get_by_role("link").all_inner_texts() == [
        "Models",
        "Runs",
        "Compare",
        "Data",
        "Registry",
        "Settings",
        "Operations",
    ]
    settings = ["API keys", "Webhooks", "Members", "Audit log", "Project"]
    for section, pages in (("Settings", settings), ("Operations", ["Workers"])):
        menu.get_by_role("link", name=section).click()
        expect(menu.get_by_role("link", name=section)).to_have_attribute("aria-current", "true")
        expect(page.locator("h1")).to_be_focused()
        links = page.get_by_role("navigation", name=section).get_by_role("link")
        expect(links.get_by_text(pages[0], exact=True)).to_have_attribute("aria-current", "page")
        for name in pages[1:]:  # the first is there already
            links.get_by_text(name, exact=True).click()
            expect(page.locator("h1")).to_be_focused()

    job = client.submit(stack.home.parent / "model", config="fp8", calibration={"num_samples": 2, "seq_len": 64})
    client.cancel(job.id)
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        page.goto("/ui/system")
        expect(page.get_by_role("heading", level=1)).to_have_text("System")
        page.keyboard.press("Control+k")
        search = page.get_by_role("combobox", name="Page, run or command")
        expect(search).to_be_focused()
        search.fill("audit sett")
        expect(page.locator("[role=option][aria-selected=true]")).to_contain_text("Audit log")
        check_accessible(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.keyboard.press("Enter")
        expect(page).to_have_url(f"{stack.url}/ui/audit")
    page.get_by_role("button", name="Search").click()
    search.fill(job.id[-6:])  # a run without a name is called after its model and recipe
    expect(page.locator("[role=option]")).to_have_count(1)
    expect(page.locator("[role=option]")).to_contain_text("model fp8")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("model fp8 + gptq")
    page.keyboard.press("Control+k")
    page.get_by_role("option", name="New job").click()
    expect(page).to_have_url(f"{stack.url}/ui/jobs/new")
    page.keyboard.press("Control+k")
    search.fill("a text")
    page.keyboard.press("Escape")
    expect(search).to_be_hidden()
    page.route("**/v1/jobs?**", lambda route: route.abort())
    page.keyboard.press("Control+k")
    search.fill("no such run")
    expect(page.get_by_role("status").filter(has_text="Runs cannot be searched")).to_be_visible()
    assert page.get_by_text("Nothing matches").count() == 0
