"""Every page as it was when somebody looked: light at 1280 px and dark at 390 px, in `pictures`.

The pages show fixed rows at a fixed time (`pictured_rows`) in one font of ours, so only the browser's rasterizer is
left to differ. Pictures are kept and compared at a quarter of their size. Measured on all of them: another hinting, no
antialiasing for LCDs and a machine without fonts change pixels by at most 1 level, and text drawn at twice the
resolution changes at most 1 pixel by more than ``MAX_LEVELS``; a title of another word changes 44, a missing column 85,
a button in another colour 101, cards 4 px further down 379, and a dark page that stays light nearly all.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from api.http.security import SIGN_IN_COOKIE
from bitfoundry.local.stack import LocalStack
from tests.browser import pictured_rows as rows
from tests.browser.screenshots import RENAME
from tests.support.chromium import COUNT_WORK, DRAWN, ROOT, TOO_WIDE, set_font, wait_until_idle

PICTURES = Path(__file__).with_name("pictures")
SCALE = 4
MAX_LEVELS = 32
MAX_PIXELS = 12
"""At most so many pixels of a picture at a quarter of its size may differ by more than ``MAX_LEVELS`` of 255 levels.

A number and not a share: on a long page a share would forgive more."""
LOOKS = {"light": {"width": 1280, "height": 900}, "dark": {"width": 390, "height": 844}}
ASK_FIRST = "Object.defineProperty(Notification, 'permission', {get: () => 'default'})"
"""Script: notifications are neither allowed nor blocked, as for somebody new. Browsers without a screen block them."""
REPLACE_SIGNS = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const signs = /[\\u2016\\u2190-\\u2211\\u2213-\\u2bff]/g;
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replace(signs, "•");
}"""
"""Script that shows signs which our font lacks as •: the fonts of machines have them in several widths."""
HIDE = "parts => parts.forEach(each => { each.style.visibility = 'hidden'; })"
SPILLED = "box => [...box.querySelectorAll('td')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.innerText)"
TEXT = "document.body.innerText + [...document.querySelectorAll('input, textarea')].map(field => field.value)"


@dataclass(frozen=True)
class Shown:
    """A page of the dashboard, and a text that it has once it shows everything.

    ``act`` does what somebody does first. ``hidden``: selector of what differs each time. ``project``: the one whose
    key the browser is signed in with, if any.
    """

    name: str
    path: str
    ready: str
    act: Callable[[Page], None] = lambda page: None
    hidden: str = ""
    project: str = rows.PROJECT


def choose_device(page: Page) -> None:
    page.get_by_label("Device").fill("24GB")
    page.get_by_label("Device").blur()


def open_all_settings(page: Page) -> None:
    page.get_by_label("Uniform").check()
    page.get_by_role("button", name="Advanced settings").click()
    page.get_by_text("More settings").click()


def wait_for_last_event(page: Page) -> None:
    """Events come by a stream that does not end while the job runs. Its last one adds the last point of memory."""
    expect(page.get_by_role("img", name=f"Engine memory over time, {rows.NUM_BLOCKS_DONE} points")).to_be_visible()


RUN, FAILED = f"jobs/{rows.W4A16}", f"jobs/{rows.FAILED}"
NEW_JOB = "jobs/new?path={models}/model"
PAGES = (
    Shown("sign-in", "", "API key", project=""),
    Shown("first-job", "", "Choose a model and a goal", project=rows.EMPTY_PROJECT),
    Shown("models", "models", "qwen-0.5b-chat"),
    Shown("model", f"models?model={rows.MODEL}", "Size vs. quality"),
    Shown("runs", "", "SmolLM2 mxfp4"),
    Shown("run", RUN, "Each export was read back from disk"),
    Shown("run-log", f"{RUN}?tab=log", "phase quantize began"),
    Shown("run-config", f"{RUN}?tab=config", "Changes from preset w4a16"),
    Shown("run-artifacts", f"{RUN}?tab=artifacts", "quark/model.safetensors"),
    Shown("run-events", f"{RUN}?tab=events", '"succeeded"'),
    Shown("run-chat", f"{RUN}?tab=chat", "You ended this chat."),
    Shown("run-running", f"jobs/{rows.RUNNING}", "Show as table", act=wait_for_last_event),
    Shown("run-failed", FAILED, "Clone and change"),
    Shown("run-failed-log", f"{FAILED}?tab=log", "mlp.up_proj are NaN"),
    Shown("run-queued", f"jobs/{rows.NEXT}", "next in queue"),
    Shown("compare", f"compare?job={'&job='.join((rows.FP8, rows.INT8, rows.W4A16, rows.MXFP4))}", "Sample outputs"),
    Shown("compare-empty", "compare", "Choose runs here"),
    Shown("datasets", "datasets", "support-chats.jsonl"),
    Shown("registry", "registry", "search-reranker"),
    Shown("registry-model", "registry?name=support-bot", "bitfoundry pull support-bot@"),
    Shown("new-job", NEW_JOB, "Device fit", act=choose_device),
    Shown("new-job-all", NEW_JOB, "Device fit", act=open_all_settings),
    # hidden: when the key was last used that the browser is signed in with
    Shown("keys", "keys", "old runner", hidden="tr:has(.faint) td:nth-last-child(2)"),
    Shown("members", "members", "Grace"),
    Shown("webhooks", "webhooks", "https://ci.example.org"),
    Shown("audit", "audit", "worker.drain"),
    Shown("project", "project", "max_running"),
    Shown("workers", "workers", "NVIDIA H100"),
    Shown("queue", "queue", "SmolLM2 nvfp4"),
    Shown("system", "system", " ready"),
    Shown("not-found", "nowhere", "This page does not exist."),
    Shown("shared", f"/v1/shared/{rows.SHARED}", "SmolLM2-135M, quantized"),
)


@pytest.fixture(scope="module")
def filled(stack: LocalStack) -> LocalStack:
    """The service with the fixed rows and without its own worker, which would run the jobs."""
    worker = stack._programs["worker"]
    worker.drain()
    worker.wait(60)
    assert worker.poll() is not None
    rows.fill(stack.database_url, stack.home)
    return stack


@pytest.fixture(scope="module")
def pages(filled: LocalStack, browser: Browser) -> Iterator[dict[str, Page]]:
    """An open page of a browser by the project whose key it is signed in with."""
    pages = {}
    for project in ("", *rows.TOKENS):
        context = browser.new_context(base_url=f"{filled.url}/ui/", timezone_id="UTC", locale="en-US")
        if project:
            context.add_cookies([{"name": SIGN_IN_COOKIE, "value": rows.TOKENS[project], "url": filled.url}])
        context.add_init_script(ASK_FIRST)
        context.add_init_script(COUNT_WORK)
        pages[project] = context.new_page()
        pages[project].clock.set_fixed_time(rows.NOW)
    yield pages
    for page in pages.values():
        page.context.close()


def test_every_page_looks_as_it_did(
    subtests: pytest.Subtests, filled: LocalStack, pages: dict[str, Page], tmp_path: Path
) -> None:
    """Against `pictures`. To change one on purpose, delete it, run this test, and look at the new one."""
    PICTURES.mkdir(exist_ok=True)
    for shown in PAGES:
        page = pages[shown.project]
        open_page(page, shown, filled)
        for look in LOOKS:
            with subtests.test(f"{shown.name}, {look}"):
                compare(PICTURES / f"{shown.name}-{look}.png", shoot(page, look, filled), tmp_path)
    assert {path.stem for path in PICTURES.iterdir()} == {f"{shown.name}-{look}" for shown in PAGES for look in LOOKS}


def test_the_numbers_of_a_comparison_fit_and_come_first(filled: LocalStack, pages: dict[str, Page]) -> None:
    page = pages[rows.PROJECT]
    open_page(page, next(shown for shown in PAGES if shown.name == "compare"), filled)
    page.set_viewport_size({"width": 1440, "height": 900})
    table = page.locator(".results")
    assert table.evaluate("box => box.scrollWidth - box.clientWidth") <= 0, "a column is out of sight"
    for width in (1280, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        assert table.evaluate(SPILLED) == [], "a text runs into the next column"
    row = table.get_by_role("row").filter(has=page.get_by_role("rowheader", name="SmolLM2 int8_dynamic"))
    expect(row).to_contain_text("KL ")  # the interval of a paired test
    page.set_viewport_size({"width": 390, "height": 844})
    tops = [page.locator(part).first.bounding_box() for part in (".results", "[role=group] > svg")]
    assert tops[0] and tops[1] and tops[0]["y"] < tops[1]["y"], "charts come before the numbers"


def test_the_order_and_the_columns_of_runs_are_in_the_address(
    filled: LocalStack, pages: dict[str, Page], check_accessible: Callable[[Page], None]
) -> None:
    page = pages[rows.PROJECT]
    open_page(page, next(shown for shown in PAGES if shown.name == "runs"), filled)
    page.get_by_role("combobox", name="Order").select_option(label="By KL divergence")
    page.locator("summary", has_text="Columns").click()
    page.get_by_label("KL divergence", exact=True).check()
    for unwanted in ("Owner", "Progress"):
        page.get_by_label(unwanted, exact=True).uncheck()
    page.reload()
    wait_until_idle(page)
    heads = page.locator(".runs thead th").all_inner_texts()
    assert heads == ["", "Run", "Preset", "State", "Verdict", "Size", "Perplexity", "KL divergence ↑", "Created"]
    cells = page.locator(".runs td[data-label='KL divergence']").all_inner_texts()
    numbers = [float(each) for each in cells if each != "–"]
    assert len(numbers) > 2 and numbers == sorted(numbers) and cells[: len(numbers)] == [f"{n:g}" for n in numbers]
    page.locator("summary", has_text="Columns").click()
    check_accessible(page)
    page.set_viewport_size(LOOKS["dark"])
    assert page.evaluate(TOO_WIDE) <= 0
    page.get_by_label("KL divergence", exact=True).uncheck()
    for wanted in ("Owner", "Progress"):
        page.get_by_label(wanted, exact=True).check()
    page.get_by_role("combobox", name="Order").select_option(label="Newest first")
    expect(page).to_have_url(f"{filled.url}/ui/")


def test_runs_are_grouped_by_a_label(
    filled: LocalStack, pages: dict[str, Page], check_accessible: Callable[[Page], None]
) -> None:
    page = pages[rows.PROJECT]
    open_page(page, next(shown for shown in PAGES if shown.name == "runs"), filled)
    runs = page.locator(".runs tbody tr").count()
    page.get_by_label("Group").select_option(label="By label team")
    expect(page.get_by_role("columnheader").first).to_have_text("team")
    wait_until_idle(page)
    groups = page.get_by_role("table").get_by_role("row")
    expect(groups).to_have_count(3)
    numbers = [int(each) for each in page.locator("td.number").all_inner_texts()]
    assert sum(numbers) == runs > max(numbers)
    expect(groups.filter(has_text="search")).to_contain_text("1 running")
    check_accessible(page)
    page.get_by_role("link", name="search", exact=True).click()
    expect(page).to_have_url(f"{filled.url}/ui/?label=team%3Dsearch")
    expect(page.locator(".runs tbody tr")).to_have_count(numbers[0])


def open_page(page: Page, shown: Shown, stack: LocalStack) -> None:
    page.set_viewport_size(LOOKS["light"])
    page.goto(shown.path.format(models=stack.home.parent))
    shown.act(page)
    expect(page.get_by_text(shown.ready).first).to_be_visible()
    expect(page.locator(".spinner, [aria-busy=true]")).to_have_count(0)
    wait_until_idle(page)
    set_font(page)
    if shown.hidden:
        page.locator(shown.hidden).evaluate_all(HIDE)


def shoot(page: Page, look: str, stack: LocalStack) -> Image.Image:
    """Return the picture of the whole page, which names nothing of this machine."""
    page.set_viewport_size(LOOKS[look])
    page.emulate_media(color_scheme=look, reduced_motion="reduce")
    page.evaluate("scrollTo(0, 0)")  # the plan of a new job stays in sight
    page.evaluate(DRAWN)  # charts are drawn again
    for before, after in ((str(stack.home.parent), "/models"), (stack.url, "https://bitfoundry.example.org")):
        page.evaluate(RENAME, [before, after])
    page.evaluate(REPLACE_SIGNS)
    text = page.evaluate(TEXT)
    assert not [path for path in (stack.home.parent, ROOT, Path.home()) if str(path) in text]
    return Image.open(io.BytesIO(page.screenshot(full_page=True, animations="disabled"))).convert("RGB")


def compare(baseline: Path, found: Image.Image, folder: Path) -> None:
    """Fail if the picture is not the baseline, with the picture and the differences in ``folder``."""
    after = found.reduce(SCALE)
    if not baseline.is_file():
        after.save(baseline, optimize=True)
        pytest.fail(f"{baseline.name} was missing and has been written. Look at it, then commit it.")
    before = Image.open(baseline).convert("RGB")
    differs = find_differences(before, after)
    if before.size == after.size and differs.sum() <= MAX_PIXELS:
        return
    found.save(folder / baseline.name)
    marked = folder / f"{baseline.stem}-differences.png"
    marks = Image.fromarray(np.uint8(160) * differs).resize([SCALE * length for length in differs.shape[::-1]])
    canvas = Image.new("RGB", marks.size)
    canvas.paste(found)
    canvas.paste("red", (0, 0), marks)
    canvas.save(marked)
    ys, xs = differs.nonzero()
    where = f"x {xs.min() * SCALE} to {xs.max() * SCALE + SCALE}, y {ys.min() * SCALE} to {ys.max() * SCALE + SCALE}"
    pytest.fail(
        f"{baseline.name}: {len(xs)} pixels of {before.size} and now {after.size} differ, {MAX_PIXELS} may: in {where} "
        f"of the page. See {folder / baseline.name} and {marked}. If the page is meant to look so, delete "
        f"{baseline.relative_to(ROOT)}, run this test again, and commit the new picture."
    )


def find_differences(before: Image.Image, after: Image.Image) -> np.ndarray:
    """Return for each pixel [Y, X] of either picture True where any colour differs by more than ``MAX_LEVELS``.

    What only one of them has differs.
    """
    size = tuple(map(max, before.size, after.size))
    whole = [Image.new("RGB", size, ground) for ground in ("black", "white")]
    for picture, canvas in zip((before, after), whole, strict=True):
        canvas.paste(picture)
    old, new = (np.asarray(canvas, int) for canvas in whole)
    return np.asarray(np.abs(old - new).max(axis=-1) > MAX_LEVELS)
