"""One interpreter that forks a fresh process for every proof of the tests' jobs: a new one would import for seconds.

Started as a program it waits for orders as ``quantcore.sandbox.fork_server`` does. A proof has the environment, the
folder and the packages of the test that asks for it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from quantcore.sandbox import fork_server

SURROUNDINGS = "surroundings.json"


class ProofServer:
    """Stands in for the waiting process of a command; it starts with the first proof."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def verify(self, folder: Path, scratch: Path) -> Iterator[str]:
        """Yield the lines of a proof, as ``ForkServer.verify`` does."""
        around = {"environ": dict(os.environ), "cwd": str(Path.cwd()), "path": sys.path}
        (scratch / SURROUNDINGS).write_text(json.dumps(around), "utf-8")
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        orders, lines = self._process.stdin, self._process.stdout
        assert orders is not None and lines is not None
        yield from fork_server.ForkServer(self._process.pid, orders, lines).verify(folder, scratch)

    def end(self) -> None:
        """End the process, and a proof that it runs; the next proof starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _verify(arguments: Sequence[str]) -> int:
    from quantcore.cli.running import verify

    around = json.loads((Path(arguments[1]) / SURROUNDINGS).read_text("utf-8"))
    os.environ.clear()
    os.environ.update(around["environ"])
    os.chdir(around["cwd"])
    sys.path[:] = around["path"]
    return verify(arguments)


def main() -> None:
    from quantcore.cli.running import ENGINE

    for name in ENGINE:
        importlib.import_module(name)
    fork_server._wait_for_orders(_verify, sys.stdin, os.dup(sys.stdout.fileno()))


if __name__ == "__main__":
    main()
