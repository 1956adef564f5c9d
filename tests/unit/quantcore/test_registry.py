"""Plug-ins by name: all of them are there for whoever asks, however many ask at first."""

import subprocess
import sys


def test_many_first_look_ups_at_once_find_everything() -> None:
    code = """
import sys, threading
sys.setswitchinterval(1e-6)
from quantcore.export import EXPORTERS
found, together = [], threading.Barrier(8)

def look():
    together.wait()
    found.append(len(list(EXPORTERS)))

threads = [threading.Thread(target=look) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(set(found)) == 1, found
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
