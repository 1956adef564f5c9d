"""The service of the fault matrix: real processes on small disks of their own, which are started again when they end.

Leases and intervals are a ninth of the usual ones, and so are the times for which the faults last.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import psycopg
from psycopg.rows import dict_row
from pydantic import SecretStr

from api.http.security import create_key
from api.settings import Settings
from api.store import migrate
from bitfoundry.local.stack import Postgres, Valkey
from tests.soak.service import part_of
from tests.support.faults import free_port
from tests.support.service import ROOT, STUB_ENGINE, environment_of, write_stub_model

LEASE_S = 10.0
DISKS = {"postgres": "256m", "data": "96m"}
RESERVED_BYTES = 64 << 20
TEND_S = 0.2
MODELS: dict[str, dict[str, Any]] = {
    "fast": {},
    "long": {"mode": "steady", "block_s": 0.4},
    "eats": {"mode": "eats"},
}
CLOCK = """
import time
real = time.time
def shifted():
    try:
        with open({file!r}) as shift:
            return real() + float(shift.read() or 0)
    except OSError:
        return real()
time.time = shifted
"""


class Rig:
    """The service as a context manager. Needs a mount namespace of its own (see ``tests.faults.__main__``).

    ``data`` is the folder of the API and the worker, ``postgres_disk`` that of the database, each on its own disk.
    ``clock`` is a file with the seconds by which the clock of the API and the worker is wrong.
    """

    def __init__(self, folder: Path) -> None:
        self.data, self.postgres_disk, self.models = folder / "data", folder / "postgres", folder / "models"
        self.clock = folder / "clock" / "seconds"
        self.logs = folder / "logs"
        self._folder = folder
        self._ends = ExitStack()
        self._over = threading.Event()
        self._programs: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        with ExitStack() as ends:
            self._start(ends)
            self._ends = ends.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends.close()

    def _start(self, ends: ExitStack) -> None:
        for disk, size in DISKS.items():
            (self._folder / disk).mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self._folder / disk], check=True)
        for path in (self.clock.parent, self.logs):
            path.mkdir()
        for name, stub in MODELS.items():
            write_stub_model(self.models / name, **stub)
        (self.clock.parent / "sitecustomize.py").write_text(CLOCK.format(file=str(self.clock)))
        self._postgres, self._valkey = Postgres(self.postgres_disk), Valkey(self._folder / "valkey")
        for server in (self._postgres, self._valkey):
            server.start()
            ends.callback(server.stop)
        migrate.upgrade(self._postgres.url)
        self.key = create_key(self._postgres.url, "faults")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._commands = {"api": ["-m", "api", "serve", "--port", str(port)], "worker": ["-m", "worker"]}
        self._environment = environment_of(self._settings()) | {
            "PYTHONPATH": os.pathsep.join([str(self.clock.parent), str(ROOT)])
        }
        tending = threading.Thread(target=self._tend)
        tending.start()
        ends.callback(self._end, tending)

    def _settings(self) -> Settings:
        return Settings(
            database_url=SecretStr(self._postgres.url), broker_url=SecretStr(self._valkey.url), data_dir=self.data,
            model_roots=(self.models,), lease_s=LEASE_S, heartbeat_s=1.5, poll_s=1, stop_grace_s=3, retry_base_s=1,
            slots=2, engine_threads=1, reserved_disk_bytes=RESERVED_BYTES // 2, confine_engine=False,
            engine_command=f"{sys.executable} -S {STUB_ENGINE}",
            secret_key=SecretStr(base64.b64encode(os.urandom(32)).decode()),
        )  # fmt: skip

    def _tend(self) -> None:
        """Start whatever has ended, as `bitfoundry up`, systemd or Kubernetes do."""
        while not self._over.wait(TEND_S):
            for server in (self._postgres, self._valkey):
                if server.poll() is not None:
                    with suppress(Exception):  # a full disk, or the rest of the one before: next time
                        server.start_again()
            for name, arguments in self._commands.items():
                if name not in self._programs or self._programs[name].poll() is not None:
                    with (self.logs / f"{name}.log").open("ab") as log:
                        command = [sys.executable, *arguments]
                        self._programs[name] = subprocess.Popen(
                            command, cwd=ROOT, env=self._environment, stdout=log, stderr=log
                        )

    def _end(self, tending: threading.Thread) -> None:
        self._over.set()
        tending.join()
        for process in self._programs.values():
            process.kill()
            process.wait()

    def part(self, name: str) -> list[psutil.Process]:
        """Return the processes of a part, its main one first."""
        processes = psutil.Process().children(recursive=True)
        return [process for process in processes if part_of(process) == name]

    @contextmanager
    def database(self) -> Iterator[psycopg.Connection[dict[str, Any]]]:
        """Connect to the database, with a transaction for each statement."""
        url = self._postgres.url.replace("+psycopg", "", 1)
        with psycopg.connect(url, autocommit=True, connect_timeout=5, row_factory=dict_row) as connection:
            connection.execute("SET statement_timeout = 5000")
            yield connection

    @property
    def broker_path(self) -> str:
        return self._valkey.url.removeprefix("redis+socket://")
