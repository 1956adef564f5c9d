"""The page of all components in all their states: accessible, within its width, and as it was when somebody looked.

Layout and colours are compared in place of pixels. Pixels depend on the version of Chromium, on its rasterizer and on
the fonts of a machine, for the signs that no font of ours has; boxes and computed colours do not, and a difference
names the part. The page is set in one font that comes with the pinned npm packages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.chromium import DRAWN, TOO_WIDE, set_font

BASELINE = Path(__file__).with_name("components.json")
WIDTHS = (390, 1280)
THEMES = ("light", "dark")
TOLERANCE_PX = 2
"""Boxes are whole pixels, and a sign from another fallback font is a little wider. Paddings are 5 px or more."""
NOW = "2026-11-26T08:00:00Z"
OVERFLOWING = """() => {
  const found = [];
  for (const part of document.querySelectorAll("[data-part]")) {
    const right = part.getBoundingClientRect().right + 1;
    const walk = element => {
      if (element instanceof SVGElement || getComputedStyle(element).overflowX !== "visible") return;
      const isFull = element.clientWidth && element.scrollWidth > element.clientWidth + 1;
      if (isFull || element.getBoundingClientRect().right > right) {
        found.push(`${part.dataset.part}: ${element.localName}.${element.className}`);
      }
      [...element.children].forEach(walk);
    };
    walk(part);
  }
  return found;
}"""
"""Script: the elements outside scrolling boxes that are wider than their part, or narrower than their text."""
BOXES = """() => Object.fromEntries([...document.querySelectorAll("[data-part]")].map(part => {
  const own = part.getBoundingClientRect();
  const boxes = [part, ...part.children].map(element => {
    const {x, y, width, height} = element.getBoundingClientRect();
    return [x - own.x, y - own.y, width, height].map(Math.round);
  });
  return [part.dataset.part, boxes];
}))"""
"""Script: the boxes [x, y, width, height] of each part and of its children, in pixels from the part's corner."""
COLOURS = """() => Object.fromEntries([...document.querySelectorAll("[data-part]")].map(part => {
  const elements = [...part.querySelectorAll("*:not(option)")];
  const colours = elements.map(element => {
    const style = getComputedStyle(element);
    return element instanceof SVGElement
      ? `fill ${style.fill}, stroke ${style.stroke}` : `${style.color} on ${style.backgroundColor}`;
  });
  return [part.dataset.part, [...new Set(colours)].sort()];
}))"""


@pytest.fixture
def parts(signed_in: Page) -> Iterator[Page]:
    """The page with one font and one time, without motion, in a browser that blocks notifications."""
    page = signed_in
    page.context.grant_permissions([])
    page.clock.set_fixed_time(NOW)
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    page.goto("/ui/components")
    expect(page.get_by_role("heading", level=1, name="Components", exact=True)).to_be_visible()
    set_font(page)
    yield page
    assert page.title() == "Components · Bitfoundry"  # hostile text is only text
    assert page.locator("img[src=x]").count() == 0


def resize(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate(DRAWN)  # charts are drawn again


def test_every_part_is_accessible_and_within_its_width(
    subtests: pytest.Subtests, parts: Page, check_accessible: Callable[[Page], None]
) -> None:
    for width in WIDTHS:
        with subtests.test(width=width):
            resize(parts, width)
            assert parts.evaluate(OVERFLOWING) == []
            assert parts.evaluate(TOO_WIDE) <= 0
            check_accessible(parts)


def test_every_part_looks_as_it_did(subtests: pytest.Subtests, parts: Page) -> None:
    """Against `components.json`. To change it on purpose, delete it, run this test, and look at the page."""
    found = measure(parts)
    if not BASELINE.is_file():
        BASELINE.write_text(to_text(found))
        pytest.fail(f"{BASELINE.name} was missing and has been written. Look at /ui/components, then commit it.")
    baseline = json.loads(BASELINE.read_text())
    assert {name: sorted(each) for name, each in found.items()} == {
        name: sorted(each) for name, each in baseline.items()
    }
    for case, shown in found.items():
        for part, values in shown.items():
            with subtests.test(f"{part}, {case}"):
                before = baseline[case][part]
                assert are_close(before, values) if case in map(str, WIDTHS) else values == before, (before, values)


def measure(page: Page) -> dict[str, dict[str, Any]]:
    """Return the boxes at each width and the colours in each theme, by part."""
    found = {}
    for width in WIDTHS:
        resize(page, width)
        found[str(width)] = page.evaluate(BOXES)
    for theme in THEMES:
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        found[theme] = page.evaluate(COLOURS)
    return found


def are_close(before: list[list[int]], after: list[list[int]]) -> bool:
    """Return True if there are as many boxes, and none differs by more than the tolerance anywhere."""
    return len(before) == len(after) and all(
        abs(old - new) <= TOLERANCE_PX
        for old_box, new_box in zip(before, after, strict=True)
        for old, new in zip(old_box, new_box, strict=True)
    )


def to_text(found: dict[str, dict[str, Any]]) -> str:
    """Return JSON with one line per part, so that a change is one line of a diff."""
    cases = [
        f" {json.dumps(case)}: {{\n"
        + ",\n".join(f"  {json.dumps(part)}: {json.dumps(values)}" for part, values in shown.items())
        + "\n }"
        for case, shown in found.items()
    ]
    return "{\n" + ",\n".join(cases) + "\n}\n"


DIALOGS = {
    "Dialog": "Keyboard shortcuts",
    "Dialog, long and hostile": "<img src=x",
    "Confirm": "Delete this run?",
    "Confirm, failing": "Delete this run?",
    "Confirm, busy": "Delete this run?",
}


def test_dialogs_and_announcements(parts: Page, check_accessible: Callable[[Page], None]) -> None:
    resize(parts, 390)
    for name, title in DIALOGS.items():
        opener = parts.get_by_role("button", name=f"Open {name}", exact=True)
        opener.click()
        dialog = parts.get_by_role("dialog")
        expect(dialog.get_by_role("heading")).to_contain_text(title)
        delete = dialog.get_by_role("button", name="Delete")
        if name.startswith("Confirm,"):
            delete.click()
        if name == "Confirm, failing":
            expect(dialog.get_by_role("alert")).to_contain_text("nonfinite_weights")
        if name == "Confirm, busy":
            expect(delete).to_be_disabled()
        check_accessible(parts)
        assert dialog.evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth"), name
        assert parts.evaluate(TOO_WIDE) <= 0, name
        parts.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        expect(opener).to_be_focused()
    parts.get_by_role("button", name="Announce a change").click()
    expect(parts.locator("[aria-live=polite]")).to_have_text("Run state: Succeeded.")
