"""``make soak``: the whole service for an hour under faults that a seed draws, held against its promises all along.

The same seed draws the same faults and requests; what they meet differs from run to run, as processes do.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from collections import Counter

from tests.soak.client import Client
from tests.soak.faults import FAULTS
from tests.soak.invariants import check_at_rest, check_now, come_to_rest
from tests.soak.service import Service, new_folder

REST_EVERY_S = 600.0
MAX_PAUSE_S = 4.0  # between faults


def soak(seed: int, minutes: float) -> list[str]:
    """Run the soak and return the broken promises in words. Prints each step."""
    draw, folder = random.Random(seed), new_folder()
    print(f"seed {seed}, {minutes:g} minutes, in {folder}", flush=True)
    began, counted, wrong = time.monotonic(), Counter[str](), []
    with Service(folder) as service:
        client = Client(service, draw)
        rested = began
        while not wrong and time.monotonic() - began < 60 * minutes:
            for _ in range(draw.randrange(1, 8)):
                client.act()
            if time.monotonic() - rested > REST_EVERY_S:
                wrong = come_to_rest(client) or check_at_rest(client)
                rested = time.monotonic()
            fault = draw.choices([*FAULTS], [*FAULTS.values()])[0]
            what = fault(service, draw)
            counted[fault.__name__] += 1
            print(f"{time.monotonic() - began:7.1f} s  {fault.__name__}: {what}", flush=True)
            time.sleep(draw.random() * MAX_PAUSE_S)
            wrong = wrong or check_now(client)
        wrong = wrong or come_to_rest(client) or [*check_now(client), *check_at_rest(client)]
        ends = Counter(f"{job.mode} {job.code or job.final}" for job in client.jobs.values())
        print(f"faults: {dict(counted)}\njobs: {dict(sorted(ends.items()))}")
        print(f"requests: {client.num_sent}, of which {client.num_unavailable} found the service away")
        print(f"checks: {client.num_checks}, of which {client.num_blind} found the database away")
        if client.num_blind > client.num_checks / 2:
            wrong = [*wrong, "most checks saw nothing"]
        if wrong:
            kept = folder / "kept"
            shutil.copytree(service.seen_home / "logs", kept)
            print(f"logs: {kept}, {folder / 'up.log'}")
    if not wrong:
        shutil.rmtree(folder)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="draws faults and requests (default: the time)"
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    wrong = soak(options.seed, options.minutes)
    for what in wrong:
        print(f"WRONG: {what}")
    print("all promises held" if not wrong else f"seed {options.seed}: {len(wrong)} promises broken")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
