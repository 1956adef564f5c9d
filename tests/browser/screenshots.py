"""``make screenshots``: pictures of the main pages, light and dark, of real runs of the demo's model.

With ``--home`` the runs that are in that data folder already are shown, if enough of them have succeeded.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from bitfoundry.client.answers import Job
from bitfoundry.client.service import Client
from bitfoundry.local import demo_model
from bitfoundry.local.stack import LocalStack
from tests.support.chromium import ROOT, open_browser

PICTURES = ROOT / "docs" / "screenshots"
FINISHED = ("fp8", "int8_dynamic")
RUNNING, WAITING = "w4a16", "mxfp4"
CALIBRATION = {"source": "builtin", "num_samples": 8, "seq_len": 256}
EVALUATION = {"num_windows": 8, "seq_len": 256, "num_answers": 0}  # enough to tell these apart
SIZE = {"width": 1280, "height": 860}
SCHEMES = ("light", "dark")
RENAME = """([before, after]) => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(before, after);
  for (const input of document.querySelectorAll("input")) input.value = input.value.replaceAll(before, after);
}"""
"""Script that shows the folder of the models by another name: pictures name no path of the machine they come from."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.browser.screenshots", description=__doc__)
    parser.add_argument("--home", type=Path, help="a data folder of `bitfoundry up`")
    options = parser.parse_args()
    model = demo_model.prepare(print)
    with tempfile.TemporaryDirectory(prefix="bf-shots-", dir="/tmp") as folder:
        home = options.home or Path(folder) / "home"
        with LocalStack(home, 0, model_roots=[model], say=print) as stack:  # and no other model of the cache
            take(stack, model)


def take(stack: LocalStack, model: Path) -> None:
    PICTURES.mkdir(exist_ok=True)
    with Client(stack.url, stack.api_key) as client, open_browser() as browser:
        if not any(client.list()):
            page = _open(browser, stack)
            expect(page.get_by_role("link", name="Quantize")).to_be_visible()
            shoot(page, "first-job", model.parent)
        done = _runs(client, model)
        for preset in (RUNNING, WAITING):
            _submit(client, model, preset)
        page = _open(browser, stack)
        expect(page.get_by_text("quantize · block").first).to_be_visible(timeout=900_000)
        shoot(page, "runs", model.parent)
        compared = "&".join(f"job={job.id}" for job in done)
        page.goto(f"/ui/compare?{compared}")
        expect(page.get_by_role("img", name="Relative weight error")).to_be_visible()
        shoot(page, "compare", model.parent)
        page.goto(f"/ui/models?model={model}")
        expect(page.get_by_role("img", name="KL divergence and size of each result")).to_be_visible()
        shoot(page, "model", model.parent)
        page.goto(f"/ui/jobs/{done[-1].id}")
        expect(page.get_by_text("Each export was read back")).to_be_visible()
        shoot(page, "run", model.parent)
        page.get_by_label("View", exact=True).select_option(label="Heatmap: block by module")
        layers = page.get_by_role("img", name="by module type and block")
        layers.evaluate("each => each.scrollIntoView({block: 'center'})")
        shoot(page, "layers", model.parent)
        page.goto(f"/ui/jobs/new?path={model}")
        expect(page.get_by_role("region", name="Plan").get_by_text("blocks")).to_be_visible()
        shoot(page, "new-job", model.parent)


def _open(browser: Browser, stack: LocalStack) -> Page:
    page = browser.new_page(base_url=stack.url, viewport=SIZE, reduced_motion="reduce")
    page.add_init_script("Object.defineProperty(Notification, 'permission', {get: () => 'default'})")
    page.goto(f"/ui/#key={stack.api_key}")
    return page


def _runs(client: Client, model: Path) -> list[Job]:
    """Runs of the model that have succeeded, made if they are not there."""
    known = {job.preset: job for job in client.list(states=["succeeded"], text=model.name)}
    done = [known[preset] for preset in FINISHED if preset in known]
    if len(done) < len(FINISHED):
        made = [_submit(client, model, preset) for preset in FINISHED]
        done = [client.wait(job.id, timeout_s=3600) for job in made]
    return done


def _submit(client: Client, model: Path, preset: str) -> Job:
    labels = {"team": "search"}
    name = f"SmolLM2 {preset}"
    return client.submit(model, config=preset, calibration=CALIBRATION, evaluation=EVALUATION, name=name, labels=labels)


def shoot(page: Page, name: str, models: Path) -> None:
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(300)
        page.evaluate(RENAME, [str(models), "/models"])
        page.screenshot(path=PICTURES / f"{name}-{scheme}.png")


if __name__ == "__main__":
    main()
