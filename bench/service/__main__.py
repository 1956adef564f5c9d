"""``make bench-service``: the service under load, with the client, the API, PostgreSQL and Valkey on this one machine.

Each number is taken by real processes: ``python -m api serve`` on a durable PostgreSQL, asyncio clients over HTTP, and
claims as a worker makes them. No engine runs: what is measured is the queue. The result is one dated file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from bench.service import steps
from bench.service.stack import Stack

RESULTS = Path(__file__).parents[1] / "results"
WATCH_S = 30
AIMS = {
    "submissions": "100 a second, p99 under 0.5 s",
    "pollers": "500 at one a second, p99 under 0.25 s",
    "streams": "500, event to client p95 under 1 s",
    "claims": "p99 under 0.05 s with 10,000 waiting",
    "wake-up to claim": "p95 under 1 s with Valkey, under 12 s without",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.service", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--rate", type=float, default=100.0, help="submissions a second")
    parser.add_argument("--clients", type=int, default=500, help="pollers, and streams")
    parser.add_argument("--queued", type=int, default=10_000, help="jobs that wait while claims are measured")
    parser.add_argument("--processes", type=int, default=2, help="of the API")
    options = parser.parse_args()
    load_before = os.getloadavg()
    results: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bf-bench-", dir="/tmp") as folder,
        Stack(Path(folder), num_processes=options.processes) as stack,
        _watched(stack) as rss_mb,
    ):
        for name, step in (
            ("submissions", lambda: steps.submissions(stack, options.rate, options.seconds)),
            ("pollers", lambda: steps.pollers(stack, options.clients, options.seconds)),
            ("streams", lambda: steps.streams(stack, options.clients, options.seconds)),
            ("claims", lambda: steps.claims(stack, options.queued)),
            ("wake-up to claim", lambda: steps.wake_ups(stack)),
        ):
            used_s = stack.api_cpu_s()
            results[name] = step() | {"api_cpu_s": round(stack.api_cpu_s() - used_s, 1), "api_rss_mb": _rss_mb(stack)}
            print(f"{name}: {results[name]}   (aim: {AIMS[name]})", flush=True)
    report = {
        "date": date.today().isoformat(),
        "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
        "load_average_before_and_after": [load_before, os.getloadavg()],
        "settings": vars(options),
        "aims": AIMS,
        "found": results,
        f"api_rss_mb_every_{WATCH_S}_s": rss_mb,
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{report['date']}-service.json"
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"kept in {file}")
    return 0


@contextmanager
def _watched(stack: Stack) -> Iterator[list[int]]:
    """Record the memory of the API every ``WATCH_S`` seconds: a leak shows."""
    samples_mb: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_S):
            samples_mb.append(_rss_mb(stack))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield samples_mb
    finally:
        over.set()
        watching.join()


def _rss_mb(stack: Stack) -> int:
    return round(stack.api_rss_bytes() / 1e6)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
