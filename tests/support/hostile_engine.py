"""An engine that a model can take over, for tests: it does the ``mode`` in the model's ``stub.json`` until it is ended.

Models without one get the real engine.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path

NUM_PROCESSES = 8
HOARD_BYTES = 900 << 20  # below the limit of the smallest plan


def spin() -> None:
    """Keep all cores busy, with many processes."""
    for _ in range(NUM_PROCESSES - 1):
        if os.fork() == 0:
            break
    while True:
        sum(range(1000))


def hoard() -> None:
    """Hold as much memory as is allowed, and write to all of it again and again."""
    hoard = bytearray(HOARD_BYTES)
    while True:
        for at in range(0, HOARD_BYTES, 4096):
            hoard[at] ^= 1


def eat() -> None:
    """Take memory until somebody ends this."""
    taken = []
    while True:
        taken.append(b"x" * (64 << 20))


def talk() -> None:
    """Print large events as fast as they are taken."""
    number, text = 0, "x" * 10_000
    print(json.dumps({"kind": "phase_started", "phase": "quantize"}), flush=True)
    while True:
        number += 1
        print(json.dumps({"kind": "warning", "code": "said", "message": text, "number": number}), flush=True)


def log() -> None:
    """Write lines to the log as fast as they are taken."""
    while True:
        sys.stderr.write("a line of the log " * 20 + "\n")


def write() -> None:
    """Write to the disk and flush it, again and again."""
    block = os.urandom(16 << 20)
    file = Path(os.environ["TMPDIR"], "written")
    while True:
        with file.open("wb") as stream:
            stream.write(block)
            os.fsync(stream.fileno())


def wait() -> None:
    """Do nothing for ten minutes: a job that is no attack."""
    time.sleep(600)


MODES = {"spins": spin, "hoards": hoard, "eats": eat, "talks": talk, "logs": log, "writes": write}

if __name__ == "__main__":
    orders = Path(json.loads(Path(sys.argv[-1]).read_text())["model_dir"], "stub.json")
    if orders.exists():
        (MODES | {"waits": wait})[json.loads(orders.read_text())["mode"]]()
    sys.path.pop(0)  # this file's folder has modules with the names of libraries
    sys.argv[:] = ["quantcore", "run", sys.argv[-1]]
    runpy.run_module("quantcore", run_name="__main__", alter_sys=True)
