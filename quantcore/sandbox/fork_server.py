"""A process that waits to verify, so that the proof's fresh process need not load the libraries a second time.

It is forked before a job begins: it has loaded what the engine has loaded, and has seen nothing of the job. For each
proof it forks a process that reads the files from the disk and ends. On systems where a fork of a process with torch is
not safe (all but Linux), and in processes that have started threads, there is none: then a new interpreter verifies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from quantcore.sandbox.parent_death import end_with_parent

ENDED = "ended"
"""The ``kind`` of the line that ends a proof's output. It has the exit ``status``."""


@dataclass
class ForkServer:
    """The waiting process, seen from the engine: ``orders`` go there, ``lines`` come from its proofs."""

    pid: int
    orders: TextIO
    lines: TextIO

    def verify(self, folder: Path, scratch: Path) -> Iterator[str]:
        """Yield the lines that a fresh process prints about ``folder``; the last one is that of ``ENDED``."""
        self.orders.write(json.dumps([str(folder), str(scratch)]) + "\n")
        self.orders.flush()
        for line in self.lines:
            yield line
            if json.loads(line)["kind"] == ENDED:
                return

    def end(self) -> None:
        """End the process, and a proof that it runs."""
        global _standby
        _standby = None
        self.orders.close()
        self.lines.close()
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)


_standby: ForkServer | None = None


@contextmanager
def standing_by(verify: Callable[[Sequence[str]], int]) -> Iterator[None]:
    """Keep a process waiting that calls ``verify([folder, scratch])`` with its output in a pipe."""
    global _standby
    if sys.platform == "linux" and threading.active_count() == 1 and _standby is None:
        _standby = _start(verify)
    own = _standby
    try:
        yield
    finally:
        if own is not None and _standby is own:
            own.end()


def waiting() -> ForkServer | None:
    """Return the waiting process of this process, if there is one."""
    return _standby


def _start(verify: Callable[[Sequence[str]], int]) -> ForkServer:
    orders, to_engine = os.pipe(), os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(orders[1])
        os.close(to_engine[0])
        _wait_for_orders(verify, os.fdopen(orders[0]), to_engine[1])
    os.close(orders[0])
    os.close(to_engine[1])
    return ForkServer(pid, os.fdopen(orders[1], "w"), os.fdopen(to_engine[0]))


def _wait_for_orders(verify: Callable[[Sequence[str]], int], orders: TextIO, to_engine: int) -> None:
    """Run one proof after another, each in a process of its own, until the engine closes the pipe; never returns.

    Ctrl-C goes to all processes of a terminal, and the engine is the one that ends in order.
    """
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(to_engine, sys.stdout.fileno())
    for order in iter(orders.readline, ""):
        pid = os.fork()
        if pid == 0:
            end_with_parent()
            os._exit(_status_of(verify, json.loads(order)))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(to_engine, (json.dumps({"kind": ENDED, "status": status}) + "\n").encode())
    os._exit(0)


def _status_of(verify: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Return the exit status of a proof, as the interpreter would end: with a traceback for an unknown error."""
    try:
        return verify(arguments)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
