"""The process that waits to verify. Each test is a program of its own: a fork needs a process with one thread."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a process with torch is forked on Linux alone")
START = """
import json, os, sys, threading, time
from pathlib import Path
from quantcore.sandbox.fork_server import standing_by, waiting

notes = ["before"]

def verify(arguments):
    print(json.dumps({"kind": "seen", "arguments": arguments, "notes": notes, "pid": os.getpid()}))
    {then}
    return 3

def lines_of(standby):
    return [json.loads(line) for line in standby.verify(Path("folder"), Path("scratch"))]

"""


def run(then: str, program: str) -> None:
    script = START.replace("{then}", then) + program
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_each_proof_has_a_process_that_has_seen_nothing_of_the_job() -> None:
    program = """
with standing_by(verify):
    notes.append("after")
    (first, end), (second, _) = lines_of(waiting()), lines_of(waiting())
assert first["arguments"] == ["folder", "scratch"] and first["notes"] == ["before"]
assert len({os.getpid(), first["pid"], second["pid"]}) == 3
assert end == {"kind": "ended", "status": 3}
assert waiting() is None
"""
    run("pass", program)


def test_a_proof_that_raises_or_is_killed_says_so() -> None:
    program = """
with standing_by(verify):
    assert lines_of(waiting())[-1]["status"] == 1
"""
    run("raise RuntimeError", program)
    program = """
with standing_by(verify):
    assert [line.get("status") for line in lines_of(waiting())] == [None, -9]
    assert lines_of(waiting())[-1]["status"] == -9, "the next one has a process again"
"""
    run("sys.stdout.flush(); os.kill(os.getpid(), 9)", program)


def test_ctrl_c_is_left_to_the_engine() -> None:
    """It goes to every process of the terminal."""
    program = """
import signal
with standing_by(verify):
    lines_of(waiting())
    os.kill(waiting().pid, signal.SIGINT)
    assert lines_of(waiting())[-1]["status"] == 3
"""
    run("pass", program)


def test_a_proof_ends_when_the_engine_says_so() -> None:
    program = """
def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False

with standing_by(verify):
    standby = waiting()
    pid = json.loads(next(iter(standby.verify(Path("a"), Path("b")))))["pid"]
    assert is_alive(pid)
    standby.end()
    while is_alive(pid) or is_alive(standby.pid):
        pass
    assert waiting() is None
"""
    run("sys.stdout.flush(); time.sleep(600)", program)


def test_a_process_with_threads_is_not_forked() -> None:
    program = """
threading.Thread(target=time.sleep, args=(0.2,)).start()
with standing_by(verify):
    assert waiting() is None
"""
    run("pass", program)
