"""``make bench-dashboard``: are the pages fluid with many jobs, layers of a run, and runs in a comparison?

The real service with rows written straight into its database, and a real headless browser. Each number is what somebody
at the page waits for, or how long the page once did not answer: a frame that was drawn late, a task that held it up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect
from sqlalchemy.orm import Session

from api.store.accounts import projects
from api.store.engine import connect, dispose
from api.store.queue import control, events, jobs, leases
from api.store.queue.events import NewEvent
from api.store.tables.jobs import Job
from bitfoundry.local.stack import LocalStack
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from tests.support.chromium import DRAWN, open_browser

RESULTS = Path(__file__).parent / "results"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "router")
PRESETS = ("fp8", "w4a16", "int8_dynamic", "mxfp4")
RESULTS_LABEL = {"for": "comparison"}
NUM_OVERLAID = 8
"""Number of runs whose layers the comparison shows at first: the newest."""
SPEC = JobSpec(config=presets.resolve("fp8")).to_dict()
WATCH = """
window.late = {frame: 0, task: 0};
new PerformanceObserver(list => list.getEntries().forEach(each => { late.task = Math.max(late.task, each.duration); }))
  .observe({entryTypes: ["longtask"]});
let before = performance.now();
const tick = now => { late.frame = Math.max(late.frame, now - before); before = now; requestAnimationFrame(tick); };
requestAnimationFrame(tick);
"""
SCROLL = """([selector, ms]) => new Promise(done => {
  const box = document.querySelector(selector);
  let [started, before, step, frames, longest] = [null, null, 60, 0, 0];
  const tick = now => {
    if (before !== null) { frames += 1; longest = Math.max(longest, now - before); }
    started ??= now;
    before = now;
    const place = box.scrollTop;
    box.scrollTop += step;
    if (box.scrollTop === place) step = -step;
    if (now - started < ms) requestAnimationFrame(tick);
    else done([(now - started) / frames, longest]);
  };
  requestAnimationFrame(tick);
})"""
"""Script that scrolls a box by 60 px a frame, up and down; returns the mean and the longest time of a frame, in ms."""
SCROLL_MS = 5000
NUM_COMPARED_LAYERS = 224


def fill(database_url: str, num_jobs: int, num_layers: int, num_results: int) -> str:
    """Insert cancelled jobs, results to compare, and a job with ``num_layers`` layers. Return the id of that one."""
    sessions = connect(database_url)
    rng = random.Random(0)
    fields: dict[str, Any] = {"project_id": projects.DEFAULT, "submitted_by": None, "spec": SPEC}
    fields |= {"labels": {"team": "search"}, "model": {"path": "/models/a-model-of-some-size"}}
    try:
        for start in range(0, num_results, 100):
            with sessions.begin() as session:
                for number in range(start, min(start + 100, num_results)):
                    job = add_result(session, fields | {"labels": RESULTS_LABEL}, f"result {number}", rng)
                    if num_results - number <= NUM_OVERLAID:
                        add_layers(session, job, NUM_COMPARED_LAYERS, rng)
        for start in range(0, num_jobs - num_results, 500):
            with sessions.begin() as session:
                for number in range(start, min(start + 500, num_jobs - num_results)):
                    add_ended(session, fields, f"run {number}", rng)
        with sessions.begin() as session:
            job = add_ended(session, fields, "many layers", rng)
            add_layers(session, job, num_layers, rng)
            return job.id
    finally:
        dispose(sessions)


def add_ended(session: Session, fields: dict[str, Any], name: str, rng: random.Random) -> Job:
    """Insert a job that no worker takes: it is cancelled in the same transaction."""
    job = jobs.submit(session, **fields, name=name, preset=rng.choice(PRESETS))
    control.cancel(session, job.id)
    return job


def add_result(session: Session, fields: dict[str, Any], name: str, rng: random.Random) -> Job:
    """Insert a job that has succeeded: no worker sees it before the transaction ends."""
    job = jobs.submit(session, **fields, name=name, preset=rng.choice(PRESETS))
    lease = leases.claim(session, worker="bench", lease_s=60)
    assert lease and lease.job_id == job.id
    artifact = {"manifest_sha256": "0" * 64, "path": f"/artifacts/{job.id}", "num_bytes": 1}
    leases.succeed(session, lease, **artifact, summary=summary(rng))
    return job


def add_layers(session: Session, job: Job, num_layers: int, rng: random.Random) -> None:
    for number in range(num_layers):
        block, module = divmod(number, len(MODULES))
        error = rng.uniform(0.05, 0.1)
        layer = {"name": f"model.layers.{block}.{MODULES[module]}", "block": block, "relative_error": error}
        layer |= {"sqnr_db": rng.uniform(18, 25), "scheme": "uint4 per_group 64", "output_error": error / 2}
        events.add(session, job, NewEvent("layer_quantized", layer))


def summary(rng: random.Random) -> dict[str, Any]:
    """The figures of a result that the comparison shows: the smaller, the worse, and some worse than that."""
    size_bytes = rng.randint(80, 200) * 10**6
    loss = 2e6 / size_bytes * rng.uniform(1, 3)
    return {
        "size_before_bytes": 270 * 10**6, "size_after_bytes": size_bytes, "num_layers_quantized": NUM_COMPARED_LAYERS,
        "perplexity_after": 15.8 * (1 + loss), "perplexity_ratio": 1 + loss, "perplexity_ratio_stderr": loss / 20,
        "kl_mean": loss, "kl_stderr": loss / 30, "total_s": rng.uniform(60, 600), "quantize_s": 50.0, "exports": {},
        "worst_layer": {"name": "model.layers.0.q_proj", "relative_error": loss, "sqnr_db": rng.uniform(18, 25)},
        "peak_memory_bytes": 10**9, "planned_peak_memory_bytes": 10**9,
    }  # fmt: skip


def milliseconds(act: Any) -> float:
    started = time.perf_counter()
    act()
    return round(1000 * (time.perf_counter() - started), 1)


def late(page: Page) -> dict[str, float]:
    """Return the longest frame and the longest task since the last call, in ms."""
    longest: dict[str, float] = page.evaluate(
        "(() => { const found = late; late = {frame: 0, task: 0}; return found; })()"
    )
    return {name: round(value, 1) for name, value in longest.items()}


def scroll(page: Page, selector: str = "html") -> dict[str, Any]:
    """Return the times of frames while the page, or a box in it, is scrolled, and the CPU time of the page for one.

    The CPU time is what remains comparable on a busy machine.
    """
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

    def cpu_ms() -> float:
        metrics = devtools.send("Performance.getMetrics")["metrics"]
        return next(1000 * each["value"] for each in metrics if each["name"] == "TaskDuration")

    before_ms = cpu_ms()
    mean, longest = page.evaluate(SCROLL, [selector, SCROLL_MS])
    cpu = (cpu_ms() - before_ms) * mean / SCROLL_MS
    what = f"while it scrolls for {SCROLL_MS // 1000} s"
    return {
        f"{what}: a frame on average": round(mean, 1),
        f"{what}: CPU time of the page for a frame": round(cpu, 1),
        what: {"frame": round(longest, 1)},
    }


def measure_list(page: Page, num_jobs: int) -> dict[str, Any]:
    rows = page.locator(".runs tbody tr")

    def shown(path: str) -> None:
        page.goto(path)
        expect(rows).to_have_count(50)

    def older() -> None:
        page.get_by_role("link", name="Older").click()
        expect(page.get_by_role("link", name=f"run {num_jobs - 50}", exact=True)).to_be_visible()

    def search() -> None:
        page.get_by_label("Search runs").fill(f"run {num_jobs // 2}")
        expect(rows).to_have_count(1)

    times: dict[str, Any] = {"first rows": milliseconds(lambda: shown("/ui/"))}
    page.evaluate(WATCH)
    times["next page"] = milliseconds(older)
    times["search, with 300 ms of waiting for more letters"] = milliseconds(search)
    page.get_by_label("Search runs").fill("")
    expect(rows).to_have_count(50)
    late(page)
    page.wait_for_timeout(10_000)
    times["while it polls for 10 s"] = late(page)
    times |= scroll(page)
    page.keyboard.press("Tab")
    steps = 40
    took = milliseconds(lambda: [page.keyboard.press("j") for _ in range(steps)] and page.evaluate(DRAWN))
    times["a step with the key j"] = round(took / steps, 1)
    return times


def measure_run(page: Page, job_id: str, num_layers: int) -> dict[str, Any]:
    def shown() -> None:
        page.goto(f"/ui/jobs/{job_id}")
        expect(page.get_by_role("img", name=f"of {num_layers:,} layers")).to_be_visible()

    times: dict[str, Any] = {"all layers in the chart": milliseconds(shown)}
    page.evaluate(WATCH)
    chart = page.get_by_role("group", name="Relative weight error")
    status = page.locator(".chart [role=status]")

    def measure_of(value: str) -> None:
        page.get_by_label("Metric").select_option(value)
        page.evaluate(DRAWN)

    times["another measure"] = milliseconds(lambda: measure_of("sqnr_db"))
    measure_of("relative_error")
    box = chart.bounding_box()
    assert box is not None

    def pick() -> None:
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        expect(status).to_contain_text("model.layers.")

    times["a click on a point"] = milliseconds(pick)
    chart.focus()
    steps = 40
    took = milliseconds(lambda: [page.keyboard.press("ArrowRight") for _ in range(steps)] and page.evaluate(DRAWN))
    times["a step with an arrow key"] = round(took / steps, 1)

    def table() -> None:
        page.get_by_text("Show as table").click()
        expect(page.locator("details tbody tr")).to_have_count(50)

    times["the table"] = milliseconds(table)
    times["at its worst"] = late(page)
    return times | scroll(page)


def measure_compare(page: Page, num_results: int) -> dict[str, Any]:
    rows = page.locator(".results tbody tr")
    [(label, value)] = RESULTS_LABEL.items()

    def shown() -> None:
        page.goto(f"/ui/compare?label={label}%3D{value}&state=succeeded")
        expect(page.locator(".results table")).to_have_attribute("aria-rowcount", str(num_results + 1))
        expect(rows.nth(1)).to_be_visible()
        expect(page.get_by_role("img", name="Perplexity and size of each run")).to_be_visible()

    def sort() -> None:
        page.get_by_role("button", name="Size", exact=True).click()
        expect(page.get_by_role("columnheader", name="Size")).to_have_attribute("aria-sort", "ascending")
        page.evaluate(DRAWN)

    times: dict[str, Any] = {"all runs in the table and the chart": milliseconds(shown)}
    expect(page.get_by_role("img", name=f"of each layer in {NUM_OVERLAID} runs")).to_be_visible(timeout=60_000)
    page.evaluate(WATCH)
    times["sorted by another metric"] = milliseconds(sort)
    times["the layers of one run less"] = milliseconds(
        lambda: (rows.first.get_by_role("checkbox").uncheck(), page.evaluate(DRAWN))
    )
    chart = page.get_by_role("group", name="Perplexity and size of each run")
    chart.focus()
    steps = 40
    took = milliseconds(lambda: [page.keyboard.press("ArrowRight") for _ in range(steps)] and page.evaluate(DRAWN))
    times["a step with an arrow key"] = round(took / steps, 1)
    times["at its worst"] = late(page)
    table, whole = scroll(page, ".results"), scroll(page)
    return times | {f"the table, {name}": each for name, each in table.items()} | whole


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.dashboard", description=__doc__)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--layers", type=int, default=2000)
    parser.add_argument("--results", type=int, default=500, help="runs in the comparison, which are among the jobs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bf-bench-", dir="/tmp") as folder:
        result = measure(Path(folder) / "home", options.jobs, options.layers, options.results)
    save({"date": date.today().isoformat(), **result})


def measure(home: Path, num_jobs: int, num_layers: int, num_results: int) -> dict[str, Any]:
    """Return the machine, and the times in milliseconds."""
    with LocalStack(home, 0) as stack, open_browser() as browser:
        job_id = fill(stack.database_url, num_jobs, num_layers, num_results)
        page = browser.new_page(base_url=stack.url, viewport={"width": 1280, "height": 900})
        load = os.getloadavg()[0]
        page.goto(f"/ui/#key={stack.api_key}")
        expect(page.get_by_role("heading", name="Runs")).to_be_visible()
        times = {
            f"list of {num_jobs:,} jobs": measure_list(page, num_jobs - num_results),
            f"run of {num_layers:,} layers": measure_run(page, job_id, num_layers),
            f"comparison of {num_results:,} runs": measure_compare(page, num_results),
        }
        machine = f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}; Chromium {browser.version}, headless"
        return {"machine": machine, "milliseconds": times}


def save(result: dict[str, Any]) -> None:
    lines = [f"# Dashboard, {result['date']}", "", f"`make bench-dashboard`; {result['machine']}. Milliseconds.", ""]
    for title, numbers in result["milliseconds"].items():
        lines += [f"## {title.capitalize()}", "", "| what | ms |", "|---|---:|"]
        for name, value in numbers.items():
            entries = (
                {name: value} if not isinstance(value, dict) else {f"{name}: longest {k}": v for k, v in value.items()}
            )
            lines += [f"| {what} | {number} |" for what, number in entries.items()]
        lines.append("")
    lines += [
        "A frame is what the browser draws 60 times a second, which is every 16.7 ms; a task keeps it from answering. "
        "The browser does not tell of tasks below 50 ms: they read as 0.",
        "",
    ]
    target = RESULTS / f"{result['date']}-dashboard"
    target.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    target.with_suffix(".md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
