"""The service of the soak: ``bitfoundry up`` on its own small disk, with short leases."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import psutil
import psycopg
from psycopg.rows import dict_row

from tests.support.faults import in_own_mounts
from tests.support.models import tiny_model
from tests.support.service import write_stub_model

ENGINE = Path(__file__).with_name("engine.py")
DISK = "768m"  # PostgreSQL alone takes a hundred
READY_S = 120.0
SETTINGS = {
    "BITFOUNDRY_LEASE_S": "10",
    "BITFOUNDRY_HEARTBEAT_S": "1",
    "BITFOUNDRY_POLL_S": "1",
    "BITFOUNDRY_STOP_GRACE_S": "3",
    "BITFOUNDRY_RETRY_BASE_S": "0.5",
    "BITFOUNDRY_SLOTS": "2",
    "BITFOUNDRY_ENGINE_THREADS": "1",
    "BITFOUNDRY_RESERVED_DISK_BYTES": str(128 << 20),
    "BITFOUNDRY_ENGINE_COMMAND": f"{sys.executable} {ENGINE}",
}
PARTS = ("postgres", "valkey", "api", "worker", "engine")
REAL = "real"


class Service:
    """The service as a context manager: ``with Service(folder) as service``; ``service.models`` has its models.

    Its home is a file system in memory of DISK bytes that outlives restarts, in a mount namespace that one of our
    processes holds (Linux; as root, or where user namespaces are allowed).
    """

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self._log = folder / "up.log"
        self.models = _write_models(folder / "models")
        self.url, self.key = "", ""
        self._environment = {name: value for name, value in os.environ.items() if not name.endswith("_URL")} | SETTINGS
        self._up: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.home.mkdir(parents=True)
        script = 'mount -t tmpfs -o size="$1" tmpfs "$2" && echo mounted && exec sleep infinity'
        command = [*in_own_mounts(), "sh", "-c", script, "sh", DISK, str(self.home)]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None and self._holder.stdout.readline() == b"mounted\n"
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        self._holder.kill()
        self._holder.communicate()

    @property
    def seen_home(self) -> Path:
        """The home as the service sees it."""
        return Path(f"/proc/{self._holder.pid}/root{self.home}")

    def start(self) -> None:
        """Start the service on the data of an earlier run, and wait until it prints its address."""
        enter = ["nsenter", "-t", str(self._holder.pid), "-m", *([] if os.geteuid() == 0 else ["-U"])]
        command = [sys.executable, "-m", "bitfoundry", "up", "--home", str(self.home), "--port", "0", "--json"]
        command += ["--models", str(self.models)]
        with self._log.open("ab") as log:
            self._up = subprocess.Popen(
                [*enter, f"--wd={Path.cwd()}", *command], stdout=subprocess.PIPE, stderr=log, env=self._environment
            )
        assert self._up.stdout is not None
        output = ""
        while "}" not in output:
            line = self._up.stdout.readline().decode()
            if not line:
                raise RuntimeError(f"the service did not start:\n{self._log.read_text()[-3000:]}")
            output += line
        connection = json.loads(output)
        self.url, self.key = connection["url"], connection["api_key"]

    def stop(self) -> int:
        """End the service in order, and return its exit status."""
        assert self._up is not None
        self._up.send_signal(signal.SIGTERM)
        self._up.communicate(timeout=READY_S)
        return self._up.returncode

    def kill(self) -> None:
        """Kill the service, with which all that it has started must end."""
        assert self._up is not None
        below = self.processes()
        self._up.kill()
        self._up.communicate()
        _, alive = psutil.wait_procs(below, timeout=40)
        if alive:
            raise AssertionError(f"these outlived `up`: {[process.cmdline() for process in alive]}")

    def is_up(self) -> bool:
        return self._up is not None and self._up.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the service."""
        assert self._up is not None
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._up.pid).children(recursive=True)
        return []

    def part(self, name: str) -> list[psutil.Process]:
        """Return the processes of a part, its main one first."""
        processes = [process for process in self.processes() if part_of(process) == name]
        return sorted(processes, key=lambda process: process.create_time())

    def ask(self, method: str, path: str, **more: Any) -> httpx2.Response:
        """Send a request. Raises httpx2.TransportError."""
        headers = {"Authorization": f"Bearer {self.key}"} | more.pop("headers", {})
        return httpx2.request(method, f"{self.url}{path}", headers=headers, trust_env=False, timeout=30, **more)

    @contextmanager
    def database(self) -> Iterator[psycopg.Connection[dict[str, Any]]]:
        """Connect to the database. Raises psycopg.OperationalError while it is away. Waits are at most five seconds."""
        socket = next(iter(_sockets(self.part("postgres"))), None)
        if socket is None:
            raise psycopg.OperationalError("PostgreSQL does not run")
        with psycopg.connect(
            host=str(socket), dbname="bitfoundry", user="postgres", connect_timeout=5,
            options="-c statement_timeout=5000", row_factory=dict_row,
        ) as connection:  # fmt: skip
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            yield connection

    def await_ready(self) -> None:
        """Wait until the API is ready and a worker lives."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            with suppress(httpx2.TransportError):
                if self.ask("GET", "/healthz/ready").status_code == 200 and self.part("worker"):
                    return
            time.sleep(0.5)
        raise AssertionError(f"the service was not ready {READY_S:.0f} s after the last fault")


def part_of(process: psutil.Process) -> str:
    """Return the part of PARTS that a process belongs to, or ''."""
    with suppress(psutil.Error):
        words = process.cmdline()
        if process.name() in ("postgres", "valkey-server"):
            return process.name().partition("-")[0]
        if any(word.endswith("task.json") for word in words):
            return "engine"
        if "-m" in words and words[words.index("-m") + 1] in ("api", "worker"):
            return words[words.index("-m") + 1]
    return ""


def _sockets(servers: list[psutil.Process]) -> Iterator[Path]:
    for server in servers[:1]:
        for word in server.cmdline():
            if word.startswith("unix_socket_directories="):
                yield Path(word.partition("=")[2])


def _write_models(folder: Path) -> Path:
    """Write one model for each way in which the stub can end, and a real one."""
    for mode in ("fast", "steady", "slow_once", "goes_on", "killed", "fails", "fails_retryable", "tamper"):
        write_stub_model(folder / mode, mode=mode)
    tiny_model(folder / REAL)
    return folder


def new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix=f"bf-soak-{secrets.token_hex(2)}-", dir="/tmp"))
